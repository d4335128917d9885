"""From tokens to text: one token at a time, stop strings withheld, bytes merged across tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of one answer. Fed every committed token once, in order.

    `feed` says whether the answer ends at that token; `take` hands out the text that is certain:
    what could be the beginning of a stop string waits.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Collection[int],
        stop: Sequence[str] = (),
    ) -> None:
        """end_tokens: ids that end the text and are not shown. stop: strings that do the same."""
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._end_tokens = frozenset(end_tokens)
        self._stop = tuple(text for text in stop if text)
        self._tokens: list[int] = []
        self._text = ""
        self._taken = 0
        self._ended = False

    @property
    def text(self) -> str:
        """Everything so far, up to a stop string."""
        return self._text

    def feed(self, token: int) -> bool:
        """Append `token`; True when it ends the answer (an end token, or a stop string is met)."""
        if token in self._end_tokens:
            self._ended = True
            return True
        self._tokens.append(token)
        self._text += self._decoder.step(self._backend, token) or ""
        if self._stop:
            self._ended = self._cut_at_stop()
        return self._ended

    def finish(self) -> None:
        """No token will come any more: incomplete bytes become replacement characters."""
        if not self._ended:
            whole = self._backend.decode(self._tokens, skip_special_tokens=True)
            if whole.startswith(self._text):
                self._text = whole
            self._ended = True

    def take(self) -> str:
        """The certain text since the last call."""
        end = len(self._text) - (0 if self._ended else self._undecided())
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _cut_at_stop(self) -> bool:
        found = [at for at in map(self._text.find, self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0
