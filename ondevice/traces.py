"""Recorded runs: step records as JSON lines, to be replayed in virtual time.

The first line is a `TraceHeader`, every other one a `TraceRound`, in the order of each answer's
rounds.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, NonNegativeInt, ValidationError

from ondevice.artifact import Manifest, replacing
from ondevice.costs import CostPoint, CostTable, StepCosts, implausible
from ondevice.errors import BadRequest, CacheUnwritable
from ondevice.records import Outcome, StepRecord

TRACE_FORMAT = "ondevice-trace-1"
ALONE, BESIDE = 0.25, 0.75
"""A step counts as alone, or as beside the other unit, up to and from this share of overlap."""

Line = TypeVar("Line", bound=Manifest)


def _plausible_table(table: CostTable) -> CostTable:
    if wrong := implausible(table):
        raise ValueError(wrong)
    return table


def _plausible_record(record: StepRecord) -> StepRecord:
    if record.rows < 1 or record.context < 0 or record.committed < 1:
        raise ValueError("expected at least one row and one committed token, and a context")
    if len(record.outcomes) != record.committed:
        raise ValueError(
            f"expected one outcome for each of {record.committed} tokens, got "
            f"{len(record.outcomes)}"
        )
    for outcome in record.outcomes:
        if not -1 <= outcome.taken < len(outcome.claims):
            raise ValueError(f"outcome: child {outcome.taken} of {len(outcome.claims)} was taken")
        if not all(0 <= claim <= 1 for claim in outcome.claims):
            raise ValueError(f"expected claims from 0 to 1, got {outcome.claims}")
    spans = [(step.start_ns, step.end_ns) for step in record.drafts]
    if any(end_ns < start_ns for start_ns, end_ns in [*spans, (record.start_ns, record.end_ns)]):
        raise ValueError("a step ended before it began")
    return record


class TraceHeader(Manifest):
    """What a trace is of. ondevice: the version that wrote it.

    costs: what the pair's steps take on that machine; None where that was not measured.
    """

    format: Literal["ondevice-trace-1"] = "ondevice-trace-1"
    ondevice: str
    pair: str
    costs: Annotated[CostTable, AfterValidator(_plausible_table)] | None = None


class TraceRound(Manifest):
    """One round. answer: its number, from 0 on. schedule: what was asked for: auto, pipelined..."""

    answer: NonNegativeInt
    schedule: str
    record: Annotated[StepRecord, AfterValidator(_plausible_record)]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run."""

    header: TraceHeader
    rounds: tuple[TraceRound, ...]

    @property
    def records(self) -> list[StepRecord]:
        """Of all answers."""
        return [entry.record for entry in self.rounds]

    def answers(self) -> Iterator[tuple[str, list[StepRecord]]]:
        """(schedule, records) of one answer after the other."""
        for _, entries in groupby(self.rounds, key=lambda entry: entry.answer):
            answer = list(entries)
            yield answer[0].schedule, [entry.record for entry in answer]

    def outcomes(self) -> list[Outcome]:
        """Of the answers in which the drafter expanded anything, token after token."""
        found: list[Outcome] = []
        for _, records in self.answers():
            answer = [outcome for record in records for outcome in record.outcomes]
            if any(outcome.claims for outcome in answer):
                found += answer
        return found

    def costs(self) -> CostTable:
        """Of the header, at the records' median context; else medians of the recorded steps.

        Raises BadRequest where the records have no forward of a speculating round.
        """
        table = self.header.costs
        if table is None or not table.drafter:
            return _measured(list(self.answers()))
        context = round(median(record.context for record in self.records))
        return at_context(table, context)


def new_header(pair: str, costs: CostTable | None) -> TraceHeader:
    """The header of a trace that is made now."""
    return TraceHeader(ondevice=version("ondevice"), pair=pair, costs=costs)


