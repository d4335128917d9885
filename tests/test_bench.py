"""`bench` measures all sides alike, finds every text that differs, and says what was left out."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, assert_one_line
from faulty import open_tiny, other_token
from givenquality import GivenQualityDrafter
from rich.console import Console

from ondevice.apps import bench as bench_command
from ondevice.apps.baselines import MlxLmPlain
from ondevice.apps.bench import Load, bench
from ondevice.apps.benchtable import Outcome, as_json, print_outcome
from ondevice.apps.questions import Question
from ondevice.apps.race import Measured, Spread, Standing, Task, race, rotated
from ondevice.apps.sides import Arrival, Drafting, OurSide, Side
from ondevice.apps.sides import Run as SideRun
from ondevice.arbiter import DRAFTING
from ondevice.artifact import PAIR_FILE, PairManifest
from ondevice.engine import Engine
from ondevice.schedule import STRATEGIES

QUESTIONS = (Question("1", "river", "Where is the river?"), Question("2", "ten", "Count to ten."))


class Planted:
    """A side that says another token at `position`."""

    name = "planted"

    def __init__(self, side: Side, position: int, flip: int) -> None:
        self._side, self._position, self._flip = side, position, flip

    def answer(self, prompt: Sequence[int], max_tokens: int) -> SideRun:
        run = self._side.answer(prompt, max_tokens)
        tokens = list(run.tokens)
        tokens[self._position] ^= self._flip
        return replace(run, tokens=tuple(tokens))


# The race


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_side_comes_at_every_place_and_follows_different_sides(count: int) -> None:
    sides = list(range(count))
    orders = [rotated(sides, turn) for turn in range(2 * count)]
    for place in range(count):
        assert Counter(order[place] for order in orders) == dict.fromkeys(sides, 2)
    followers = {pair for order in orders for pair in itertools.pairwise(order)}
    assert all((other, one) in followers for one, other in followers)


def test_all_answer_each_task_before_the_next_one_comes() -> None:
    asked: list[tuple[str, tuple[int, ...], int]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, prompt: Sequence[int], max_tokens: int) -> SideRun:
            asked.append((self.name, tuple(prompt), max_tokens))
            return SideRun((1,), 0, (Arrival(1, 1),))

    tasks = [Task(question, (index,)) for index, question in enumerate(QUESTIONS)]
    counted: list[None] = []
    measured = race([Recorder("a"), Recorder("b")], tasks, 30, 2, lambda: counted.append(None))
    assert asked[:2] == [("a", (0,), 8), ("b", (0,), 8)]  # the warm-up
    assert [prompt for _, prompt, _ in asked[2:]] == [(0,), (0,), (1,), (1,)] * 2
    assert {tokens for _, _, tokens in asked[2:]} == {30}
    assert len(counted) == len(measured) == 8


def fabricated(side: str, rates: Sequence[Sequence[float]]) -> Standing:
    """rates[question][repeat], in tokens a second."""
    runs = []
    for number, of_question in enumerate(rates):
        task = Task(Question(str(number), "", "x"), (1,))
        for repeat, rate in enumerate(of_question):
            arrivals = (Arrival(0, 1), Arrival(round(1e9 * 12 / rate), 12))
            runs.append(Measured(task, repeat, side, SideRun((1,) * 13, 0, arrivals)))
    return Standing(side, tuple(runs), ())


def test_ratios_are_paired_by_question_and_repeat() -> None:
    """The machine slows down by half after the first repeat: no ratio knows of it."""
    base = fabricated("base", [[10, 5], [20, 10], [40, 20]])
    ours = fabricated("ours", [[15, 7.5], [40, 20], [100, 50]])
    assert ours.ratio_to(base) == Spread(1.75, 2.0, 2.25)
    assert base.decode_tok_s == Spread(11.25, 15, 22.5)


def test_a_spread_needs_a_value() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


# Differences


def test_a_planted_token_is_found_where_it_is(engine: Engine, mlx_lm: MlxLmPlain) -> None:
    sides: list[Side] = [mlx_lm, Planted(OurSide(engine, "plain"), position=7, flip=1)]
    outcome = bench(engine, "tiny", sides, Load(QUESTIONS, 12))
    assert not outcome.passed
    standing = outcome.standings[1]
    assert standing.faults == len(QUESTIONS)
    assert [(each.position, each.strategy) for each in standing.differences] == [(7, "planted")] * 2
    shown = rendered(outcome)
    assert "FAULT: planted at temperature 0, token 7 is " in shown
    assert shown.rstrip().endswith("FAILED: a text is not mlx-lm's")


def test_a_near_tie_is_counted_and_passed(twin_pair: Path) -> None:
    with Engine.open_folder(twin_pair, measure=False) as engine:
        plain = MlxLmPlain(twin_pair / "verifier", engine.model.end_tokens)
        sides: list[Side] = [plain, Planted(OurSide(engine, "plain"), position=3, flip=1)]
        outcome = bench(engine, "twins", sides, Load(QUESTIONS, 12))
    assert outcome.passed
    assert outcome.standings[1].near_ties == len(outcome.standings[1].differences) > 0
    assert "near-tie: planted at temperature 0, token 3 " in rendered(outcome)


# The command


def rendered(outcome: Outcome, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    print_outcome(outcome, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_is_one_object(run: Run, tiny_pair: Path) -> None:
    command = ("bench", tiny_pair, "--limit", 2, "--max-tokens", 6, "--repeats", 2, "--json")
    status, out, err = run(*command)
    assert status == 0, err
    found = json.loads(out)
    assert out == json.dumps(found) + "\n"
    sides = ["mlx-lm", "mlx-lm speculative", *STRATEGIES]
    assert [side["side"] for side in found["sides"]] == sides
    assert len(found["answers"]) == 2 * 2 * len(sides)
    assert (found["prompts"], found["max_tokens"], found["repeats"]) == (2, 6, 2)
    assert found["passed"] is True
    first, *others = found["sides"]
    assert first["ratio"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert all(side["ratio"]["median"] > 0 for side in others)
    assert f"bench: {2 * 2 * len(sides)} of {2 * 2 * len(sides)} answers" in err.splitlines()


def test_the_table_has_a_row_a_side(run: Run, tiny_pair: Path) -> None:
    status, out, _ = run("bench", tiny_pair, "--limit", 1, "--max-tokens", 6)
    assert status == 0
    lines = out.splitlines()
    rows = ["mlx-lm", "mlx-lm speculative", *STRATEGIES]
    assert all(line.startswith(name) for name, line in zip(rows, lines[2:], strict=False))
    assert lines[-1].startswith("passed: every text is mlx-lm's")


@pytest.mark.parametrize("width", [80, 100])
def test_no_figure_is_cut_on_a_terminal(width: int) -> None:
    drafting = Drafting(1000, 3000, 2345)
    base, fast = (
        fabricated("mlx-lm", [[98.7]] * 3),
        fabricated("mlx-lm speculative", [[1233.6], [1234.0], [1234.4]]),
    )
    runs = [replace(each, run=replace(each.run, drafting=drafting)) for each in fast.runs]
    standings = (base, replace(fast, runs=tuple(runs)))
    shown = rendered(Outcome("pair", 3, 13, 1, standings, {}, ()), width)
    (row,) = (line for line in shown.splitlines() if line.startswith("mlx-lm speculative"))
    assert row.split()[2:] == [
        *("1234", "(1234-1234)", "12.50", "(12.50-12.50)"),
        *("2.35", "78%", "0", "3/3"),
    ]


def test_only_the_strategies_asked_for_are_measured(run: Run, tiny_pair: Path) -> None:
    command = ("bench", tiny_pair, "--limit", 1, "--max-tokens", 4, "--json")
    _, out, _ = run(*command, "--strategy", "pipelined", "--strategy", "plain")
    names = [side["side"] for side in json.loads(out)["sides"]]
    assert names == ["mlx-lm", "mlx-lm speculative", "pipelined", "plain"]


def test_a_pair_without_a_drafter_runs_what_needs_none_and_says_why(
    run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    manifest = PairManifest.read(pair / PAIR_FILE)
    manifest.model_copy(update={"drafter": None}).write(pair / PAIR_FILE)
    status, out, _ = run("bench", pair, "--limit", 1, "--max-tokens", 4, "--json")
    assert status == 0
    found = json.loads(out)
    need_none = [name for name in STRATEGIES if name not in DRAFTING]
    assert [side["side"] for side in found["sides"]] == ["mlx-lm", *need_none]
    assert found["left_out"] == dict.fromkeys(
        ["mlx-lm speculative", "sequential", "pipelined"], "the pair has no drafter"
    )
    _, out, _ = run("bench", pair, "--limit", 1, "--max-tokens", 4)
    names = ", ".join(found["left_out"])
    assert f"left out: {names}: the pair has no drafter" in out


def test_a_fault_of_a_schedule_is_exit_status_1(
    run: Run, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "open_engine", lambda _: open_tiny(tiny_pair, other_token))
    status, out, _ = run("bench", tiny_pair, "--limit", 1, "--max-tokens", 150)
    assert status == 1
    assert re.search("FAULT: (sequential|pipelined|auto)", out)


def test_mistakes_are_one_line(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question_id": 1}\n', encoding="utf-8")
    long = tmp_path / "long.txt"
    long.write_text("river " * 2000, encoding="utf-8")
    assert_one_line(run("bench", "no-such-pair"), 2, "no-such-pair")
    assert_one_line(run("bench", tiny_pair, "--strategy", "magic"), 2, "'magic'", "plain")
    assert_one_line(run("bench", tiny_pair, "--max-tokens", 1), 2, "max tokens", "2 or more")
    assert_one_line(run("bench", tiny_pair, "--repeats", 0), 2, "repeats", "got 0")
    assert_one_line(run("bench", tiny_pair, "--limit", 0), 2, "limit", "got 0")
    bad = run("bench", tiny_pair, "--prompts", tmp_path / "bad.jsonl")
    assert_one_line(bad, 2, "line 1", "turns")
    assert_one_line(run("bench", tiny_pair, "--prompts", tmp_path / "none"), 2, "none")
    assert_one_line(run("bench", tiny_pair, "--prompts", long), 2, "prompt 1", "context of 4096")


def test_reasons_beyond_the_set_strategy_are_told(tiny_pair: Path) -> None:
    def dead() -> GivenQualityDrafter:
        raise RuntimeError("no Neural Engine here")

    with open_tiny(tiny_pair, drafter=dead) as engine:
        outcome = bench(engine, "tiny", [OurSide(engine, "pipelined")], Load(QUESTIONS, 4))
    assert (
        "pipelined: plain: the drafter did not open: no Neural Engine here (2 answers)"
        in rendered(outcome)
    )
    (side,) = as_json(outcome)["sides"]
    assert list(side["reasons"].values()) == [2]
