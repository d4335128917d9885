"""The table of DESIGN in virtual time: its shape, its columns, and who may ask for what."""

from __future__ import annotations

import gc
import io
import json
import sys
import time
from functools import partial
from typing import Any

import pytest
from commandline import Run, assert_one_line
from rich.console import Console
from test_sweep import EvenText

from ondevice.apps.cases import Machine, design_cases, predicted_cases, stated_cases
from ondevice.apps.columns import Column, Plan, Row, best_of, free_drafter, measured
from ondevice.apps.simtable import print_rows
from ondevice.apps.sweep import Entrant, World
from ondevice.costs import table_from
from ondevice.modelled import BetaText
from ondevice.models.devices import known_device
from ondevice.records import StepRecord
from ondevice.schedule import Schedule, Sizes, Strategy
from ondevice.simulate import simulate

EIGHT, TWELVE = 0, 2
"""Rows of DESIGN."""


# Demands


def test_the_naive_overlapped_chain_loses_where_drafting_is_cheap_and_the_tree_does_not() -> None:
    """The published negative result (12B in bfloat16): overlap alone gains nothing."""
    world = design_cases(0)[TWELVE].world
    naive = best_of("overlapped chain", world, 600).best.speed
    in_turn = best_of("sequential chain", world, 600).best.speed
    tree = world.run(Schedule("pipelined"), 600).speed
    assert naive < in_turn < tree


def test_a_tree_in_turn_beats_a_chain_in_turn_and_overlapping_beats_both() -> None:
    world = design_cases(0)[EIGHT].world
    chain, tree, overlapped = (
        world.run(Schedule(strategy, children), 1500).speed
        for strategy, children in (("sequential", 1), ("sequential", 4), ("pipelined", 4))
    )
    assert 1.2 < chain < tree < overlapped
    assert overlapped / tree > 1.2


def test_little_is_lost_against_a_drafter_that_takes_no_time() -> None:
    world = design_cases(0)[EIGHT].world
    free = free_drafter(world, 800)
    auto = world.run(Schedule("auto"), 800).speed
    assert 0.78 <= auto / free.speed < 1


def test_the_cases_are_those_of_design() -> None:
    cases = design_cases(0)
    plain_ms = [case.world.table.plain[0].alone_ms for case in cases]
    assert plain_ms == [20, 20, 105, 14, 62, 62]
    last = cases[-1].world.table
    assert [point.alone_ms for point in last.drafter] == pytest.approx(
        [7.1, 8.2, 9.3, 10.4, 11.5, 12.6, 13.7, 14.8]
    )
    assert all(p.beside_ms == pytest.approx(1.16 * p.alone_ms) for p in last.verifier)
    tree = [case.published["overlapped tree"] for case in cases]
    assert tree == [2.47, 2.99, 3.24, 1.82, 2.72, 2.13]


@pytest.mark.slow
def test_designs_table_is_reproduced_within_5_percent_or_better() -> None:
    rows = [measured(case, Plan(4000)) for case in design_cases(0)]
    short = [
        (row.case.name, kind, row.difference(kind))
        for row in rows
        for kind in row.columns
        if (row.difference(kind) or 0) < -0.05
    ]
    assert short == []
    assert rows[EIGHT].efficiency is not None
    assert rows[EIGHT].efficiency >= 0.78
    columns = rows[TWELVE].columns
    assert columns["overlapped chain"].best.speed < columns["sequential chain"].fixed.speed
    assert columns["overlapped tree"].best.speed > columns["sequential tree"].best.speed


@pytest.mark.slow
def test_ten_thousand_tokens_take_less_than_20_seconds() -> None:
    start_s = time.process_time()
    simulate(design_cases(0)[EIGHT].world.table, BetaText(0.7), Schedule("auto"), 10_000)
    assert time.process_time() - start_s < 20


# Memory


