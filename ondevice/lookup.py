"""Prompt lookup: what followed the longest suffix of the text where it stood before.

The idea is prompt lookup decoding (Saxena 2023) and suffix decoding (Oliaro et al. 2024, arXiv
2411.04975). The index is that of LZ77 compressors (RFC 1951, section 4): hash chains through the
positions with equal hash, here one set of chains for each of a few suffix lengths, over a ring that
keeps the latest tokens. A token costs a constant number of operations, and a look-up too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ondevice.lane import common_prefix
from ondevice.proposers import Guess, Kind

SUFFIXES = (8, 4, 2, 1)
"""Lengths that have chains of their own, longest first."""
LONGEST_MATCH = 32
"""A match is not compared any further back: no longer one was more often right."""
TRIED = 8
"""Latest positions of a chain that are compared."""
SESSION_TOKENS = 1 << 17
"""Tokens of a session that are kept."""
BYTES_A_TOKEN = 4 * (1 + 2 * len(SUFFIXES))
"""The token itself, and for each suffix length the start of a chain and a link: 36, so that a
session's index has 4.5 MiB."""
MULTIPLIER, SPREADER = 0x01000193, 0x9E3779B1
"""A polynomial of the tokens modulo 2 ** 32, and Knuth's multiplicative hash of it."""
HASH_BITS = 32
HASH_MASK = (1 << HASH_BITS) - 1
SEPARATOR = -1
"""Between texts that do not follow each other; no token is equal to it."""

PATHS = 4
"""Continuations of one look-up."""
DEEPEST = 24
"""Tokens of a continuation."""
MOST_GUESSES = 32
"""Of one look-up."""
LEAST_REACH = 0.01
"""A continuation ends where its expected reach is less."""


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens before position `at` equal the end of the text looked up."""

    at: int
    length: int


class SuffixIndex:
    """Where suffixes stood before. Memory: BYTES_A_TOKEN * `capacity`, whatever it is given.

    Positions count all tokens ever added.
    """

    def __init__(self, capacity: int = SESSION_TOKENS) -> None:
        """capacity: tokens kept, a power of two."""
        assert capacity & (capacity - 1) == 0, "a ring's size is a power of two"
        self.length = 0
        self._mask = capacity - 1
        self._shift = HASH_BITS + 1 - capacity.bit_length()
        empty = array("i", [-1])
        self._tokens = empty * capacity
        self._heads = [empty * capacity for _ in SUFFIXES]
        self._earlier = [empty * capacity for _ in SUFFIXES]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> SuffixIndex:
        """An index of all `tokens`, made at once."""
        index = cls(1 << max(4, len(tokens).bit_length()))
        text = np.array(tokens, dtype=np.uint32)
        index._tokens = array("i", np.resize(text, index._mask + 1).astype(np.int32).tobytes())
        index.length = len(tokens)
        hashes = np.zeros(len(tokens), dtype=np.uint32)
        for back in range(min(max(SUFFIXES), len(tokens))):
            hashes[back:] = hashes[back:] * MULTIPLIER + text[: len(text) - back] + 1
            if back + 1 in SUFFIXES:
                index._link_all(SUFFIXES.index(back + 1), hashes[back:-1], back + 1)
        return index

    def _link_all(self, chain: int, hashes: npt.NDArray[np.uint32], first: int) -> None:
        """Make one set of chains out of the hashes of what ends before `first` and later places."""
        places = (hashes * SPREADER) >> self._shift
        order = np.argsort(places, kind="stable")
        same = np.flatnonzero(places[order[1:]] == places[order[:-1]])
        earlier = np.full(self._mask + 1, -1, dtype=np.int32)
        earlier[order[same + 1] + first] = order[same] + first
        heads = np.full(self._mask + 1, -1, dtype=np.int32)
        heads[places] = np.arange(len(places)) + first  # of equal places the last one stays
        self._earlier[chain] = array("i", earlier.tobytes())
        self._heads[chain] = array("i", heads.tobytes())

    def extend(self, tokens: Iterable[int]) -> None:
        """Add `tokens` to the end."""
        for token in tokens:
            self._link()
            self._tokens[self.length & self._mask] = token
            self.length += 1

    def _link(self) -> None:
        """Put the end of the text into the chains: what comes next continues its suffixes."""
        end, slot = self.length, self.length & self._mask
        places = self._places(self.tail(SUFFIXES[0]))
        # Of a text that is shorter than the longest suffix the chains of longer ones are missing.
        for chain, place in zip(reversed(range(len(SUFFIXES))), reversed(places), strict=False):
            heads = self._heads[chain]
            self._earlier[chain][slot] = heads[place]
            heads[place] = end

    def _places(self, tail: Sequence[int]) -> list[int]:
        """Where the chains of the suffixes of `tail` begin, the longest that it has first."""
        value, places = 0, []
        for count, token in enumerate(reversed(tail[-SUFFIXES[0] :]), start=1):
            value = (value * MULTIPLIER + token + 1) & HASH_MASK
            if count in SUFFIXES:
                places.append((value * SPREADER & HASH_MASK) >> self._shift)
        places.reverse()
        return places

    def tail(self, count: int) -> tuple[int, ...]:
        """The last tokens, `count` of them or all."""
        return self.read(max(self._oldest, self.length - count), self.length)

    def read(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens from `start` to `stop`, both within what is kept."""
        first, last = start & self._mask, stop & self._mask
        if start < stop and last <= first:
            return (*self._tokens[first:], *self._tokens[:last])
        return tuple(self._tokens[first:last])

    @property
    def _oldest(self) -> int:
        return max(0, self.length - self._mask)

    def matches(self, tail: Sequence[int], most: int = PATHS) -> list[Match]:
        """Where the end of `tail` stood before, longest first, then latest first.

        Per chain the TRIED latest positions are looked at, and shorter suffixes only when the
        longer ones gave fewer than `most`. tail: LONGEST_MATCH tokens are enough.
        """
        found: dict[int, Match] = {}
        places = self._places(tail)
        for chain, place in enumerate(places, start=len(SUFFIXES) - len(places)):
            for at in self._chain(chain, place):
                if at not in found:
                    length = self._common(at, tail)
                    if length >= SUFFIXES[chain]:
                        found[at] = Match(at, length)
            if len(found) >= most:
                break
        return sorted(found.values(), key=lambda match: (-match.length, -match.at))

    def _chain(self, chain: int, place: int) -> Iterator[int]:
        earlier, mask, oldest = self._earlier[chain], self._mask, self._oldest
        at, before = self._heads[chain][place], self.length
        for _ in range(TRIED):
            # A slot that was used again leads to a later place, or out of what is kept.
            if not oldest < at < before:
                return
            yield at
            at, before = earlier[at & mask], at

    def _common(self, at: int, tail: Sequence[int]) -> int:
        """How many tokens before `at` equal the end of `tail`."""
        tokens, mask = self._tokens, self._mask
        most = min(LONGEST_MATCH, len(tail), at - self._oldest)
        for count in range(most):
            if tokens[(at - count - 1) & mask] != tail[-count - 1]:
                return count
        return most


