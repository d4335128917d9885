"""`profile`: what it measures, prints, writes and refuses; what is finished is never lost."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Run, assert_one_line, runner
from faulty import open_tiny
from profiling import PROMPTS, TOKENS, open_given
from rich.console import Console

from ondevice.apps import profile as profile_command
from ondevice.apps.bench import Load, make_tasks
from ondevice.apps.failures import INTERRUPTED
from ondevice.apps.figures import EVERY
from ondevice.apps.loads import LoadFigures, read_sessions, verdicts
from ondevice.apps.profile import collect
from ondevice.apps.profiletable import print_report
from ondevice.apps.published import published_questions
from ondevice.apps.questions import own_questions
from ondevice.apps.race import Spread
from ondevice.apps.report import Report, json_schema, read_report
from ondevice.apps.sides import OurSide, our_sides
from ondevice.costs import StepCosts
from ondevice.engine import Engine
from ondevice.errors import BadRequest, UnitFailed

DOMAINS = ["code", "summary", "chat", "translation", "maths", "extraction"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capfd, monkeypatch)


@pytest.fixture
def speculating(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny pair with a drafter that is right in 8 of 10 places, and costs that let it draft."""
    # Costs stay as given: the tiny verifier is so quick that no draft would be worth its time.
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr(profile_command, "open_engine", lambda _: open_given(tiny_pair, 0.8))
    return tiny_pair


# What it measures


def test_json_has_every_strategy_and_domain_and_every_figure(run: Run, speculating: Path) -> None:
    status, out, err = run(
        *("profile", speculating, "--limit", 6, "--max-tokens", 12, "--json"),
        *("--strategy", "pipelined", "--strategy", "auto"),
    )
    assert status == 0, err
    found = json.loads(out)
    assert out == json.dumps(found) + "\n"
    assert found["format"] == "ondevice-profile-1"
    counts = [found[name] for name in ("prompts", "planned", "answers", "stopped")]
    assert counts == [6, 18, 18, ""]
    assert [(each["strategy"], each["domain"]) for each in found["figures"]] == [
        (strategy, domain)
        for strategy in ("plain", "pipelined", "auto")
        for domain in (EVERY, *DOMAINS)
    ]
    plain, pipelined = found["figures"][0], found["figures"][1 + len(DOMAINS)]
    assert plain["speed_up"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert plain["same_text"] == 6
    assert pipelined["num_draft_tokens"] > 0
    assert pipelined["acceptance_rate"] == (
        pipelined["num_accepted_draft_tokens"] / pipelined["num_draft_tokens"]
    )
    assert pipelined["memory"]["verifier"]["weights_bytes"] > 0
    assert 0.6 < pipelined["first_choice_rate"] < 0.95
    assert pipelined["energy_reason"]
    assert [row["domain"] for row in found["reported"]] == DOMAINS[:4]
    assert "profile: 18 of 18 answers" in err.splitlines()
    assert any(line.endswith(" s left") for line in err.splitlines())


def test_tables_name_everything_and_say_how_it_was_measured(run: Run, speculating: Path) -> None:
    status, out, _ = run(
        *("profile", speculating, "--limit", 4, "--max-tokens", 8, "--strategy", "sequential")
    )
    assert status == 0
    for words in (
        *("plain", "sequential", "code", "translation", "times plain", "verifier waited"),
        *("as reported by the field, and as measured here", "75-85 %", "2.5-3.5"),
        *("8 of 8 answers of up to 8 tokens to 4 prompts", "peak memory", "energy not measured"),
    ):
        assert words in out, words


@pytest.mark.parametrize("width", [100, 120])
def test_no_figure_is_cut_on_a_terminal(run: Run, speculating: Path, width: int) -> None:
    _, out, _ = run("profile", speculating, "--limit", 2, "--max-tokens", 8, "--json")
    console = Console(width=width, file=io.StringIO())
    print_report(Report.model_validate_json(out), console)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()


def test_only_the_domains_asked_for(run: Run, speculating: Path) -> None:
    _, out, _ = run(
        *("profile", speculating, "--domain", "maths", "--domain", "chat", "--limit", 2),
        *("--max-tokens", 4, "--strategy", "plain", "--json"),
    )
    domains = [each["domain"] for each in json.loads(out)["figures"]]
    assert sorted(domains) == [EVERY, "chat", "maths"]


def test_published_sets_are_read_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    questions, absent = published_questions()
    assert "Spec-Bench" in absent
    folder = tmp_path / "shared" / "prompts"
    folder.mkdir(parents=True)
    line = '{"question_id": 81, "category": "math_reasoning", "turns": ["How many?"]}\n'
    (folder / "spec_bench.jsonl").write_text(line, encoding="utf-8")
    more, absent = published_questions()
    assert "Spec-Bench" not in absent
    (question,) = more[: len(more) - len(questions)]
    assert (question.id, question.category) == ("spec_bench-81", "maths")


# What is finished is kept


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
    run: Run, speculating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 3, KeyboardInterrupt())  # after the warm-up and two answers
    saved = tmp_path / "saved.json"
    status, out, _ = run(
        *("profile", speculating, "--limit", 4, "--max-tokens", 6, "--save", saved),
        *("--strategy", "pipelined"),
    )
    assert status == INTERRUPTED
    assert "not all was measured: interrupted" in out
    report = read_report(saved)
    assert (report.planned, report.stopped) == (8, "interrupted")
    assert 4 <= report.answers <= 5


