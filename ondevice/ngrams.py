"""The n-gram pool of lookahead decoding (Fu et al. 2024, arXiv 2402.02057, section 3.2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_KEYS = 1 << 14
"""First tokens that have n-grams; those used least recently are forgotten."""


class NgramPool:
    """By first token the latest different continuations, `guesses` of them a token at most.

    Memory: MOST_KEYS * guesses tuples of N - 1 tokens, whatever is added.
    """

    def __init__(self, guesses: int) -> None:
        self._most = guesses
        self._keys: OrderedDict[int, dict[tuple[int, ...], bool]] = OrderedDict()

    def __len__(self) -> int:
        """N-grams."""
        return sum(len(kept) for kept in self._keys.values())

    def add(self, key: int, rest: tuple[int, ...], *, found: bool = False) -> None:
        """`rest` followed `key`; it is now the latest of its key.

        found: a window found it. What the text has too counts as the text's.
        """
        kept = self._keys.setdefault(key, {})
        self._keys.move_to_end(key)
        kept[rest] = kept.pop(rest, True) and found
        if len(kept) > self._most:
            del kept[next(iter(kept))]
        if len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)

    def add_text(self, tokens: Sequence[int], ngram: int, start: int = 0) -> None:
        """The n-grams of a text that begin at index `start` or later."""
        for at in range(start, len(tokens) - ngram + 1):
            self.add(tokens[at], tuple(tokens[at + 1 : at + ngram]))

    def get(self, key: int) -> list[tuple[tuple[int, ...], bool]]:
        """What followed `key`, the oldest first, and whether a window found it."""
        return list(self._keys.get(key, {}).items())
