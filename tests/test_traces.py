"""Traces: what is written is read, nothing else is, and a replay is like the run."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, assert_one_line

from ondevice.apps.sweep import World
from ondevice.costs import CostModel, CostPoint, CostTable, table_from
from ondevice.errors import BadRequest
from ondevice.modelled import NO_CHILD, BetaText, RecordedText
from ondevice.schedule import STRATEGIES, Schedule, Strategy
from ondevice.simulate import simulate
from ondevice.traces import TraceRound, at_context, new_header, read_trace, write_trace

TABLE = table_from(
    [20 * (1 + 0.03 * n) for n in range(32)], [(8, 4.0)], verifier_slowdown=1.2, plain_ms=19.0
)


def rounds(strategy: Strategy, tokens: int, answer: int = 0) -> list[TraceRound]:
    found: list[TraceRound] = []
    simulate(
        TABLE,
        BetaText(0.7, 3),
        Schedule(strategy),
        tokens,
        on_record=lambda record: found.append(
            TraceRound(answer=answer, schedule=strategy, record=record)
        ),
    )
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    entries = [*rounds("plain", 20), *rounds("pipelined", 600, 1), *rounds("sequential", 300, 2)]
    write_trace(path, new_header("made-up", TABLE), entries)
    return path


def test_what_was_written_is_read(trace: Path) -> None:
    read = read_trace(trace)
    assert read.header == new_header("made-up", TABLE)
    assert [schedule for schedule, _ in read.answers()] == ["plain", "pipelined", "sequential"]
    written = [*rounds("plain", 20), *rounds("pipelined", 600, 1), *rounds("sequential", 300, 2)]
    assert list(read.rounds) == written
    assert len(read.outcomes()) == 900
    assert len(trace.read_text().splitlines()) == 1 + len(written)


def test_a_trace_from_before_proposers_were_recorded_is_read(trace: Path) -> None:
    new, lines = read_trace(trace), trace.read_text().splitlines()
    old = [json.loads(line) for line in lines]
    for entry in old[1:]:
        for name in ("drafted_by", "offered_by", "window"):
            del entry["record"][name]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in old))
    assert read_trace(trace).outcomes() == new.outcomes()


def test_outcomes_are_replayed_in_order(trace: Path) -> None:
    outcomes = read_trace(trace).outcomes()
    text = RecordedText(outcomes, seed=1)
    for position in (0, 7, 899, 900 + 7):
        outcome = outcomes[position % 900]
        if outcome.claims:
            assert text.claims(position) == outcome.claims
            assert text.token(position) == (outcome.taken if outcome.taken >= 0 else NO_CHILD)


@pytest.mark.parametrize("strategy", ["sequential", "pipelined"])
def test_a_replay_is_as_fast_as_the_run(trace: Path, strategy: Strategy) -> None:
    read = read_trace(trace)
    replayed = World(read.costs(), partial(RecordedText, read.outcomes(), 0))
    run = World(TABLE, partial(BetaText, 0.7, 3))
    speed = run.run(Schedule(strategy), 900).speed
    assert replayed.run(Schedule(strategy), 900).speed == pytest.approx(speed, rel=0.08)


def test_without_a_table_the_costs_are_those_of_the_records(trace: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    write_trace(bare, new_header("made-up", None), read_trace(trace).rounds)
    found, true = CostModel(read_trace(bare).costs()), CostModel(TABLE)
    assert found.plain.ms(1) == pytest.approx(19.0)
    assert found.drafter.ms(8) == pytest.approx(4.0)
    for rows in found.verifier.row_counts:
        # Only sequential rounds are alone, only pipelined ones beside a drafter all the time.
        low, high = true.verifier.ms(rows), true.verifier.ms(rows, 0, 1.0)
        assert low - 1e-6 <= found.verifier.exactly(rows) <= high + 1e-6
        assert low - 1e-6 <= found.verifier.exactly(rows, 0, 1.0) <= high + 1e-6
    assert any(found.verifier.exactly(n) == pytest.approx(true.verifier.ms(n)) for n in range(4, 9))


def test_costs_are_taken_at_one_context() -> None:
    points = (CostPoint(1, 0, 10, 20), CostPoint(1, 1000, 20, 40), CostPoint(4, 500, 9, 9))
    flat = at_context(CostTable(points, (CostPoint(1, 500, 7, 7),)), 500)
    assert flat.verifier == (CostPoint(1, 0, 15, 30), CostPoint(4, 0, 9, 9))
    assert flat.plain == (CostPoint(1, 0, 7, 7),)
    assert flat.drafter == ()


def damaged(trace: Path, line: int, edit: Any) -> Path:
    lines = trace.read_text().splitlines()
    content = json.loads(lines[line - 1])
    edit(content)
    lines[line - 1] = json.dumps(content)
    trace.write_text("\n".join(lines) + "\n")
    return trace


EDITS = {
    "mood: Extra inputs": lambda entry: entry.update(mood="good"),
    "mood: Unexpected": lambda entry: entry["record"].update(mood="good"),
    "answer": lambda entry: entry.update(answer=-1),
    "rows": lambda entry: entry["record"].update(rows="8"),
    "at least one row": lambda entry: entry["record"].update(rows=0),
    "one outcome for each": lambda entry: entry["record"].update(outcomes=[]),
    "was taken": lambda entry: entry["record"]["outcomes"][0].update(taken=7),
    "claims from 0 to 1": lambda entry: entry["record"]["outcomes"][0].update(
        claims=[1.5], taken=0
    ),
    "ended before": lambda entry: entry["record"].update(end_ns=-1),
    "Field required": lambda entry: entry["record"].pop("context"),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_is_wrong_is_named_with_its_line(trace: Path, what: str) -> None:
    with pytest.raises(BadRequest, match=rf"line 30: .*{what}"):
        read_trace(damaged(trace, 30, EDITS[what]))


def test_other_files_are_refused(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_text()
    trace.write_text(whole[: len(whole) - 9])
    with pytest.raises(BadRequest, match=f"line {len(whole.splitlines())}: .*JSON"):
        read_trace(trace)
    trace.write_text(whole.replace("ondevice-trace-1", "ondevice-trace-2", 1))
    with pytest.raises(BadRequest, match="expected ondevice-trace-1"):
        read_trace(trace)
    trace.write_text("")
    with pytest.raises(BadRequest, match="is no trace"):
        read_trace(trace)
    with pytest.raises(BadRequest, match="No such file"):
        read_trace(tmp_path / "none")
    write_trace(trace, new_header("plain", TABLE), rounds("plain", 20))
    with pytest.raises(BadRequest, match="a drafter proposed anything"):
        read_trace(trace)


def test_costs_beyond_belief_are_refused(trace: Path) -> None:
    def edit(header: Any) -> None:
        header["costs"]["drafter"][0]["alone_ms"] = 0.0

    with pytest.raises(BadRequest, match=r"line 1: costs: expected rows, a context and times"):
        read_trace(damaged(trace, 1, edit))


def test_a_trace_is_written_whole_or_not_at_all(trace: Path) -> None:
    before = trace.read_text()

    def breaks() -> Any:
        yield from rounds("pipelined", 10)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_trace(trace, new_header("x", None), breaks())
    assert trace.read_text() == before
    assert os.listdir(trace.parent) == [trace.name]


def test_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(BadRequest, match="it is a folder"):
        write_trace(tmp_path, new_header("x", None), [])
    assert (tmp_path / "kept").read_text() == "mine"


# From a real run to the table


def test_a_bench_is_recorded_and_replayed(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    bench = ("bench", tiny_pair, "--limit", 2, "--max-tokens", 24, "--json", "--records", path)
    status, out, err = run(*bench)
    assert status == 0, err
    assert "records of 16 answers are in" in err
    read = read_trace(path)
    assert {schedule for schedule, _ in read.answers()} == set(STRATEGIES)
    tokens = sum(side["tokens"] for side in json.loads(out)["sides"] if "mlx" not in side["side"])
    assert sum(record.committed for record in read.records) == tokens
    simulate_it = ("simulate", "--only", "--trace", path, "--tokens", 100, "--jobs", 1, "--json")
    status, out, err = run(*simulate_it)
    assert status == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["plain_tok_s"] == pytest.approx(1000 / 1.1)
    assert "recorded from" in row["detail"]
    assert any("the run itself: " in note and "plain " in note for note in row["notes"])


def test_a_bad_place_for_records_is_known_before_the_run(
    run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    result = run("bench", tiny_pair, "--records", tmp_path)
    assert_one_line(result, 2, "it is a folder", "name a file")
