"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams out of a Jacobi window.

The window has W columns and N - 1 levels. Its place (level l, column j) stands at the root's
position + l + j; it sees (0, 0) to (0, j), where (0, 0) is the root, and of the higher levels its
own column up to itself. So its rows are a tree: (l, j) hangs below (l - 1, j), and (0, j) below
(0, j - 1). They ride in the verifier's forward, enter no cache and no penalty's history, and answer
with their likeliest token, without noise. The outputs of the last level complete one n-gram a
column: level 0 is its key, levels 1 to N - 2 and the output are what follows it. Then every level
takes the place of the one below, the outputs become the last one, and the first column is left.

Filling takes N - 2 forwards: level 0 starts with W + N - 3 tokens of the text drawn at random, a
forward's outputs make the next level, and with every forward the first column is left. As in the
authors' program (LookaheadDecoding, lade/decoding.py) the window moves by one column a forward,
however many tokens were accepted, and an end token in it is replaced by a token of the text.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from ondevice.lane import common_prefix
from ondevice.ngrams import NgramPool
from ondevice.proposers import Guess, Kind
from ondevice.records import StartVerify, Verdict, VerifyRow, Window
from ondevice.tree import NOWHERE

DEFAULT = Window(columns=7, ngram=4, guesses=7)
"""Of the pool while no window was ever chosen: it then holds n-grams of the text."""
TEXT = "ngrams"
"""What n-grams are called that are the text's own: no window was needed for them."""

KINDS: list[list[list[Kind]]] = [
    [[(age, depth, found) for found in (0, 1)] for depth in range(3)] for age in range(4)
]
"""Of guesses: how many n-grams are newer, how deep in its own, whether a window found it."""


class JacobiWindow:
    """The window's tokens; `levels[l]` are those of level l, level 0 without its first column."""

    def __init__(self, window: Window, text: Sequence[int], rng: random.Random) -> None:
        """text: what the first tokens are drawn from, not empty."""
        self.window = window
        count = window.columns + window.ngram - 3
        self.levels: list[list[int]] = [[rng.choice(text) for _ in range(count)]]

    @property
    def full(self) -> bool:
        """Whether all levels are there, so that a forward gives n-grams."""
        return len(self.levels) == self.window.ngram - 1

    def rows(self) -> list[VerifyRow]:
        """All places but the root's, level by level; parents as in `VerifierProposer.riders`."""
        rows: list[VerifyRow] = []
        for level, tokens in enumerate(self.levels):
            before = len(rows) - len(tokens)  # of the level above, where there is one
            for column, token in enumerate(tokens):
                if level == 0:
                    parent = column - 1
                elif level == 1:
                    parent = column - 1  # column 0 is below the root itself
                else:
                    parent = before + column
                rows.append(VerifyRow(NOWHERE, token, parent))
        return rows

    def advance(self, root: int, outputs: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Take in the likeliest token after each of `rows()`; the n-grams found, if any.

        root: the token of the root's row in that forward.
        """
        last = list(outputs[len(outputs) - len(self.levels[-1]) :])
        if not self.full:
            first_fill = len(self.levels) == 1
            self.levels = [level[1:] for level in self.levels]
            self.levels.append(last if first_fill else last[1:])
            return []
        keys = [root, *self.levels[0]]
        columns = zip(*self.levels[1:], last, strict=True)
        found = [(key, tuple(rest)) for key, rest in zip(keys, columns, strict=True)]
        self.levels = [self.levels[1][1:], *self.levels[2:], last]
        return found

    def replace(self, ends: Collection[int], text: Sequence[int], rng: random.Random) -> None:
        """End tokens of the newest level make way for tokens of the text."""
        newest = self.levels[-1]
        self.levels[-1] = [rng.choice(text) if token in ends else token for token in newest]


class Lookahead:
    """Proposes the n-grams that begin with the root, and keeps the window that finds them."""

    name = "lookahead"

    def __init__(self, ends: Collection[int] = ()) -> None:
        """ends: tokens that end an answer."""
        self.pool = NgramPool(DEFAULT.guesses)
        self._ends = ends
        self._rng = random.Random(0)  # the window's first tokens; the text does not depend on them
        self._window: JacobiWindow | None = None
        self._shape = DEFAULT
        self._seen: list[int] = []

    def prior(self, kind: Kind) -> float:
        """See `KINDS`."""
        age, depth, _ = kind
        return (0.25, 0.12, 0.08, 0.05)[age] if depth == 0 else 0.45

    def propose(self, committed: Sequence[int]) -> list[Guess]:
        """The n-grams under the last token, the latest first; see `HostProposer`."""
        self._take_in(committed)
        guesses: list[Guess] = []
        known: dict[tuple[int, int], int] = {}
        for age, (rest, found) in enumerate(reversed(self.pool.get(committed[-1]))):
            parent = -1
            for depth, token in enumerate(rest):
                at = known.get((parent, token))
                if at is None:
                    at = known[parent, token] = len(guesses)
                    kind = KINDS[min(age, 3)][min(depth, 2)][found]
                    guesses.append(Guess(parent, token, kind, self.name if found else TEXT))
                parent = at
        return guesses

    def _take_in(self, committed: Sequence[int]) -> None:
        """The text's own n-grams, those of the prompt first, are as good as found ones."""
        seen = self._seen
        if committed[len(seen) - 1 : len(seen)] != seen[-1:] or len(committed) < len(seen):
            del seen[common_prefix(seen, committed) :]
        ngram = self._shape.ngram
        start = max(0, len(seen) - ngram + 1)
        seen.extend(committed[len(seen) :])
        self.pool.add_text(seen, ngram, start)

    def riders(self, window: Window, committed: Sequence[int]) -> list[VerifyRow]:
        """The window's rows; another shape than before starts a new window and pool."""
        if self._shape != window:
            self._shape = window
            self._window, self._seen = None, []
            self.pool = NgramPool(window.guesses)
            self._take_in(committed)
        if self._window is None:
            self._window = JacobiWindow(window, committed, self._rng)
        return self._window.rows()

    def observe(self, command: StartVerify, verdict: Verdict) -> None:
        """Move the window on; see `VerifierProposer`."""
        window = self._window
        if window is None or command.window != window.window:
            return
        count = sum(map(len, window.levels))
        for key, rest in window.advance(command.rows[0].token, verdict.rider_tokens[:count]):
            self.pool.add(key, rest, found=True)
        window.replace(self._ends, self._seen, self._rng)