def growth(strategy: Strategy, draft_ms: float, between: tuple[int, int]) -> tuple[int, int]:
    """(memory blocks, tokens) that a long answer gains between two of its rounds."""
    seen: list[tuple[int, int]] = []
    rounds = tokens = 0

    def count(record: StepRecord) -> None:
        nonlocal rounds, tokens
        rounds, tokens = rounds + 1, tokens + record.committed
        if rounds in between:
            gc.collect()
            seen.append((sys.getallocatedblocks(), tokens))

    table = table_from([20 + 0.6 * rows for rows in range(32)], [(8, draft_ms)])
    simulate(table, EvenText(0.6), Schedule(strategy), 4 * between[1], on_record=count)
    (first_blocks, first_tokens), (last_blocks, last_tokens) = seen
    return last_blocks - first_blocks, last_tokens - first_tokens


@pytest.mark.parametrize(
    ("strategy", "draft_ms", "between"),
    [
        ("sequential", 8.0, (500, 2500)),
        pytest.param("sequential", 4.0, (20_000, 100_000), marks=pytest.mark.slow),
        pytest.param("pipelined", 4.0, (20_000, 100_000), marks=pytest.mark.slow),
        pytest.param("auto", 4.0, (20_000, 100_000), marks=pytest.mark.slow),
    ],
)
def test_memory_grows_by_the_committed_text_alone(
    strategy: Strategy, draft_ms: float, between: tuple[int, int]
) -> None:
    blocks, tokens = growth(strategy, draft_ms, between)
    assert tokens > between[1] - between[0]
    assert blocks < 3000 + 0.02 * tokens  # small integers are shared: a token takes no block


# The command


def as_stated(*more: object) -> list[object]:
    machine: list[object] = ["--verify-ms", 20, "--draft-ms", 8, "--row-cost", 5]
    return ["simulate", "--only", *machine, "--tokens", 60, "--jobs", 1, *more]


def test_json_is_one_object_and_the_same_every_time(run: Run) -> None:
    line = as_stated("--acceptance", 0.6, "--acceptance", 0.9, "--seed", 7, "--json")
    line += ["--strategy", "auto", "--strategy", "sequential"]
    status, out, err = run(*line)
    assert status == 0, err
    found = json.loads(out)
    assert out == json.dumps(found) + "\n"
    assert (found["seed"], found["tokens"]) == (7, 60)
    assert [row["name"] for row in found["rows"]] == ["as stated, a 0.60", "as stated, a 0.90"]
    slow, fast = found["rows"]
    assert slow["auto"]["speed"] < fast["auto"]["speed"]
    assert slow["plain_tok_s"] == pytest.approx(50)
    assert set(slow["columns"]) == {"sequential chain", "sequential tree"}
    assert 0 < slow["efficiency"] < 1.05
    # In two processes nothing changes.
    line[line.index("--jobs") + 1] = 2
    assert run(*line)[1] == out


def test_only_the_columns_asked_for_are_there_and_the_naive_chain_is_fixed(run: Run) -> None:
    status, out, _ = run(*as_stated("--strategy", "pipelined", "--json"))
    assert status == 0
    (row,) = json.loads(out)["rows"]
    assert set(row["columns"]) == {"overlapped chain", "overlapped tree"}
    assert row["columns"]["overlapped chain"]["sized_by"] == "sweep"
    assert row["columns"]["overlapped chain"]["fixed"]["sizes"]["verify_rows"] >= 2
    assert row["auto"] is row["free_drafter"] is row["efficiency"] is None


def test_a_prediction_says_that_it_is_one(run: Run) -> None:
    line = ["--device", "m4-pro", "--workload", "qwen3-8b-4bit", "--strategy", "sequential"]
    status, out, err = run("simulate", "--only", *line, "--tokens", 60, "--jobs", 1)
    assert status == 0, err
    assert "m4-pro, a 0.70: PREDICTION, not measured: " in out
    figures = known_device("m4-pro").figures()
    estimated = [name for name, figure in figures.items() if figure.kind == "estimated"]
    assert estimated
    assert f": {', '.join(estimated)}\n" in out


