"""A drafter of given quality: it knows the verifier's text, and errs as often as it is told to.

Where a row stands on the verifier's own text, a confidence c ~ Beta(1.6 a, 1.6 (1 - a)), of mean a,
is drawn; the children have probability c, and then 0.45 of what is left each; which of them is the
verifier's token, or none, is drawn with exactly these probabilities. So confidences are honest, and
the first child is right with probability a (it need not be the likeliest). All is drawn by seed,
text and position before the first step: it depends on no schedule.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ondevice.errors import UnitFailed
from ondevice.records import DraftResult, DraftRow, NodeToken, Proposal
from ondevice.units import DraftRequest

CHILDREN = 4
SIBLING_SHARE = 0.45
CONCENTRATION = 1.6
ROWS_A_STEP = 8
WRONG_FAMILIES = 4096
"""Different families of rows that are off the text; which one a row has is a hash of its place."""
LEAST = 1e-9
"""Confidences stay this far from 0 and 1, where a logarithm would be infinite."""


@dataclass(frozen=True, slots=True)
class Quality:
    """a: how often the first child is right. step_ms: time of a step of up to ROWS_A_STEP rows."""

    a: float
    step_ms: float = 10.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """Children of a row, first choice first: their tokens and log-probabilities.

    There is one log-probability more than tokens, of the choice that would come next.
    """

    tokens: tuple[int, ...]
    log_q: tuple[float, ...]


def probabilities(confidence: float) -> tuple[float, ...]:
    """Of the CHILDREN children and of the one that would come next."""
    left, shares = 1 - confidence, [confidence]
    for _ in range(CHILDREN):
        shares.append(left * SIBLING_SHARE)
        left -= shares[-1]
    return tuple(shares)


def family(rng: np.random.Generator, a: float, vocab_size: int, truth: int | None) -> Family:
    """Draw a row's children. truth: the verifier's token there; None off its text."""
    confidence = float(rng.beta(CONCENTRATION * a, CONCENTRATION * (1 - a)))
    shares = probabilities(min(max(confidence, LEAST), 1 - LEAST))
    right = int(np.searchsorted(np.cumsum(shares[:CHILDREN]), rng.random(), side="right"))
    tokens = [int(token) for token in rng.choice(vocab_size, CHILDREN + 1, replace=False)]
    if truth is not None:
        tokens = [token for token in tokens if token != truth][:CHILDREN]
        if right < CHILDREN:
            tokens[right] = truth
    return Family(tuple(tokens[:CHILDREN]), tuple(math.log(share) for share in shares))


@cache
def wrong_families(a: float, seed: int, vocab_size: int) -> list[Family]:
    """What rows off the text have: WRONG_FAMILIES of them, of the same law."""
    rng = np.random.default_rng([seed, 0])
    return [family(rng, a, vocab_size, None) for _ in range(WRONG_FAMILIES)]


@dataclass(slots=True)
class KnownText:
    """A prompt and the verifier's answer to it, with a family for every position of the answer."""

    tokens: list[int]
    families: dict[int, Family]


@dataclass(slots=True)
class _Session:
    tokens: list[int] = field(default_factory=list)
    nodes: dict[int, int] = field(default_factory=dict)


class GivenQualityDrafter:
    """See `ondevice.units.DrafterUnit`. `learn` may be called from any thread between answers."""

    name = "given-quality"

    def __init__(self, quality: Quality, vocab_size: int) -> None:
        self.quality = quality
        self.vocab_size = vocab_size
        self.steps = 0
        self._texts: list[KnownText] = []
        self._wrong = wrong_families(quality.a, quality.seed, vocab_size)
        self._sessions: dict[int, _Session] = {}
        self._handles = itertools.count()

    @property
    def runtime_name(self) -> str:
        return f"test double of given quality, a = {self.quality.a:g}"

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The verifier answers `prompt` with `answer`; recorded beforehand."""
        quality, start = self.quality, len(prompt)
        key = [quality.seed, 1, len(self._texts)]
        families = {
            start + index: family(
                np.random.default_rng([*key, start + index]), quality.a, self.vocab_size, token
            )
            for index, token in enumerate(answer)
        }
        self._texts.append(KnownText([*prompt, *answer], families))

    def open_session(self) -> int:
        handle = next(self._handles)
        self._sessions[handle] = _Session()
        return handle

    def close_session(self, session: int) -> None:
        self._sessions.pop(session, None)

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Takes no time: what is measured is decoding."""
        at = self._at(session)
        at.nodes.clear()
        at.tokens.extend(tokens)
        return len(at.tokens)

    def draft(self, request: DraftRequest) -> DraftResult:
        """Sleeps until the time of its steps is over. Greedy only: the text is that of no noise."""
        start_ns = time.monotonic_ns()
        if not request.law.greedy:
            raise UnitFailed("a drafter of given quality knows greedy text only")
        at = self._at(request.session)
        self._commit(at, request.committed)
        for node in request.dropped:
            at.nodes.pop(node, None)
        text = self._text_of(at.tokens)
        proposals = [
            proposal
            for row in request.rows
            for proposal in self._children(at, text, row, request.children)
        ]
        steps = max(1, -(-len(request.rows) // ROWS_A_STEP))
        self.steps += steps
        end_ns = start_ns + round(steps * self.quality.step_ms * 1e6)
        time.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
        return DraftResult(
            step=request.step,
            proposals=tuple(proposals),
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            catch_up_steps=steps - 1,
        )

    def truncate(self, session: int, length: int) -> None:
        at = self._at(session)
        if not 0 <= length <= len(at.tokens):
            raise UnitFailed(f"cannot keep {length} tokens of {len(at.tokens)}")
        at.nodes.clear()
        del at.tokens[length:]

    def close(self) -> None:
        self._sessions.clear()

    def _at(self, session: int) -> _Session:
        if session not in self._sessions:
            raise UnitFailed(f"the drafter has no session {session}; open one first")
        return self._sessions[session]

    def _commit(self, at: _Session, committed: Sequence[NodeToken]) -> None:
        for entry in committed:
            if at.nodes.pop(entry.node, entry.token) != entry.token:
                raise UnitFailed(f"node {entry.node} was committed as another token than it had")
            at.tokens.append(entry.token)

    def _text_of(self, tokens: Sequence[int]) -> KnownText | None:
        """The text that begins with `tokens`; None where no answer goes like that."""
        length = len(tokens)
        for text in self._texts:
            if length in text.families and text.tokens[:length] == tokens:
                return text
        return None

    def _children(
        self, at: _Session, text: KnownText | None, row: DraftRow, count: int
    ) -> list[Proposal]:
        if not at.tokens:
            raise UnitFailed("the drafter's session has no text; commit a token before drafting")
        path = [entry.token for entry in row.path]
        for entry in row.path:
            if at.nodes.setdefault(entry.node, entry.token) != entry.token:
                raise UnitFailed(f"node {entry.node} came back as another token")
        start, position = len(at.tokens), len(at.tokens) + len(path)
        found = None
        if text is not None and text.tokens[start:position] == path:
            found = text.families.get(position)
        if found is None:
            before = (at.tokens[-2:] + path)[-2:]
            found = self._wrong[hash((position, *before)) % WRONG_FAMILIES]
        return [
            Proposal(
                parent=row.node,
                token=found.tokens[rank],
                log_q=found.log_q[rank],
                rank=rank,
                gap=max(0.0, found.log_q[rank] - found.log_q[rank + 1]),
                proposer=self.name,
            )
            for rank in range(min(count, CHILDREN))
        ]
