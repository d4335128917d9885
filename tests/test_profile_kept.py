"""`profile` that is ended early, or whose output is refused: what is finished is never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import COMMAND, Run, assert_one_line
from faulty import open_tiny

from ondevice.apps import profile as profile_command
from ondevice.apps.bench import Load, make_tasks
from ondevice.apps.failures import BROKEN_PIPE, INTERRUPTED
from ondevice.apps.profile import collect
from ondevice.apps.questions import own_questions
from ondevice.apps.report import read_report
from ondevice.apps.sides import OurSide, our_sides
from ondevice.engine import Engine
from ondevice.errors import UnitFailed


class Interrupting:
    """A side whose answer number `at` is interrupted, or fails."""

    def __init__(self, side: OurSide, at: int, error: BaseException) -> None:
        self.name, self._side, self._left, self._error = side.name, side, at, error

    def answer(self, prompt: tuple[int, ...], max_tokens: int) -> object:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._side.answer(prompt, max_tokens)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> Callable[..., None]:
    """The last side of every profile is `Interrupting` from now on."""

    def sides(engine: Engine, strategies: list[str]) -> tuple[list[object], dict[str, str]]:
        made, left_out = our_sides(engine, strategies)  # type: ignore[arg-type]
        return [*made[:-1], Interrupting(made[-1], at, error)], left_out

    monkeypatch.setattr(profile_command, "our_sides", sides)
    return lambda: None


def test_ctrl_c_shows_and_writes_the_finished_part(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 3, KeyboardInterrupt())  # after the warm-up and two answers
    saved = tmp_path / "saved.json"
    status, out, _ = run(
        *("profile", tiny_pair, "--limit", 4, "--max-tokens", 6, "--save", saved),
        *("--strategy", "pipelined"),
    )
    assert status == INTERRUPTED
    assert "not all was measured: interrupted" in out
    report = read_report(saved)
    assert (report.planned, report.stopped) == (8, "interrupted")
    assert 4 <= report.answers <= 5


def test_a_failure_shows_the_finished_part_and_is_told(
    run: Run, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 2, UnitFailed("the verifier failed: no memory"))
    status, out, err = run(
        *("profile", tiny_pair, "--limit", 2, "--max-tokens", 6, "--strategy", "auto")
    )
    assert status == 1
    assert "not all was measured: the verifier failed: no memory" in out
    assert err.splitlines()[-1] == "ondevice: the verifier failed: no memory"


def test_ctrl_c_before_the_first_answer_is_just_that(
    run: Run, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 0, KeyboardInterrupt())
    status, out, _ = run("profile", tiny_pair, "--limit", 1, "--max-tokens", 6)
    assert (status, out) == (INTERRUPTED, "")


def test_after_the_deadline_no_turn_begins_and_the_first_is_whole(tiny_pair: Path) -> None:
    load = Load(own_questions()[:3], 4)
    with open_tiny(tiny_pair) as engine:
        sides, _ = our_sides(engine, ["plain", "auto"])
        collected = collect(sides, make_tasks(engine, load), load, deadline=0.0)
    assert [each.side for each in collected.measured] == ["plain", "auto"]
    assert (collected.planned, collected.stopped) == (6, "the time of --quick was over")
    assert collected.trouble is None


def test_an_output_that_cannot_be_written_costs_nothing_else(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the page vanishes behind a file while the answers are measured."""
    blocked, saved = tmp_path / "pages", tmp_path / "saved.json"

    def sides(*arguments: object) -> object:
        blocked.write_text("")
        return our_sides(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(profile_command, "our_sides", sides)
    status, out, err = run(
        *("profile", tiny_pair, "--limit", 1, "--max-tokens", 4, "--strategy", "plain"),
        *("--html", blocked / "page.html", "--save", saved),
    )
    assert status == 2
    assert "tok/s" in out
    assert read_report(saved).answers == 1
    assert "page.html" in err.splitlines()[-1]


# In a process of its own


def started(pair: Path, *options: object) -> subprocess.Popen[str]:
    """`profile` as a shell starts it; a test run in the background would hand its SIGINT down."""
    return subprocess.Popen(
        [*COMMAND, "profile", str(pair), *map(str, options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def after_a_tenth(process: subprocess.Popen[str]) -> None:
    """Wait for the first line of progress."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("profile: "):
            return
    pytest.fail("it ended without a line of progress")


LONG = ("--strategy", "pipelined", "--max-tokens", 48, "--limit", 30)
"""Its first line of progress comes after 6 of 60 answers."""


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_a_signal_to_the_whole_group_leaves_the_finished_part_everywhere(
    tiny_pair: Path, tmp_path: Path, as_json: bool
) -> None:
    """A terminal sends it to the drafter's process, too."""
    saved, shown, trace = (tmp_path / name for name in ("saved.json", "page.html", "trace.json"))
    outputs = ("--save", saved, "--html", shown, "--trace", trace)
    process = started(tiny_pair, *LONG, *outputs, *(["--json"] if as_json else []))
    after_a_tenth(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    report = read_report(saved)
    assert report.stopped == "interrupted"
    assert 0 < report.answers < report.planned
    assert report.figures
    if as_json:
        assert json.loads(out) == report.as_json()
    else:
        assert "not all was measured: interrupted" in out
    assert "not all was measured: interrupted" in shown.read_text(encoding="utf-8")
    assert json.loads(trace.read_text(encoding="utf-8"))["otherData"]["answers"] == report.answers


QUICK = ("--strategy", "plain", "--max-tokens", 4, "--limit", 1)


def test_a_reader_that_left_costs_no_file(tiny_pair: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    process = started(tiny_pair, *QUICK, "--save", saved)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == BROKEN_PIPE
    process.stderr.close()
    assert "Traceback" not in err
    assert read_report(saved).answers == 1


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout_costs_no_file(tiny_pair: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with FULL.open("w") as full:
        command = [*COMMAND, "profile", str(tiny_pair), *map(str, QUICK), "--save", str(saved)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("ondevice: cannot write the output: No space")
    assert read_report(saved).answers == 1


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_device_is_no_file_to_be_replaced(run: Run, tmp_path: Path) -> None:
    for option in ("--save", "--html", "--trace"):
        assert_one_line(
            run("profile", tmp_path / "no-such-pair", option, FULL), 2, "no ordinary file"
        )
    assert FULL.is_char_device()


def test_no_output_takes_another_one_s_place(run: Run, tmp_path: Path) -> None:
    one, link = tmp_path / "one", tmp_path / "link"
    one.write_text("Hello?\n", encoding="utf-8")
    link.symlink_to(one)

    def mistake(*arguments: object) -> tuple[int, str, str]:
        return run("profile", tmp_path / "no-such-pair", *arguments)

    assert_one_line(mistake("--html", one, "--save", link), 2, "another output")
    assert_one_line(mistake("--html", one, "--save", one), 2, "another output")
    assert_one_line(mistake("--prompts", one, "--trace", link), 2, "link", "the prompts")
    assert one.read_text(encoding="utf-8") == "Hello?\n"
