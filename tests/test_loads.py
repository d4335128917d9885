"""Several sessions at once: what is measured, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import Run

from ondevice.apps import profile as profile_command
from ondevice.apps.failures import INTERRUPTED
from ondevice.apps.loads import (
    LEAST_PROMPTS,
    LoadFigures,
    answers_at,
    measure_loads,
    read_sessions,
    rounds_at,
    verdicts,
)
from ondevice.apps.questions import Question
from ondevice.apps.race import Spread, Task
from ondevice.apps.sides import Arrival
from ondevice.apps.sides import Run as Answered
from ondevice.errors import BadRequest


@pytest.mark.parametrize("text", ["", "0", "33", "1,,2", "a"])
def test_numbers_of_sessions_are_checked(text: str) -> None:
    with pytest.raises(BadRequest, match="--concurrency"):
        read_sessions(text)
    assert read_sessions("1,4,2,4") == (1, 4, 2)


def test_several_sessions_are_measured_and_told(run: Run, speculating: Path) -> None:
    status, out, err = run(
        *("profile", speculating, "--limit", 2, "--max-tokens", 8, "--strategy", "sequential"),
        *("--strategy", "auto", "--concurrency", "1,3", "--json"),
    )
    assert status == 0
    loads = json.loads(out)["loads"]
    assert [(load["sessions"], load["strategy"]) for load in loads] == [
        (count, strategy) for count in (1, 3) for strategy in ("plain", "sequential", "auto")
    ]
    assert [load["rounds"] for load in loads] == [6, 6, 6, 2, 2, 2]
    assert all(load["tok_s"]["median"] > 0 for load in loads)
    assert loads[0]["ratio"] == {"low": 1, "median": 1, "high": 1}
    assert loads[1]["speculating"] > 0
    assert "profile: 36 of 36 answers under load" in err.splitlines()


class Noting:
    """A side that notes what it was asked."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[str]()

    def answer(self, prompt: tuple[int, ...], max_tokens: int) -> Answered:
        self.asked.append(str(prompt[0]))
        return Answered((1,), 0, (Arrival(1, 1),))


TASKS = [Task(Question(str(number), "", "x"), (number,)) for number in range(8)]


@pytest.mark.parametrize("counts", [(1, 2, 4), (3, 8), (1,)])
def test_every_load_answers_the_same_prompts(counts: tuple[int, ...]) -> None:
    side, progress = Noting("plain"), list[int]()
    found = measure_loads(
        [side],  # type: ignore[list-item]
        TASKS,
        counts,
        max_tokens=4,
        repeats=1,
        on_answer=lambda: progress.append(1),
    )
    wanted = {str(number) for number in range(max(LEAST_PROMPTS, *counts))}
    for count, (figures,) in zip(counts, found, strict=True):
        assert figures.sessions == count
        assert figures.rounds == rounds_at(count, counts)
        assert len(side.asked) == len(progress) == answers_at(count, counts, 1)
        assert set(side.asked) >= wanted
        side.asked.clear()
        progress.clear()


def test_ctrl_c_in_the_concurrency_profile_keeps_the_loads_that_were_finished(
    run: Run, speculating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = measure_loads

    def interrupted(*given: object, **more: object) -> object:
        yield next(iter(measure(*given, **more)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_command, "measure_loads", interrupted)
    status, out, _ = run(
        *("profile", speculating, "--limit", 1, "--max-tokens", 4, "--strategy", "sequential"),
        *("--concurrency", "2,3"),
    )
    assert status == INTERRUPTED
    assert "not all was measured: interrupted in the concurrency profile" in out
    assert "sequential pays at" in out
    assert "with 2 sessions" in out
    assert "with 3 sessions" not in out


def a_load(
    sessions: int, strategy: str, ratio: float, speculating: float, reason: str = ""
) -> LoadFigures:
    spread = Spread(ratio, ratio, ratio)
    reasons = [reason] if reason else []
    return LoadFigures(sessions, strategy, 1, spread, spread, speculating, reasons)


def test_the_load_at_which_speculation_stops_paying_is_named() -> None:
    loads = [
        *(a_load(n, "plain", 1.0, 0.0) for n in (1, 2, 4)),
        *(a_load(n, "pipelined", r, 1.0) for n, r in ((1, 1.8), (2, 1.2), (4, 0.8))),
        *(a_load(n, "sequential", 1.1, 1.0) for n in (1, 2, 4)),
        *(a_load(n, "lookup", 0.9, 1.0) for n in (1, 2, 4)),
        *(a_load(n, "jacobi", r, 1.0) for n, r in ((1, 1.2), (2, 0.9), (4, 1.1))),
        *(a_load(n, "auto", r, s, f"for {n}") for n, r, s in ((1, 1.3, 1.0), (4, 0.98, 0.04))),
    ]
    told = "{} times plain with 1 session, {} times plain with 2 sessions, "
    told += "{} times plain with 4 sessions"
    assert verdicts(loads) == [
        f"pipelined stops paying at 4 sessions: {told.format('1.80', '1.20', '0.80')}",
        f"sequential pays at every load that was measured: {told.format('1.10', '1.10', '1.10')}",
        f"lookup pays at no load that was measured: {told.format('0.90', '0.90', '0.90')}",
        f"jacobi pays with 1, 4 sessions, not with 2: {told.format('1.20', '0.90', '1.10')}",
        "auto stops paying at 4 sessions: 1.30 times plain with 1 session (drafts in 100% of its "
        "forwards), 0.98 times plain with 4 sessions (drafts in 4% of its forwards)",
        "auto with 1 session, by its own measure: for 1",
        "auto with 4 sessions, by its own measure: for 4",
    ]
