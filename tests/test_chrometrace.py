"""The trace of a profile keeps the Trace Event Format, and its figures are the table's."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from profiling import answered

from ondevice.apps.chrometrace import (
    COORDINATOR,
    DRAFTER,
    HOST,
    LANES,
    VERIFIER,
    Event,
    chrome_trace,
)
from ondevice.apps.figures import profile_figures
from ondevice.apps.questions import Question
from ondevice.apps.race import Measured
from ondevice.modelled import BetaText
from ondevice.schedule import Schedule

Lane = tuple[int, int]
NUMBER = (int, float)


def problems(trace: Any) -> list[str]:
    """What of a trace in JSON object form a viewer could not use.

    Google, "Trace Event Format": every event's required fields and types; spans of a lane nest;
    arrows begin and end once, forwards in time, inside a span of their lane; names of lanes.
    """
    found: list[str] = []
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["expected an object with a list traceEvents"]
    spans: dict[Lane, list[tuple[float, float]]] = defaultdict(list)
    flows: dict[tuple[str, int], list[tuple[str, float, Lane]]] = defaultdict(list)
    named: set[Lane] = set()
    for number, event in enumerate(trace["traceEvents"]):
        wrong = [f"event {number}: {what}" for what in _fields(event)]
        found += wrong
        if wrong:
            continue
        lane = event["pid"], event["tid"]
        match event["ph"]:
            case "X":
                spans[lane].append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                flows[event["cat"], event["id"]].append((event["ph"], event["ts"], lane))
            case "M" if event["name"] == "thread_name":
                named.add(lane)
    found += [f"lane {lane} has no name" for lane in spans if lane not in named]
    for lane, lane_spans in spans.items():
        found += [f"lane {lane}: {what}" for what in _nesting(lane_spans)]
    for flow, ends in flows.items():
        found += [f"flow {flow}: {what}" for what in _flow(ends, spans)]
    return found


REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER},
    "i": {"name": str, "ts": NUMBER, "s": str},
    "C": {"name": str, "ts": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "ts": NUMBER, "id": int},
    "f": {"name": str, "cat": str, "ts": NUMBER, "id": int},
    "M": {"name": str, "args": dict},
}


def _fields(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in REQUIRED:
        return ["unknown phase"]
    needed = {"pid": int, "tid": int, **REQUIRED[event["ph"]]}
    found = [name for name, kind in needed.items() if not isinstance(event.get(name), kind)]
    if not found and (event.get("ts", 0) < 0 or event.get("dur", 0) < 0):
        found.append("a negative time")
    if event["ph"] == "i" and event.get("s") not in ("t", "p", "g"):
        found.append("scope")
    if event["ph"] == "C" and not all(isinstance(v, NUMBER) for v in event["args"].values()):
        found.append("a counter that is no number")
    return found


SLACK_US = 1e-6
"""Times are rounded to floats."""


def _nesting(spans: list[tuple[float, float]]) -> list[str]:
    found: list[str] = []
    above: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while above and above[-1] <= start + SLACK_US:
            above.pop()
        if above and end > above[-1] + SLACK_US:
            found.append(f"span {start}..{end} overlaps one that ends at {above[-1]}")
        above.append(end)
    return found


def _flow(ends: list[tuple[str, float, Lane]], spans: dict[Lane, Any]) -> list[str]:
    if sorted(phase for phase, *_ in ends) != ["f", "s"]:
        return [f"expected one beginning and one end, got {[phase for phase, *_ in ends]}"]
    times = {phase: at for phase, at, _ in ends}
    found = [] if times["s"] <= times["f"] else ["it ends before it begins"]
    for phase, at, lane in ends:
        if not any(a - SLACK_US <= at <= b + SLACK_US for a, b in spans[lane]):
            found.append(f"its {phase} is in no span")
    return found


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    return [
        answered(
            strategy,
            Schedule(strategy),  # type: ignore[arg-type]
            60,
            Question(str(number), "code", "x"),
            text=BetaText(0.7),
        )
        for number in range(2)
        for strategy in ("plain", "pipelined", "sequential", "auto")
    ]


def events(trace: dict[str, Any], phase: str, lane: int | None = None) -> list[Event]:
    found: list[Event] = trace["traceEvents"]
    return [e for e in found if e["ph"] == phase and lane in (None, e["tid"])]


def test_the_trace_keeps_the_format(measured: list[Measured]) -> None:
    trace = json.loads(json.dumps(chrome_trace("pair", measured)))
    assert problems(trace) == []
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(1, 9))
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert names == LANES
    for lane in (COORDINATOR, DRAFTER, VERIFIER, HOST):
        assert events(trace, "X", lane)
    assert events(trace, "s")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ph": "Q"}, "unknown phase"),
        ({"dur": -1.0}, "negative"),
        ({"dur": None}, "dur"),
        ({"ts": "0"}, "ts"),
        ({"tid": 99}, "no name"),
        ({"dur": 3e4}, "overlaps"),
    ],
)
def test_the_validator_sees_what_is_wrong(
    measured: list[Measured], change: dict[str, Any], words: str
) -> None:
    trace = chrome_trace("pair", measured)
    span = events(trace, "X", VERIFIER)[3]
    span |= change
    assert any(words in problem for problem in problems(trace))


@pytest.mark.parametrize("phase", ["s", "f"])
def test_the_validator_sees_an_arrow_without_an_end(measured: list[Measured], phase: str) -> None:
    trace = chrome_trace("pair", measured)
    trace["traceEvents"].remove(events(trace, phase)[0])
    assert any("expected one beginning and one end" in problem for problem in problems(trace))


def test_acceptance_counted_by_hand_is_the_table_s(measured: list[Measured]) -> None:
    trace = chrome_trace("pair", measured)
    sides = {
        event["pid"]: event["args"]["name"].split(":")[0]
        for event in events(trace, "M")
        if event["name"] == "process_name"
    }
    for figures in profile_figures(measured):
        forwards = [
            event["args"]
            for event in events(trace, "X", VERIFIER)
            if sides[event["pid"]] == figures.strategy and "round" in event["args"]
        ]
        assert sum(each["drafted"] for each in forwards) == figures.num_draft_tokens
        assert sum(each["accepted"] for each in forwards) == figures.num_accepted_draft_tokens
        assert sum(each["committed"] for each in forwards) == figures.committed
        busy_ms = sum(
            event["dur"] / 1e3
            for event in events(trace, "X", DRAFTER)
            if sides[event["pid"]] == figures.strategy
        )
        # The table counts drafting from the first forward on, the trace all of it.
        assert busy_ms >= figures.busy.drafter_ms


def test_every_rollback_and_re_rooting_is_a_mark(measured: list[Measured]) -> None:
    trace = chrome_trace("pair", measured)
    records = [record for each in measured for record in each.run.records]
    marks = [event["name"] for event in events(trace, "i", COORDINATOR)]
    assert marks.count("rollback") == sum(record.drafted > record.accepted for record in records)
    known = sum(record.root_was_known for record in records if record.strategy != "plain")
    assert marks.count("re-rooted") == known > 0
    trees = [event for event in events(trace, "C") if event["name"] == "tree"]
    assert len(trees) == len(records)
    assert any(event["args"]["lived on"] for event in trees)


def test_power_is_the_energy_over_the_answer_s_time(measured: list[Measured]) -> None:
    assert "power, W" not in {event["name"] for event in events(chrome_trace("", measured), "C")}
    first = measured[0]
    answer = first.run.answer
    assert answer is not None
    energy = {"gpu": 600.0, "ane": None}
    stats = replace(answer.stats, energy_mj=energy)  # type: ignore[arg-type]
    run = replace(first.run, answer=replace(answer, stats=stats))
    trace = chrome_trace("", [replace(first, run=run)])
    power = [event["args"] for event in events(trace, "C") if event["name"] == "power, W"]
    seconds = first.run.records[-1].end_ns / 1e9
    assert power == [{"gpu": pytest.approx(0.6 / seconds)}, {"gpu": 0.0}]


def test_nothing_measured_is_an_empty_trace() -> None:
    trace = chrome_trace("pair", [])
    assert trace["traceEvents"] == []
    assert problems(trace) == []
