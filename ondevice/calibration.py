"""Measures what the steps of an opened pair take on this machine: a `CostTable`.

Every figure is the span that the unit itself reports (`Verdict` and `DraftResult`, start to end),
which is also what the running system learns from. Alone and beside the other unit are measured in
the same pass, so that a change of the machine's pace falls on both.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import NamedTuple

from ondevice.benches import DrafterBench, VerifierBench
from ondevice.costs import ASSUMED, CostPoint, CostTable
from ondevice.units import DrafterUnit, TreeShape, VerifierUnit
from ondevice.worker import UnitWorker

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows of the verifier's forwards; what lies between is learned while running."""
SHALLOW, DEEP = 128, 1024
"""Tokens in the cache; costs at other depths are taken from the line through both."""
WARM_UP_TOKENS = 16
"""The first prefill may compile, so that it does not tell how long a longer one takes."""
LOAD_ROWS = 8
"""Rows of the steps that keep a unit busy while the other one is measured."""
DRAFTS_A_PASS = 3
"""A drafter step is short beside a forward, so more of them are worth having."""

PREFILL_S = 5.0
"""Longest prefill, in seconds, that the deeper context is worth; a slower machine's is less deep.
The default pair takes 3 on one core of an x86 server."""
BUDGET_S = 15.0
"""Seconds in which all passes shall end. One of the default pair takes 4 there."""
LIMIT_S = 24.0
"""Seconds after which nothing more is measured; without a fast BLAS one pass takes minutes."""
LEAST_PASSES, MOST_PASSES = 2, 5
AGREED = 0.05
"""Passes are enough when the typical figure's spread is this part of it."""
LARGE_SPREAD = 0.2
"""Above it a calibration says as much about what else ran as about the pair."""
NEIGHBOURS = 3
"""Points that are measured alone and then at once beside: other programs come and go in seconds."""