def test_a_predictions_costs_are_those_of_the_model() -> None:
    (case,) = predicted_cases("m4-pro", "qwen3-8b-4bit", [0.7], context=512, seed=0)
    (longer,) = predicted_cases("m4-pro", "qwen3-8b-4bit", [0.7], context=4096, seed=0)
    assert case.prediction
    one, long_one = (each.world.table.verifier[0].alone_ms for each in (case, longer))
    # 4.5 bits of 7.6 billion weights at no more than 273 GB/s.
    assert 7.5e9 * 4.5 / 8 / 273e9 * 1e3 < one < long_one


MISTAKES: dict[str, list[object]] = {
    "--draft-ms is missing": ["--verify-ms", 20],
    "--verify-ms is missing": ["--row-cost", 5],
    "--verify-ms must be": ["--verify-ms", 0, "--draft-ms", 1],
    "--draft-ms must be": ["--verify-ms", 20, "--draft-ms", "nan"],
    "--row-cost must be": ["--verify-ms", 20, "--draft-ms", 1, "--row-cost", -1],
    "--draft-rows must be 1 to 64": ["--verify-ms", 20, "--draft-ms", 1, "--draft-rows", 65],
    "--slowdown must be 1 to": ["--verify-ms", 20, "--draft-ms", 1, "--slowdown", 0.5],
    "--acceptance must be": ["--verify-ms", 20, "--draft-ms", 1, "--acceptance", 1],
    "--acceptance is that of a row": ["--acceptance", 0.5],
    "got --device alone": ["--device", "m4-max"],
    "got --workload alone": ["--workload", "qwen3-8b-4bit"],
    "no device 'm99': expected one of m1": ["--device", "m99", "--workload", "qwen3-8b-4bit"],
    "no workload 'gpt'": ["--device", "m4-max", "--workload", "gpt"],
    "--only leaves no row": ["--only"],
    "--tokens must be 50 to": ["--tokens", 9],
    "--seed must be 0 or more": ["--seed", -1],
    "--jobs must be 1 or more": ["--jobs", 0],
    "--context must be": ["--context", -1],
    "strategy must be one of auto": ["--strategy", "magic"],
    "--quick is part of --regret": ["--quick"],
    "--regret has a grid of its own": ["--regret", "--strategy", "auto"],
    "cannot read the trace": ["--trace", "no-such-file"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(run: Run, words: str) -> None:
    assert_one_line(run("simulate", *MISTAKES[words]), 2, words)


# What people see


def a_row(case: Any, difference: float = 0.0) -> Row:
    sizes = Sizes(12, 10, 4)
    swept = Schedule("pipelined", 4, sizes=sizes)
    columns = {
        kind: Column(Entrant(swept, 0.5), Entrant(Schedule(), (1 + difference) * figure))
        for kind, figure in case.published.items()
    } or {"sequential tree": Column(Entrant(swept, 1.0))}
    auto = World(case.world.table, partial(BetaText, 0.7, 0)).run(Schedule("auto"), 50)
    return Row(case, 16.1, columns, auto, Entrant(swept, 3.02))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_shows_the_published_figures(width: int) -> None:
    rows = [a_row(case, difference=-0.104) for case in design_cases(0)]
    console = Console(width=width, file=io.StringIO())
    print_rows(rows, Plan(4000), 3, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    table, _, notes = shown.partition("\n\n")
    assert "…" not in shown
    assert all(len(line.rstrip()) <= width for line in table.splitlines())
    for case in design_cases(0):
        assert case.name in table
        figures = " ".join(f"{figure:.2f}" for figure in case.published.values())
        assert figures in " ".join(table.split())
    assert table.count("-10.4 %") == 24
    assert table.count("12x10x4") == 24 + 6
    assert "4000 tokens a run, seed 3" in notes
    assert all(case.detail in notes for case in design_cases(0))


def test_rows_of_ones_own_come_with_the_reason_of_auto() -> None:
    (case,) = stated_cases(Machine(20, 4), [0.7], seed=0)
    console = Console(width=100, file=io.StringIO())
    row = a_row(case)
    print_rows([row], Plan(50, ("auto",)), 0, console)
    assert isinstance(console.file, io.StringIO)
    assert f"{case.name}: auto: pipelined: " in console.file.getvalue()
    assert "DESIGN" not in console.file.getvalue()