@cache
def kind_of(length: int, rank: int) -> Kind:
    """Of a guess after a match of `length`, one of `rank` at its place.

    Once tokens of a continuation were right the match is that much longer, and as good as one that
    was found as long (measured on SmolLM2: 0.50 after 1 + 1 tokens and 0.51 after 2).
    """
    return _level(length), min(rank, 2)


def _level(length: int) -> int:
    return length if length <= 4 else min(8, 3 + length.bit_length() - 1)


class Lookup:
    """Proposes the continuations of the longest matching suffixes, as a tree."""

    name = "lookup"

    def __init__(self, corpus: SuffixIndex | None = None) -> None:
        """corpus: other text to look into; it is shared and stays as it is."""
        self.chance: Callable[[Kind], float] = self.prior
        """Of a kind of guess, as far as it is known."""
        self._corpus = corpus
        self._index = SuffixIndex()
        self._seen: list[int] = []

    def prior(self, kind: Kind) -> float:
        """Measured; see `PRIOR`."""
        level, rank = kind
        return PRIOR[level] / (1 + rank)

    def propose(self, committed: Sequence[int]) -> list[Guess]:
        """See `HostProposer`."""
        self._take_in(committed)
        tail = committed[-LONGEST_MATCH:]
        sources = [(self._index, match) for match in self._index.matches(tail)]
        if self._corpus is not None:
            sources += [(self._corpus, match) for match in self._corpus.matches(tail)]
        sources.sort(key=lambda source: -source[1].length)  # stable: the session's own first
        guesses: list[Guess] = []
        known: dict[tuple[int, int], int] = {}
        children: dict[int, int] = {}
        for index, match in sources[:PATHS]:
            path = index.read(match.at, min(index.length, match.at + DEEPEST))
            self._add(path, match.length, guesses, known, children)
        return guesses

    def _add(
        self,
        path: Sequence[int],
        length: int,
        guesses: list[Guess],
        known: dict[tuple[int, int], int],
        children: dict[int, int],
    ) -> None:
        """Merge one continuation into the tree of guesses."""
        parent, reach = -1, 1.0
        for depth, token in enumerate(path):
            if token == SEPARATOR or len(guesses) >= MOST_GUESSES:
                return
            at = known.get((parent, token))
            if at is None:
                rank = children.get(parent, 0)
                kind = kind_of(length + depth, rank)
                reach *= self.chance(kind)
                if reach < LEAST_REACH:
                    return
                children[parent] = rank + 1
                at = known[parent, token] = len(guesses)
                guesses.append(Guess(parent, token, kind))
            parent = at

    def _take_in(self, committed: Sequence[int]) -> None:
        """Index what is new; the same prefix is not indexed twice."""
        seen = self._seen
        if committed[len(seen) - 1 : len(seen)] != seen[-1:] or len(committed) < len(seen):
            common = common_prefix(seen, committed)
            del seen[common:]
            self._index.extend([SEPARATOR])
        new = committed[len(seen) :]
        self._index.extend(new)
        seen.extend(new)


PRIOR = (0.0, 0.22, 0.45, 0.6, 0.65, 0.75, 0.8, 0.95, 0.97)
"""Chance that the first token after a match of such a level is the verifier's: rounded from greedy
answers of SmolLM2 of 240 tokens."""
