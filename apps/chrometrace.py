"""Answers as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format" in its JSON object form. Every answer is a process of
four lanes: coordinator (rounds, with marks), drafter, verifier, and host (what passes between two
forwards). An arrow leads from each drafter step to the first forward that could use it. Counters
follow the tree's size and, where energy is known, the mean power of the answer by rail. All of it
comes from step records; times are in microseconds from the first answer's prompt on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ondevice.apps.figures import domain_of
from ondevice.apps.race import Measured
from ondevice.records import DraftRecord, StepRecord

COORDINATOR, DRAFTER, VERIFIER, HOST = 1, 2, 3, 4
LANES = {COORDINATOR: "coordinator", DRAFTER: "drafter", VERIFIER: "verifier", HOST: "host"}

Event = dict[str, Any]


def chrome_trace(pair: str, measured: Sequence[Measured]) -> dict[str, Any]:
    """The whole trace as plain values."""
    told = [each for each in measured if each.run.records]
    origin_ns = min((each.run.start_ns for each in told), default=0)
    events: list[Event] = []
    for number, each in enumerate(told, start=1):
        events += _Answer(number, each, origin_ns).events()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"pair": pair, "answers": len(told)},
    }


class _Answer:
    """One answer's events. number: its process."""

    def __init__(self, number: int, measured: Measured, origin_ns: int) -> None:
        self._number, self._measured, self._origin_ns = number, measured, origin_ns

    def events(self) -> Iterator[Event]:
        measured, records = self._measured, self._measured.run.records
        question = measured.task.question
        name = f"{measured.side}: {domain_of(measured)} {question.id}, repeat {measured.repeat}"
        yield self._meta("process_name", 0, {"name": name})
        yield self._meta("process_sort_index", 0, {"sort_index": self._number})
        for lane, title in LANES.items():
            yield self._meta("thread_name", lane, {"name": title})
            yield self._meta("thread_sort_index", lane, {"sort_index": lane})
        start_ns = measured.run.start_ns
        prompt = {"prompt_tokens": len(measured.task.prompt)}
        yield self._span(VERIFIER, "prefill", start_ns, records[0].start_ns, prompt)
        before_ns = start_ns
        for round_number, record in enumerate(records):
            yield from self._round(round_number, record, before_ns)
            before_ns = record.end_ns
        yield from self._arrows(records)
        yield from self._power(start_ns, records[-1].end_ns)

    def _round(self, number: int, record: StepRecord, before_ns: int) -> Iterator[Event]:
        """before_ns: the end of the forward before, of the prompt's arrival for the first one."""
        yield self._span(
            VERIFIER,
            f"forward of {record.rows}",
            record.start_ns,
            record.end_ns,
            {
                "round": number,
                "strategy": record.strategy,
                "context": record.context,
                "drafted": record.drafted,
                "accepted": record.accepted,
                "committed": record.committed,
            },
        )
        if number and record.start_ns > before_ns:
            waited = {"waited_us": record.waited_ns / 1e3}
            yield self._span(HOST, "between forwards", before_ns, record.start_ns, waited)
        first_ns = max(before_ns, record.start_ns) if number == 0 else before_ns
        kept = {"tokens": record.committed, "by": ", ".join(record.accepted_by) or "the verifier"}
        if record.end_ns > first_ns:
            yield self._span(COORDINATOR, f"round {number}", first_ns, record.end_ns, kept)
        for step in record.drafts:
            yield self._step(step)
        yield from self._marks(record)

    def _step(self, step: DraftRecord) -> Event:
        details = {"rows": step.rows, "function_rows": step.function_rows, "kept": step.kept}
        return self._span(DRAFTER, f"step of {step.rows}", step.start_ns, step.end_ns, details)

    def _marks(self, record: StepRecord) -> Iterator[Event]:
        refused = record.drafted - record.accepted
        if refused > 0:
            yield self._mark("rollback", record.end_ns, {"refused": refused})
        if record.root_was_known and record.strategy != "plain":
            yield self._mark("re-rooted", record.end_ns, {"lived_on": record.lived_on})
        sizes = {"lived on": record.lived_on, "dropped": record.dropped}
        yield self._counter("tree", record.end_ns, sizes)

    def _arrows(self, records: Sequence[StepRecord]) -> Iterator[Event]:
        """From each drafter step to the first forward of draft rows that began after it ended."""
        steps = sorted((s for r in records for s in r.drafts), key=lambda step: step.end_ns)
        forwards = [record for record in records if record.drafted]
        at = 0
        for number, step in enumerate(steps):
            while at < len(forwards) and forwards[at].start_ns < step.end_ns:
                at += 1
            if at == len(forwards):
                return
            flow = {"id": self._number * 1_000_000 + number, "cat": "draft", "name": "draft"}
            yield self._event("s", DRAFTER, step.start_ns, **flow)
            yield self._event("f", VERIFIER, forwards[at].start_ns, bp="e", **flow)

    def _power(self, start_ns: int, end_ns: int) -> Iterator[Event]:
        answer = self._measured.run.answer
        used = (answer.stats.energy_mj if answer is not None else None) or {}
        seconds = max(1e-9, (end_ns - start_ns) / 1e9)
        watts = {rail: mj / 1e3 / seconds for rail, mj in used.items() if mj is not None}
        if watts:
            yield self._counter("power, W", start_ns, watts)
            yield self._counter("power, W", end_ns, dict.fromkeys(watts, 0.0))

    def _span(self, lane: int, name: str, start_ns: int, end_ns: int, args: Event) -> Event:
        took_us = max(0, end_ns - start_ns) / 1e3
        return self._event("X", lane, start_ns, name=name, cat=LANES[lane], dur=took_us, args=args)

    def _mark(self, name: str, at_ns: int, args: Event) -> Event:
        return self._event("i", COORDINATOR, at_ns, name=name, cat="mark", s="t", args=args)

    def _counter(self, name: str, at_ns: int, values: Event) -> Event:
        return self._event("C", 0, at_ns, name=name, args=values)

    def _meta(self, name: str, lane: int, args: Event) -> Event:
        return {"ph": "M", "pid": self._number, "tid": lane, "name": name, "args": args}

    def _event(self, phase: str, lane: int, at_ns: int, **more: Any) -> Event:
        at_us = (at_ns - self._origin_ns) / 1e3
        return {"ph": phase, "pid": self._number, "tid": lane, "ts": at_us, **more}