def test_a_failure_shows_the_finished_part_and_is_told(
    run: Run, speculating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 2, UnitFailed("the verifier failed: no memory"))
    status, out, err = run(
        *("profile", speculating, "--limit", 2, "--max-tokens", 6, "--strategy", "auto")
    )
    assert status == 1
    assert "not all was measured: the verifier failed: no memory" in out
    assert err.splitlines()[-1] == "ondevice: the verifier failed: no memory"


def test_ctrl_c_before_the_first_answer_is_just_that(
    run: Run, speculating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 0, KeyboardInterrupt())
    status, out, _ = run("profile", speculating, "--limit", 1, "--max-tokens", 6)
    assert (status, out) == (INTERRUPTED, "")


def test_after_the_deadline_no_turn_begins_and_the_first_is_whole(tiny_pair: Path) -> None:
    load = Load(own_questions()[:3], 4)
    with open_tiny(tiny_pair) as engine:
        sides, _ = our_sides(engine, ["plain", "auto"])
        collected = collect(sides, make_tasks(engine, load), load, deadline=0.0)
    assert [each.side for each in collected.measured] == ["plain", "auto"]
    assert (collected.planned, collected.stopped) == (6, "the time of --quick was over")
    assert collected.trouble is None


# Mistakes


def test_mistakes_are_one_line_before_anything_is_opened(
    run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    empty, broken = tmp_path / "empty.txt", tmp_path / "broken.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    good = '{"question_id": 1, "category": "x", "turns": ["y"]}\n'
    broken.write_text(good + good.replace("1,", "2,") + '{"question_id": 3,\n', encoding="utf-8")
    plain = tmp_path / "saved.json"
    plain.write_text('{"format": "ondevice-profile-9"}', encoding="utf-8")

    def mistake(*arguments: object) -> tuple[int, str, str]:
        return run("profile", tmp_path / "no-such-pair", *arguments)

    assert_one_line(mistake("--prompts", empty), 2, "holds no prompt", "one a line")
    assert_one_line(mistake("--prompts", broken), 2, "broken.jsonl, line 3")
    assert_one_line(mistake("--domain", "poetry"), 2, "'poetry'", "code", "maths")
    assert_one_line(mistake("--max-tokens", 1), 2, "max tokens", "2 or more")
    assert_one_line(mistake("--repeats", 0), 2, "repeats")
    assert_one_line(mistake("--strategy", "magic"), 2, "'magic'")
    assert_one_line(mistake("--concurrency", "2,x"), 2, "--concurrency", "'2,x'")
    assert_one_line(mistake("--html", tmp_path), 2, "it is a folder")
    assert_one_line(mistake("--trace", empty / "x.json"), 2, "is no folder")
    assert_one_line(mistake("--compare", tmp_path / "none"), 2, "none", "--save")
    assert_one_line(mistake("--compare", plain), 2, "format", "ondevice-profile-1")
    long = tmp_path / "long.txt"
    long.write_text("river " * 2000, encoding="utf-8")
    assert_one_line(run("profile", tiny_pair, "--prompts", long), 2, "prompt 1", "context of 4096")


def test_an_output_that_cannot_be_written_costs_nothing_else(
    run: Run, speculating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the page vanishes behind a file while the answers are measured."""
    blocked, saved = tmp_path / "pages", tmp_path / "saved.json"

    def sides(*arguments: object) -> object:
        blocked.write_text("")
        return our_sides(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(profile_command, "our_sides", sides)
    status, out, err = run(
        *("profile", speculating, "--limit", 1, "--max-tokens", 4, "--strategy", "plain"),
        *("--html", blocked / "page.html", "--save", saved),
    )
    assert status == 2
    assert "tok/s" in out
    assert read_report(saved).answers == 1
    assert "page.html" in err.splitlines()[-1]


# Saved profiles


def test_a_saved_profile_reads_back_as_it_was_and_fits_its_schema(
    run: Run, speculating: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    run("profile", speculating, "--limit", 2, "--max-tokens", 6, "--save", saved)
    report = read_report(saved)
    assert json.loads(saved.read_text(encoding="utf-8")) == report.as_json()
    required = set(json_schema()["required"])
    assert required <= json.loads(saved.read_text(encoding="utf-8")).keys()


@pytest.mark.parametrize("a", [0.8, 0.5])
def test_a_drafter_made_worse_is_flagged_and_a_repeat_is_not(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a: float
) -> None:
    saved = tmp_path / "saved.json"
    command = ("profile", tiny_pair, "--limit", PROMPTS, "--max-tokens", TOKENS)
    command = (*command, "--strategy", "sequential", "--strategy", "pipelined")
    for quality, more in ((0.8, ("--save", saved)), (a, ("--compare", saved))):
        monkeypatch.setattr(
            profile_command, "open_engine", lambda _, q=quality: open_given(tiny_pair, q)
        )
        status, out, _ = run(*command, *more)
    assert status == (0 if a == 0.8 else 1)
    assert ("FELL" in out) == ("distil it again" in out) == (a == 0.5)
    assert "no change beyond noise" in out or a == 0.5
    assert "the same prompts" in out


# Several sessions


@pytest.mark.parametrize("text", ["", "0", "33", "1,,2", "a"])
def test_numbers_of_sessions_are_checked(text: str) -> None:
    with pytest.raises(BadRequest, match="--concurrency"):
        read_sessions(text)
    assert read_sessions("1,4,2,4") == (1, 4, 2)


def test_several_sessions_are_measured_and_told(run: Run, speculating: Path) -> None:
    status, out, _ = run(
        *("profile", speculating, "--limit", 1, "--max-tokens", 8, "--strategy", "sequential"),
        *("--strategy", "auto", "--concurrency", "1,3", "--json"),
    )
    assert status == 0
    loads = json.loads(out)["loads"]
    assert [(load["sessions"], load["strategy"]) for load in loads] == [
        (count, strategy) for count in (1, 3) for strategy in ("plain", "sequential", "auto")
    ]
    assert all(load["tok_s"]["median"] > 0 for load in loads)
    assert loads[0]["ratio"]["median"] == 1
    assert loads[1]["speculating"] > 0


def a_load(sessions: int, strategy: str, ratio: float, speculating: float) -> LoadFigures:
    spread = Spread(ratio, ratio, ratio)
    return LoadFigures(sessions, strategy, 1, spread, spread, speculating, [])


def test_the_load_at_which_speculation_stops_paying_is_named() -> None:
    loads = [
        *(a_load(n, "plain", 1.0, 0.0) for n in (1, 2, 4)),
        *(a_load(n, "pipelined", r, 1.0) for n, r in ((1, 1.8), (2, 1.2), (4, 0.8))),
        *(a_load(n, "sequential", 1.1, 1.0) for n in (1, 2, 4)),
        *(a_load(n, "lookup", 0.9, 1.0) for n in (1, 2, 4)),
        *(a_load(n, "auto", 1.0, s) for n, s in ((1, 1.0), (2, 0.5), (4, 0.0))),
    ]
    assert verdicts(loads) == [
        "pipelined stopped paying at 4 sessions",
        "sequential paid at every load up to 4 sessions",
        "lookup paid at no load",
        "auto speculated in 100% at 1, 50% at 2, 0% at 4 sessions",
    ]
