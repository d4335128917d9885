"""`profile`: what it measures, prints, writes and refuses; what is finished is never lost."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from commandline import Run, assert_one_line
from profiling import PROMPTS, TOKENS, open_given
from rich.console import Console

from ondevice.apps import profile as profile_command
from ondevice.apps.figures import EVERY
from ondevice.apps.profiletable import print_report
from ondevice.apps.published import published_questions
from ondevice.apps.report import Report, json_schema, read_report

DOMAINS = ["code", "summary", "chat", "translation", "maths", "extraction"]


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


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_word_or_figure_is_broken_on_a_terminal(run: Run, speculating: Path, width: int) -> None:
    _, out, _ = run("profile", speculating, "--limit", 2, "--max-tokens", 8, "--json")
    report = Report.model_validate_json(out)
    wide, narrow = (Console(width=columns, file=io.StringIO()) for columns in (400, width))
    for console in (wide, narrow):
        print_report(report, console)
    whole, folded = (set(console.file.getvalue().split()) for console in (wide, narrow))
    assert folded - whole == set()


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
