"""What steps take: verifier forwards by rows and context, drafter steps by rows.

A `CostTable` is measured once per pair and machine. A `CostModel` starts from one and follows what
is measured while running: other programs, heat and longer texts change the costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FOLLOW = 0.1
"""Weight of a new measurement in the moving average of its own row count."""
DRIFT = 0.03
"""Weight of a new measurement in what is common to all row counts (heat, other load)."""
LARGEST_SURPRISE = 1.5
"""A step this many times longer or shorter than expected counts as this: one stall is no trend."""
TREND = 4
"""Steps in a row of one row count that surprise more than that, all one way: the table is wrong."""
CONTEXT_GRAIN = 64
"""Tokens; contexts this close cost the same."""
CURVE_GRAIN = 0.01
"""Curves are computed again once costs have moved by this part: a tenth of a millisecond a curve,
and a round looks at three."""
KEPT_CURVES = 8
"""Alone and beside, at the present context and the one before: a text grows."""
LEAST_ROW_SLOPE = 0.01
"""Beyond the widest measured forward each row costs at least this part of a single row."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured step. context: tokens in the cache. beside_ms: while the other unit works."""

    rows: int
    context: int
    alone_ms: float
    beside_ms: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Step times of one pair on one machine; every tuple has at least one point.

    verifier: forwards that are read before the next one starts. plain: of a run, per token, with
    the next forward queued; one row. drafter: steps, by the rows of the function; context 0.
    """

    verifier: tuple[CostPoint, ...]
    plain: tuple[CostPoint, ...]
    drafter: tuple[CostPoint, ...] = ()


def implausible(table: CostTable) -> str:
    """What is wrong with a table that others wrote; "" where nothing is."""
    if not table.verifier or not table.plain:
        return "expected costs of the verifier, forwards and plain"
    for point in (*table.verifier, *table.plain, *table.drafter):
        times = point.alone_ms, point.beside_ms
        if point.rows < 1 or point.context < 0 or not all(0 < ms < math.inf for ms in times):
            return f"expected rows, a context and times above 0, got {point}"
    return ""


ASSUMED = CostTable(
    verifier=(CostPoint(1, 0, 50.0, 50.0), CostPoint(16, 0, 70.0, 70.0)),
    plain=(CostPoint(1, 0, 50.0, 50.0),),
    drafter=(CostPoint(8, 0, 15.0, 15.0), CostPoint(64, 0, 60.0, 60.0)),
)
"""Where nothing was measured yet; the first measurement of each kind of step scales them."""


class StepCosts:
    """The cost curve of one kind of step, with its cliffs: never interpolated between row counts.

    A request of n rows can be filled up to any larger count, so n rows cost the least of all known
    counts from n on.
    """

    def __init__(self, points: Iterable[CostPoint], *, assumed: bool = False) -> None:
        """points: at least one. assumed: the first measurement scales them all."""
        self._assumed = assumed
        self._points: dict[int, list[CostPoint]] = {}
        for point in sorted(points, key=lambda point: (point.rows, point.context)):
            self._points.setdefault(point.rows, []).append(point)
        self._widest_measured = max(self._points)
        self._scale = dict.fromkeys(self._points, 1.0)
        self._drift = 1.0
        self._surprises: dict[int, list[float]] = {}
        self._moved = 0.0
        self._curves: dict[tuple[int, float], tuple[list[float], list[int]]] = {}

    @property
    def row_counts(self) -> list[int]:
        """Counts of rows that were measured or, since then, observed, ascending."""
        return sorted(self._scale)

    def knows(self, rows: int) -> bool:
        """Whether so many rows, or more, were ever measured."""
        return rows <= max(self._scale)

    def ms(self, rows: int, context: int = 0, beside: float = 0.0) -> float:
        """Milliseconds of a step of `rows`; beside: share of it during which the other works."""
        curve, _ = self.curve(rows, context, beside)
        return curve[rows]

    def filled(self, rows: int, context: int = 0, beside: float = 0.0) -> int:
        """The count of rows to fill a request of `rows` up to: the cheapest from there on."""
        _, counts = self.curve(rows, context, beside)
        return counts[rows]

    def curve(
        self, most: int, context: int = 0, beside: float = 0.0
    ) -> tuple[list[float], list[int]]:
        """(milliseconds, rows to fill up to) by rows, for 0 to at least `most` rows.

        Index 0 costs nothing. Not to be written to.
        """
        key = (context // CONTEXT_GRAIN, round(beside, 1))
        known = self._curves.get(key)
        if known is None or len(known[0]) <= most:
            if len(self._curves) >= KEPT_CURVES:  # of contexts that the text has left behind
                self._curves.clear()
            known = self._curves[key] = self._computed(most, context, beside)
        return known

    def _computed(self, most: int, context: int, beside: float) -> tuple[list[float], list[int]]:
        costs, counts = [0.0], [0]
        widest = max(self._scale)
        best_ms, best_count = float("inf"), 0
        for rows in range(max(most, widest), 0, -1):
            if rows in self._scale or rows > widest:
                here_ms = self.exactly(rows, context, beside)
                if here_ms <= best_ms:
                    best_ms, best_count = here_ms, rows
            costs.append(best_ms)
            counts.append(best_count)
        return [0.0, *costs[:0:-1]], [0, *counts[:0:-1]]

    def exactly(self, rows: int, context: int = 0, beside: float = 0.0) -> float:
        """Milliseconds of a step of exactly `rows`, not filled up, known or not.

        Between measured counts: that of the next wider one. Beyond: on the mean slope.
        """
        widest = self._widest_measured
        scale = self._scale.get(rows, self._scale[widest])
        if rows in self._points:
            base_ms = self._at(rows, context, beside)
        elif rows < widest:
            base_ms = self._at(self._next_measured(rows), context, beside)
        else:
            narrow = min(self._points)
            first_ms, last_ms = (self._at(n, context, beside) for n in (narrow, widest))
            slope_ms = (last_ms - first_ms) / max(1, widest - narrow)
            slope_ms = max(slope_ms, LEAST_ROW_SLOPE * first_ms)
            base_ms = last_ms + slope_ms * (rows - widest)
        return base_ms * scale * self._drift

    def _next_measured(self, rows: int) -> int:
        return min(count for count in self._points if count >= rows)

    def _at(self, rows: int, context: int, beside: float) -> float:
        """On the line between the measured contexts around `context`, as first measured."""
        points = self._points[rows]
        low, high = points[0], points[-1]
        for left, right in itertools.pairwise(points):
            if context >= left.context:
                low, high = left, right
        low_ms, high_ms = _mixed(low, beside), _mixed(high, beside)
        if high.context == low.context:
            return low_ms
        part = max(0.0, (context - low.context) / (high.context - low.context))
        return low_ms + part * max(0.0, high_ms - low_ms)

    def observe(self, rows: int, context: int, beside: float, took_ms: float) -> None:
        """Learn from a step that took `took_ms`; what is not above 0 is no measurement."""
        if took_ms <= 0:
            return
        surprise = took_ms / self.exactly(rows, context, beside)
        if self._assumed:
            self._assumed = False
            self._drift *= surprise
        elif rows not in self._scale:
            self._scale[rows] = self._scale[self._widest_measured] * surprise
        elif trend := self._trend(rows, surprise):
            self._scale[rows] *= trend
        else:
            surprise = min(LARGEST_SURPRISE, max(1 / LARGEST_SURPRISE, surprise))
            self._scale[rows] *= surprise**FOLLOW
            self._drift *= surprise**DRIFT
            self._moved += (FOLLOW + DRIFT) * abs(math.log(surprise))
            if self._moved < CURVE_GRAIN:
                return
        self._moved = 0.0
        self._curves.clear()

    def _trend(self, rows: int, surprise: float) -> float | None:
        """The mildest of the last TREND surprises when all were large and the same way."""
        run = self._surprises.setdefault(rows, [])
        if run and (run[0] > 1) != (surprise > 1):
            run.clear()
        if 1 / LARGEST_SURPRISE <= surprise <= LARGEST_SURPRISE:
            run.clear()
            return None
        run.append(surprise)
        if len(run) < TREND:
            return None
        self._surprises[rows] = []
        return min(run) if surprise > 1 else max(run)


def _mixed(point: CostPoint, beside: float) -> float:
    return point.alone_ms + beside * (point.beside_ms - point.alone_ms)


class CostModel:
    """What this machine takes for the steps of one pair, as far as its owner has seen.

    assumed: it began without a measurement.
    """

    def __init__(self, table: CostTable = ASSUMED) -> None:
        self.table = table
        self.assumed = assumed = table == ASSUMED
        self.verifier = StepCosts(table.verifier, assumed=assumed)
        self.plain = StepCosts(table.plain, assumed=assumed)
        drafter = table.drafter or ASSUMED.drafter
        self.drafter = StepCosts(drafter, assumed=drafter == ASSUMED.drafter)

    def slowdown(self, context: int, rows: int = 8) -> float:
        """How many times longer a forward takes while the drafter works."""
        alone_ms = self.verifier.ms(rows, context)
        return self.verifier.ms(rows, context, 1.0) / alone_ms if alone_ms > 0 else 1.0


def table_from(
    verifier_ms: Sequence[float],
    drafter_ms: Sequence[tuple[int, float]],
    *,
    plain_ms: float | None = None,
    verifier_slowdown: float = 1.0,
    drafter_slowdown: float = 1.0,
) -> CostTable:
    """A table without contexts: verifier_ms[n - 1] of n rows, (rows, ms) of the drafter's steps.

    plain_ms: of a run per token, that of one row if None. *_slowdown: while the other unit works.
    """
    one_ms = verifier_ms[0] if plain_ms is None else plain_ms
    return CostTable(
        verifier=tuple(
            CostPoint(n, 0, ms, ms * verifier_slowdown) for n, ms in enumerate(verifier_ms, 1)
        ),
        plain=(CostPoint(1, 0, one_ms, one_ms * verifier_slowdown),),
        drafter=tuple(CostPoint(n, 0, ms, ms * drafter_slowdown) for n, ms in drafter_ms),
    )