Progress = Callable[[int, int], None]
Busy = Callable[[Callable[[], object]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    spread: largest less smallest figure of the same step, as a part of it; of the typical step;
    None when each was measured once. trouble: why a part of it is assumed, "" if none is. The table
    has cliffs (rows that cost more than more rows do) and slow-downs of single steps only when it
    is sure; else they are as likely to come from other programs.
    """

    table: CostTable
    took_s: float
    spread: float | None = None
    trouble: str = ""


def is_sure(spread: float | None) -> bool:
    """Whether passes that differed by `spread` agreed well enough: the machine was quiet."""
    return spread is not None and spread <= LARGE_SPREAD


class _Point(NamedTuple):
    """kind: whose step; rows, context: as in `CostPoint`."""

    kind: str
    rows: int
    context: int


class _DrafterTrouble(Exception):
    """The drafter failed while it was measured."""


def calibrate(
    verifier: UnitWorker[VerifierUnit],
    drafter: UnitWorker[DrafterUnit] | None,
    drafter_rows: Sequence[int],
    *,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
    busy: Busy | None = None,
) -> Calibration:
    """Measure both units, which nobody else should use meanwhile.

    drafter_rows: the row counts of its functions. progress: called with (done, in all) in
    milliseconds of the time that this may take. busy: keeps a unit at work during a block, see
    `at_work`. A drafter that fails costs its own figures only; raises what the verifier raises.
    """
    return _Calibrator(verifier, drafter, drafter_rows, progress, clock, busy or at_work).run()


@contextmanager
def at_work(step: Callable[[], object]) -> Iterator[None]:
    """Repeat `step` on a thread of its own, from before the block until after it.

    Raises what `step` raised, once the block has ended.
    """
    begun, over = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        try:
            while not over.is_set():
                step()
                begun.set()
        except Exception as error:
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=work, name="ondevice-load", daemon=True)
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def tree_parents(rows: int, shape: TreeShape) -> list[int]:
    """Parents of the rows of a typical request, -1 for the root's.

    A chain, or the best of a tree whose nodes have children with probability 1/2, and then 0.45 of
    the rest each (DESIGN section 1 at a = 0.5): branches from the fourth row on.
    """
    if shape != "tree":
        return list(range(-1, rows - 1))
    parents: list[int] = []
    waiting = [(-1.0, 0, -1)]
    order = itertools.count(1)
    while len(parents) < rows:
        chance, _, parent = heapq.heappop(waiting)
        row = len(parents)
        parents.append(parent)
        left, share = -chance, 0.5
        for _ in range(4):
            heapq.heappush(waiting, (-left * share, next(order), row))
            left, share = left * (1 - share), 0.45
    return parents


def without_cliffs(costs_ms: Sequence[float]) -> list[float]:
    """The closest costs that never fall: isotonic regression (Barlow et al. 1972, section 1.2)."""
    blocks: list[tuple[float, int]] = []
    for cost_ms in costs_ms:
        mean_ms, count = cost_ms, 1
        while blocks and blocks[-1][0] > mean_ms:
            before_ms, before = blocks.pop()
            mean_ms = (mean_ms * count + before_ms * before) / (count + before)
            count += before
        blocks.append((mean_ms, count))
    return [mean_ms for mean_ms, count in blocks for _ in range(count)]


class _Calibrator:
    """One calibration at work."""

    def __init__(
        self,
        verifier: UnitWorker[VerifierUnit],
        drafter: UnitWorker[DrafterUnit] | None,
        drafter_rows: Sequence[int],
        progress: Progress,
        clock: Callable[[], float],
        busy: Busy,
    ) -> None:
        self._progress, self._clock, self._busy = progress, clock, busy
        self._started_s = clock()
        self._verifier = VerifierBench(verifier)
        self._drafter = DrafterBench(drafter, self._verifier.vocab_size) if drafter else None
        # Else no other figure than the plain ones will ever be asked for.
        self._speculates = self._verifier.shape != "plain"
        self._had_drafter = drafter is not None
        self._drafter_rows = sorted(drafter_rows)
        self._contexts: list[int] = []
        self._warm_up: dict[tuple[_Point, bool], float] = {}
        self._last_s = 0.0
        self._samples: dict[tuple[_Point, bool], list[float]] = defaultdict(list)
        self._trouble = ""

    def run(self) -> Calibration:
        """Everything, within the time limits."""
        try:
            self._fill()
            self._guarded(self._warmed_up)
            self._passes()
        finally:
            self._verifier.close()
            if self._drafter is not None:
                self._drafter.close()
        self._progress(1, 1)
        table = self._table()
        return Calibration(table, self._elapsed_s, self._spread(), self._trouble)

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def _late(self) -> bool:
        """Whether another step would not end in time, if it is as long as the last one."""
        return self._elapsed_s + self._last_s > LIMIT_S

    def _fill(self) -> None:
        """Texts into the caches: a short one, and a long one where that does not take too long."""
        # Rows of a forward, and what runs add to a cache that cannot be rolled back.
        room = self._verifier.context - 2 * max(ROW_COUNTS)
        shallow = max(1, min(SHALLOW, room // 2))
        self._verifier.fill(min(WARM_UP_TOKENS, shallow))
        before_s = self._clock()
        self._verifier.fill(shallow)
        token_s = (self._clock() - before_s) / shallow
        self._contexts = [shallow]
        deep = min(DEEP, room, int(PREFILL_S / token_s) if token_s > 0 else DEEP)
        if self._speculates and deep >= 2 * shallow:
            self._verifier.fill(deep)
            self._contexts.append(deep)

    def _passes(self) -> None:
        for done in range(1, MOST_PASSES + 1):
            before_s = self._elapsed_s
            self._guarded(self._pass)
            spread = self._spread()
            if done >= LEAST_PASSES and (spread is None or spread <= AGREED):
                return
            if done >= LEAST_PASSES and 2 * self._elapsed_s - before_s > BUDGET_S:
                return

    def _guarded(self, part: Callable[[], None]) -> None:
        """Do `part`; when the drafter fails in it, do it again without."""
        try:
            part()
        except _DrafterTrouble as error:
            self._trouble = str(error)
            assert self._drafter is not None
            self._drafter.close()
            self._drafter = None
            for key in [key for key in self._samples if key[1]]:
                del self._samples[key]  # beside what?
            part()

    def _warmed_up(self) -> None:
        """The first call of a shape, when it may be compiled: used where there is no other."""
        shallow = self._contexts[:1]
        self._measure([*self._drafter_points(), *self._verifier_points(shallow)], warm_up=True)

    def _pass(self) -> None:
        """Every point once, alone and beside the other unit; less if time runs out."""
        points = self._verifier_points(self._contexts)
        drafter, verifier, shallow = self._drafter, self._verifier, self._contexts[0]
        if drafter is None or not self._speculates:
            self._measure(points)
            return
        self._measure(self._drafter_points())
        parents = tree_parents(LOAD_ROWS, verifier.shape)
        with self._busy(lambda: verifier.verify_ms(shallow, parents)):
            self._measure(self._drafter_points(), beside=True)
        count = max((rows for rows in self._drafter_rows if rows <= LOAD_ROWS), default=1)
        for first in range(0, len(points), NEIGHBOURS):
            if self._late:
                return
            neighbours = points[first : first + NEIGHBOURS]
            self._measure(neighbours)
            with self._busy(lambda: _of_drafter(lambda: drafter.step_ms(count))):
                self._measure(neighbours, beside=True)

    def _measure(
        self, points: Sequence[_Point], *, beside: bool = False, warm_up: bool = False
    ) -> None:
        for point in points:
            self._progress(int(1e3 * min(self._elapsed_s, BUDGET_S)), int(1e3 * BUDGET_S))
            key = (point, beside)
            needed = point.kind == "plain" and not self._measured("plain")
            if self._late and not needed:
                continue
            before_s = self._elapsed_s
            took_ms = self._step_ms(point)
            self._last_s = self._elapsed_s - before_s
            if warm_up:
                self._warm_up[key] = took_ms
            else:
                self._samples[key].append(took_ms)

    def _step_ms(self, point: _Point) -> float:
        if point.kind == "plain":
            return self._verifier.run_ms(point.context)
        if point.kind == "verifier":
            parents = tree_parents(point.rows, self._verifier.shape)
            return self._verifier.verify_ms(point.context, parents)
        drafter = self._drafter
        assert drafter is not None
        return _of_drafter(
            lambda: median_low(drafter.step_ms(point.rows) for _ in range(DRAFTS_A_PASS))
        )

    def _verifier_points(self, contexts: Sequence[int]) -> list[_Point]:
        counts = ROW_COUNTS if self._speculates else ()
        points = []
        for context in contexts:
            points.append(_Point("plain", 1, context))
            points += [_Point("verifier", rows, context) for rows in counts]
        return points

    def _drafter_points(self) -> list[_Point]:
        if self._drafter is None or not self._speculates:
            return []
        return [_Point("drafter", rows, 0) for rows in self._drafter_rows]

    def _spread(self) -> float | None:
        spreads = [(max(ms) - min(ms)) / median(ms) for ms in self._samples.values() if len(ms) > 1]
        return median(spreads) if spreads else None

    # The table

    def _table(self) -> CostTable:
        measured = {kind: self._cost_points(kind) for kind in ("verifier", "plain", "drafter")}
        # Without speculation no forward of several rows will ever be asked for.
        verifier = measured["verifier"] or measured["plain"]
        table = CostTable(verifier, measured["plain"], measured["drafter"])
        if self._speculates and self._had_drafter and not table.drafter:
            self._trouble = self._trouble or "there was no time to measure the drafter"
            table = replace(table, drafter=_assumed_drafter(verifier[0]))
        return table

    def _measured(self, kind: str) -> list[_Point]:
        """Points of which an undisturbed figure is known, perhaps from the warm-up."""
        known = dict.fromkeys([*self._warm_up, *self._samples])
        return sorted(point for point, beside in known if point.kind == kind and not beside)

    def _cost_points(self, kind: str) -> tuple[CostPoint, ...]:
        alone = {point: self._figure_ms(point) for point in self._measured(kind)}
        slower = {  # what seems faster beside the other was disturbed alone
            point: max(1.0, median_low(self._samples[point, True]) / alone[point])
            for point in alone
            if self._samples.get((point, True))
        }
        typical = median(slower.values()) if slower else 1.0
        if not is_sure(self._spread()):
            slower = {}
            for context in {point.context for point in alone}:
                points = [point for point in alone if point.context == context]
                level_ms = without_cliffs([alone[point] for point in points])
                alone.update(zip(points, level_ms, strict=True))
        return tuple(
            CostPoint(point.rows, point.context, ms, ms * slower.get(point, typical))
            for point, ms in alone.items()
        )

    def _figure_ms(self, point: _Point) -> float:
        samples = self._samples.get((point, False))  # of two the lower: what disturbs only adds
        return median_low(samples) if samples else self._warm_up[point, False]


def _assumed_drafter(one_row: CostPoint) -> tuple[CostPoint, ...]:
    """The assumed ratios of drafter and verifier, at this verifier's pace."""
    pace = one_row.alone_ms / ASSUMED.verifier[0].alone_ms
    return tuple(
        replace(point, alone_ms=point.alone_ms * pace, beside_ms=point.beside_ms * pace)
        for point in ASSUMED.drafter
    )


def _of_drafter(step: Callable[[], float]) -> float:
    try:
        return step()
    except Exception as error:
        raise _DrafterTrouble(f"the drafter could not be measured: {error}") from error
