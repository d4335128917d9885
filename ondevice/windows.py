"""Which lookahead window rides along: what its n-grams bring against what its rows cost.

A window of W columns and N - 1 levels adds W (N - 1) - 1 rows to every forward. What a shape brings
is assumed to grow with the logarithm of W, as the paper found (Fu et al. 2024, section 4, scaling
law), and how much that is for this model and text is learned as one common factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ondevice.costs import StepCosts
from ondevice.errors import BadRequest
from ondevice.records import Window

COLUMNS, NGRAM, GUESSES = (2, 64), (3, 10), (1, 64)
"""What W, N and G may be."""
MOST_RIDERS = 255
"""Rows that a window may add to a forward."""
SHAPES = tuple(
    Window(columns, ngram, columns)
    for columns, ngram in ((2, 3), (3, 3), (4, 3), (5, 4), (7, 5), (10, 5), (15, 5))
)
"""From 3 to 59 rows."""
GAIN = 0.12
"""Tokens a forward per natural logarithm of W and level beyond the first, assumed at first. The
paper's 1.5 to 1.8 tokens a forward at W = 15, N = 5 would be 0.16 to 0.25; it counts what n-grams
of the text would have brought without a window, too."""
TRUST_ROUNDS = 24.0
"""The assumption counts as this many rounds."""
MEMORY_ROUNDS = 200.0
"""Rounds until an old one weighs 1/e."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 2048
"""Rounds without a window before a shape that did not pay is tried again; the pause doubles."""
DECIDED_EVERY = 16
"""Rounds from one choice to the next; a window needs N - 2 of them before it finds anything."""

Worth = Callable[[int], float]
"""The best value of a round with so many rider rows, less that with none (at most 0)."""


def checked(window: Window) -> Window:
    """The same; raises BadRequest for W, N or G out of range."""
    named = (("W", window.columns, COLUMNS), ("N", window.ngram, NGRAM))
    for name, value, (least, most) in (*named, ("G", window.guesses, GUESSES)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise BadRequest(
                f"lookahead's {name} must be a whole number from {least} to {most}, got {value!r}"
            )
    if window.riders > MOST_RIDERS:
        raise BadRequest(
            f"a lookahead window may add {MOST_RIDERS} rows, W = {window.columns} and "
            f"N = {window.ngram} add {window.riders}; choose a smaller W or N"
        )
    return window


class Windows:
    """Chooses for one session; what it learned is of the pair."""

    def __init__(self) -> None:
        self.chosen: Window | None = None
        # The assumption is made of rounds that fade as all others do.
        self._brought = self._expected = TRUST_ROUNDS * _assumed(SHAPES[0])
        self._rounds = 0
        self._fresh = 0
        self._pause = FIRST_PAUSE
        self._pause_left = 0

    @property
    def factor(self) -> float:
        """What windows bring, as a part of what is assumed of their shapes."""
        return self._brought / self._expected

    def choose(self, worth: Worth, costs: StepCosts) -> Window | None:
        """The window for the next forward.

        A row count that was never run is run once, to be measured, before it is counted on.
        """
        if self._pause_left > 0:
            return None
        if self.chosen is None or self._rounds >= DECIDED_EVERY:
            self._rounds = 0
            self._decide(worth, costs)
        return self.chosen

    def _decide(self, worth: Worth, costs: StepCosts) -> None:
        factor, before = self.factor, self.chosen
        best, self.chosen = 0.0, None
        for shape in SHAPES:
            value = factor * _assumed(shape) + worth(shape.riders)
            if value > best:
                best, self.chosen = value, shape
        if self.chosen is None:
            self._pause_left = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.chosen == before:
            self._pause = FIRST_PAUSE
        else:
            self._fresh = 0
            if not costs.knows(self.chosen.riders + 1):
                self._rounds = DECIDED_EVERY - 1  # one forward, and then decide with its cost

    def learn(self, used: Window | None, accepted: int) -> None:
        """A forward with `used` is over; accepted: nodes out of the pool."""
        if used is None:
            if self._pause_left > 0:
                self._pause_left -= 1
                if self._pause_left == 0:
                    self._hope_again()
            return
        self._rounds += 1
        self._fresh += 1
        if self._fresh <= used.ngram:  # it was being filled
            return
        keep = 1 - 1 / MEMORY_ROUNDS
        self._brought = self._brought * keep + accepted
        self._expected = self._expected * keep + _assumed(used)

    def _hope_again(self) -> None:
        """A pause is over: what was learned before it says less about what comes."""
        hope = TRUST_ROUNDS * _assumed(SHAPES[0])
        self._brought = (self._brought + hope) / 2
        self._expected = (self._expected + hope) / 2


def _assumed(shape: Window) -> float:
    return GAIN * math.log(1 + shape.columns) * math.sqrt(shape.ngram - 2)
