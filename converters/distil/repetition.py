"""Text that says things again, from which a few layers learn to copy.

To write what followed the same token before takes two attention layers that work together (Olsson
et al. 2022, In-context Learning and Induction Heads). After 2.9M input tokens of a verifier's
answers the default student had not formed them: inside the loops of held-out answers, which a look
at the text before foretells entirely, 42 % of its first choices were right, as many as elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ondevice.converters.distil.decoding import TOP
from ondevice.converters.distil.shards import Text

ECHO = "echo"
_SHUFFLED = 0.4  # of the echoes, so that no habit of the language helps
_ADJACENT = 0.4  # of the echoes, as in a loop; the others have other text between
_CONTEXT, _PASSAGE, _GAP = (4, 40), (8, 80), (1, 100)  # tokens: least, and less than
_MANY_ROUNDS = 32  # tokens of a passage from which on it is said twice only
_MOST_ROUNDS = 5

_Tokens = npt.NDArray[np.unsignedinteger]


def loop_gone_on(text: Text, limit: int) -> Text:
    """`text` with the loop that it was cut at gone on with to `limit` answer tokens.

    It was cut when the loop had been seen twice. The distributions of the second round stand for
    those of later ones.
    """
    answer = text.tokens[text.answer :]
    count = len(answer)
    period = _last_period(answer) if text.looped else None
    if period is None or count >= limit:
        return text
    added = count - period + np.arange(limit - count) % period
    rounds = text.answer - text.start + added
    return replace(
        text,
        tokens=np.concatenate([text.tokens, answer[added]]),
        top_tokens=np.concatenate([text.top_tokens, text.top_tokens[rounds]]),
        top_logprobs=np.concatenate([text.top_logprobs, text.top_logprobs[rounds]]),
    )


def _last_period(tokens: _Tokens) -> int | None:
    """The longest period of which `tokens` end in two rounds: a loop was cut to just two."""
    count = len(tokens)
    for period in range(count // 2, 0, -1):
        if np.array_equal(tokens[count - period :], tokens[count - 2 * period : count - period]):
            return period
    return None


def echoes(texts: Sequence[Text], share: float, seed: int) -> list[Text]:
    """Passages of `texts` that are said again, with `share` of their number of tokens in all.

    A passage stands behind some other text, and again at once or after a little more. From its
    second token on the repetition is learned: the target is the passage's own token, which is not
    the verifier's distribution but close to it.
    """
    source = np.random.Generator(np.random.Philox(key=[seed, len(texts)]))
    wanted = share * sum(len(text.tokens) for text in texts)
    made: list[Text] = []
    tokens = 0
    while tokens < wanted:
        made.append(_echo(texts, source, len(made)))
        tokens += len(made[-1].tokens)
    return made


def _echo(texts: Sequence[Text], source: np.random.Generator, index: int) -> Text:
    passage = _passage(texts, source)
    adjacent = source.random() < _ADJACENT
    between = [] if adjacent else [_cut(texts, source, _GAP)]
    loops = adjacent and len(passage) < _MANY_ROUNDS
    rounds = int(source.integers(1, _MOST_ROUNDS)) if loops else 1
    before = np.concatenate([_cut(texts, source, _CONTEXT), passage, *between, passage[:1]])
    learned = np.concatenate([passage[1:], *[passage] * (rounds - 1)])
    top_tokens = np.zeros((len(learned), TOP), learned.dtype)
    top_tokens[:, 0] = learned
    top_logprobs = np.full(top_tokens.shape, -np.inf, np.float16)
    top_logprobs[:, 0] = 0
    return Text(
        index=index,
        domain=ECHO,
        temperature=0.0,
        tokens=np.concatenate([before, learned]),
        start=len(before),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        answer=len(before),
    )


def _passage(texts: Sequence[Text], source: np.random.Generator) -> _Tokens:
    """A passage of one text, or tokens of several in disorder."""
    if source.random() >= _SHUFFLED:
        return _cut(texts, source, _PASSAGE)
    pieces = [_cut(texts, source, _PASSAGE) for _ in range(4)]
    return source.permutation(np.concatenate(pieces))[: int(source.integers(*_PASSAGE))]


def _cut(texts: Sequence[Text], source: np.random.Generator, between: tuple[int, int]) -> _Tokens:
    """Some tokens that follow each other in one text; fewer where it is short."""
    tokens = texts[int(source.integers(len(texts)))].tokens
    length = min(int(source.integers(*between)), len(tokens))
    first = int(source.integers(len(tokens) - length + 1))
    return tokens[first : first + length]