def require_file_name(path: Path) -> None:
    """BadRequest when a file cannot be at `path`, for what is known before a long run."""
    if path.is_dir():
        raise BadRequest(f"cannot write {path}: it is a folder; name a file")
    if path.exists() and not path.is_file():
        # A file would take the device's place, where that is allowed.
        raise BadRequest(f"cannot write {path}: it is no ordinary file; name another one")
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise BadRequest(f"cannot write {path}: {above} is no folder; name another file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise BadRequest(f"cannot write {path}: {above} is not yours to write; name another file")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write the file whole or not at all. Raises BadRequest where it cannot be written."""
    require_file_name(path)
    try:
        # A link stays one: what it leads to is replaced.
        target = Path(os.path.realpath(path))
        with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
    except CacheUnwritable as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise BadRequest(f"cannot write {path}: {reason}; name another file") from error


def write_trace(path: Path, header: TraceHeader, rounds: Iterable[TraceRound]) -> None:
    """Write the trace, see `write_lines`."""
    write_lines(path, (line.model_dump_json() for line in (header, *rounds)))


def read_trace(path: Path) -> Trace:
    """Read a whole trace. Raises BadRequest, which names the line, for whatever is wrong in it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadRequest(
            f"cannot read the trace {path}: {reason}; make one with `ondevice bench --records`"
        ) from error
    if not lines or TRACE_FORMAT not in lines[0]:
        raise BadRequest(
            f"{path} is no trace: expected {TRACE_FORMAT} in line 1; make one with `ondevice bench "
            "--records`"
        )
    header = _read_line(TraceHeader, lines[0], path, 1)
    rounds = [
        _read_line(TraceRound, line, path, number) for number, line in enumerate(lines[1:], start=2)
    ]
    trace = Trace(header, tuple(rounds))
    if not trace.outcomes():
        raise BadRequest(
            f"{path} has no round in which a drafter proposed anything; record `pipelined`, "
            "`sequential` or `auto`"
        )
    return trace


def _read_line(kind: type[Line], line: str, path: Path, number: int) -> Line:
    try:
        return kind.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        what = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{path}, line {number}: {where}: {what}; record the run again") from error


def at_context(table: CostTable, context: int) -> CostTable:
    """The costs at `context` tokens, as a table without contexts; measured row counts only."""

    def flat(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
        known = StepCosts(points)
        return tuple(
            CostPoint(
                rows, 0, known.exactly(rows, context), known.exactly(rows, context, beside=1.0)
            )
            for rows in known.row_counts
        )

    drafter = flat(table.drafter) if table.drafter else ()
    return CostTable(flat(table.verifier), flat(table.plain), drafter)


Span = tuple[int, int]
"""Start and end, in ns."""


def _measured(answers: Sequence[tuple[str, Sequence[StepRecord]]]) -> CostTable:
    """Median milliseconds by rows, alone and beside the other unit."""
    verifier: dict[int, list[tuple[float, float]]] = {}
    plain: dict[int, list[tuple[float, float]]] = {}
    drafter: dict[int, list[tuple[float, float]]] = {}
    for _, records in answers:
        drafts = [draft for record in records for draft in record.drafts]
        draft_spans = [(draft.start_ns, draft.end_ns) for draft in drafts]
        forward_spans = [(record.start_ns, record.end_ns) for record in records]
        for record, span in zip(records, forward_spans, strict=True):
            steps = plain if record.strategy == "plain" else verifier
            steps.setdefault(record.rows, []).append(_timed(span, draft_spans))
        for draft, span in zip(drafts, draft_spans, strict=True):
            if draft.function_rows:
                drafter.setdefault(draft.function_rows, []).append(_timed(span, forward_spans))
    if not verifier or not drafter:
        raise BadRequest(
            "the trace has no cost table and no timed speculating rounds; record the pair where "
            "its costs are measured"
        )
    one = plain or {1: verifier[min(verifier)]}
    return CostTable(_points(verifier), _points({1: one[min(one)]}), _points(drafter))


def _timed(span: Span, others: Sequence[Span]) -> tuple[float, float]:
    """(milliseconds, share of them that overlaps `others`, which are in order and apart)."""
    start_ns, end_ns = span
    busy_ns = 0
    for other_start_ns, other_end_ns in others[max(0, bisect_left(others, (start_ns, 0)) - 1) :]:
        if other_start_ns >= end_ns:
            break
        busy_ns += max(0, min(end_ns, other_end_ns) - max(start_ns, other_start_ns))
    return (end_ns - start_ns) / 1e6, busy_ns / max(1, end_ns - start_ns)


def _points(steps: dict[int, list[tuple[float, float]]]) -> tuple[CostPoint, ...]:
    points = []
    for rows, timed in sorted(steps.items()):
        alone = [took_ms for took_ms, share in timed if share <= ALONE]
        beside = [took_ms for took_ms, share in timed if share >= BESIDE]
        every = [took_ms for took_ms, _ in timed]
        alone_ms = max(median(alone or every), 1e-6)
        points.append(CostPoint(rows, 0, alone_ms, max(median(beside or alone or every), 1e-6)))
    return tuple(points)
