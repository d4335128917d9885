"""How far `auto` stays behind the best fixed schedule, over a grid of machines and drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ondevice.apps.sweep import KINDS, Entrant, Kind, World, fixed, race
from ondevice.costs import table_from
from ondevice.modelled import BetaText
from ondevice.planning import MOST_ROWS
from ondevice.schedule import Schedule

VERIFY_MS = 20.0
"""Of one row; the verifier of DESIGN's first row."""
DRAFT_ROWS = 8
"""Rows that a drafter step covers."""
DRAFT_SHARES = (0.05, 0.1, 0.2, 0.4)
ACCEPTANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ROW_COSTS = (0.01, 0.03, 0.06, 0.10)
SLOWDOWNS = (1.0, 1.16)
HEATS = ((100, 10), (400, 3))
"""Of the fixed schedules, before the last one on auto's own text."""
MEAN_DEMANDED, LEAST_DEMANDED = 0.97, 0.94
"""Of the best fixed schedule: on average over the grid, and in every cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A machine and a drafter.

    draft_share: time of a drafter step over that of a one-row forward; a: probability that the
    drafter's first choice is right; row_cost: time of another row over that of the first;
    slowdown: of the verifier while the drafter works.
    """

    draft_share: float
    a: float
    row_cost: float
    slowdown: float

    def world(self, seed: int) -> World:
        """The modelled machine with the text of `seed`."""
        verifier_ms = [VERIFY_MS * (1 + self.row_cost * rows) for rows in range(MOST_ROWS)]
        drafter_ms = [(DRAFT_ROWS, VERIFY_MS * self.draft_share)]
        table = table_from(verifier_ms, drafter_ms, verifier_slowdown=self.slowdown)
        return World(table, partial(BetaText, self.a, seed))


GRID = tuple(
    Cell(*values) for values in itertools.product(DRAFT_SHARES, ACCEPTANCES, ROW_COSTS, SLOWDOWNS)
)
QUICK_GRID = tuple(
    Cell(*values) for values in itertools.product((0.1, 0.4), (0.5, 0.8), (0.03,), SLOWDOWNS)
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A cell to be tried: tokens of the text, and its seed."""

    cell: Cell
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Tried:
    """What came out: speeds, times plain decoding. kind: of the best fixed schedule."""

    cell: Cell
    auto: float
    best: Entrant
    kind: Kind | None

    @property
    def ratio(self) -> float:
        """auto over the best fixed schedule."""
        return self.auto / self.best.speed

    @property
    def best_name(self) -> str:
        """The best fixed schedule, with its sizes."""
        sizes = self.best.schedule.sizes
        if self.kind is None or sizes is None:
            return "plain"
        return f"{self.kind} {sizes.verify_rows}x{sizes.depth}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        sizes = self.best.schedule.sizes
        return {
            **asdict(self.cell),
            "auto": self.auto,
            "best_fixed": self.best.speed,
            "best_fixed_schedule": self.kind or "plain",
            "best_fixed_sizes": None if sizes is None else asdict(sizes),
            "ratio": self.ratio,
        }


def tried(trial: Trial) -> Tried:
    """Race all fixed schedules of the cell, then `auto` on the same text.

    `auto` knows the costs, as after a calibration, and nothing of the drafter.
    """
    world = trial.cell.world(trial.seed)
    candidates: dict[Schedule, Kind | None] = {Schedule("plain"): None}
    for kind in KINDS:
        candidates |= dict.fromkeys(fixed(kind, world.table), kind)
    (best,) = race(world, list(candidates), (*HEATS, (trial.tokens, 1)))
    auto = world.run(Schedule("auto"), trial.tokens).speed
    return Tried(trial.cell, auto, best, candidates[best.schedule])


@dataclass(frozen=True, slots=True)
class Regret:
    """Of all cells that were tried."""

    cells: Sequence[Tried]
    tokens: int
    seed: int

    @property
    def mean(self) -> float:
        """Of auto over the best fixed schedule."""
        return fmean(each.ratio for each in self.cells)

    @property
    def worst_first(self) -> list[Tried]:
        """The cells by rising ratio."""
        return sorted(self.cells, key=lambda each: each.ratio)

    @property
    def passed(self) -> bool:
        """Whether it is as little as is demanded of it."""
        return self.mean >= MEAN_DEMANDED and self.worst_first[0].ratio >= LEAST_DEMANDED

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "tokens": self.tokens,
            "seed": self.seed,
            "mean": self.mean,
            "minimum": self.worst_first[0].ratio,
            "demanded": {"mean": MEAN_DEMANDED, "minimum": LEAST_DEMANDED},
            "passed": self.passed,
            "cells": [each.as_json() for each in self.cells],
        }
