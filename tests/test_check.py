"""`check` passes what is exact, forgives near-ties alone, and names every fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from commandline import Run, assert_one_line, runner
from faulty import open_tiny, other_token, twin_token

from ondevice.apps import check as check_command
from ondevice.apps import comparison
from ondevice.apps.comparison import compare
from ondevice.apps.counting import LINES
from ondevice.apps.margin import NEAR_TIE, Forced, margin
from ondevice.apps.prompts import PROMPTS
from ondevice.arbiter import DRAFTING
from ondevice.drafter import CoreMLDrafter
from ondevice.engine import Engine
from ondevice.records import DraftResult
from ondevice.sampling import SamplingParams, noise
from ondevice.schedule import STRATEGIES
from ondevice.session import Options
from ondevice.units import DrafterUnit, DraftRequest

PAIR_OF_PROMPTS = ("Where is the river?", "Count to ten.")


class GuessingDrafter(CoreMLDrafter):
    """Proposes other tokens than its model's."""

    def draft(self, request: DraftRequest) -> DraftResult:
        result = super().draft(request)
        wrong = tuple(replace(each, token=each.token ^ 1) for each in result.proposals)
        return replace(result, proposals=wrong)


@pytest.fixture(scope="module")
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with open_tiny(tiny_pair) as engine:
        yield engine


# What is exact


def test_a_sound_pair_passes_and_every_strategy_did_speculate(engine: Engine) -> None:
    report = compare(engine, PAIR_OF_PROMPTS, 24)
    assert report.passed
    assert len(report.tallies) == 2 * len(STRATEGIES)
    for tally in report.tallies:
        assert (tally.texts, tally.tokens, tally.faults) == (2, 48, 0)
        assert (tally.drafted > 0) == (tally.strategy != "plain") or tally.strategy == "auto"
        assert not any("failed" in note for note in tally.notes)
    assert 0 <= report.rounding < 1e-3


def test_a_drafter_that_proposes_nonsense_changes_no_text(tiny_pair: Path) -> None:
    def guessing() -> DrafterUnit:
        return GuessingDrafter.open(tiny_pair / "drafter", tiny_pair / "verifier")

    with open_tiny(tiny_pair, drafter=guessing) as engine:
        assert compare(engine, PAIR_OF_PROMPTS, 24).passed


def test_progress_counts_every_answer(engine: Engine) -> None:
    counted: list[None] = []
    compare(engine, PAIR_OF_PROMPTS, 4, lambda: counted.append(None))
    assert len(counted) == comparison.answers_needed(PAIR_OF_PROMPTS)


# Faults


def test_a_planted_fault_is_found_and_named(
    tiny_pair: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = open_tiny(tiny_pair, plant=other_token)
    monkeypatch.setattr(check_command, "open_engine", lambda _: faulty)
    status, out, err = runner(capfd, monkeypatch)("check", tiny_pair, "--quick")
    assert status == 1
    assert len(err.splitlines()) == LINES
    faults = [line for line in out.splitlines() if line.startswith("FAULT: ")]
    assert len(faults) >= 5 * 2 * 2  # prompts, temperatures, set strategies that speculate
    first = next(line for line in faults if "sequential" in line)
    assert first.endswith(f"prompt: {PROMPTS[0]}")
    assert "sequential at temperature 0, token " in first
    assert f"near-ties are under {NEAR_TIE:.0e}" in first
    assert "FAILED" in out.splitlines()[-1]


def test_a_fault_is_reported_where_the_text_first_parts(tiny_pair: Path) -> None:
    with open_tiny(tiny_pair, plant=other_token) as engine:
        report = compare(engine, PAIR_OF_PROMPTS[:1], 24)
        assert not report.passed
        for difference in report.differences:
            law = SamplingParams(difference.temperature, seed=comparison.SEED)
            options = Options(law, 24, strategy="plain")
            plain = engine.generate(PAIR_OF_PROMPTS[0], options).token_ids
            assert plain[difference.position] == difference.plain_token != difference.token
            assert difference.margin is not None
            assert difference.margin > NEAR_TIE


def test_a_text_that_ends_early_is_a_fault(tiny_pair: Path) -> None:
    with open_tiny(tiny_pair, plant=lambda _, v: replace(v, tokens=(*v.tokens[:-1], 0))) as engine:
        report = compare(engine, PAIR_OF_PROMPTS[:1], 24)
    assert report.differences
    assert all(difference.token == 0 for difference in report.differences)
    assert not report.passed


def test_a_dead_drafter_is_no_proof(tiny_pair: Path) -> None:
    def dead() -> DrafterUnit:
        raise RuntimeError("no Neural Engine here")

    with open_tiny(tiny_pair, drafter=dead) as engine:
        report = compare(engine, PAIR_OF_PROMPTS[:1], 8)
    assert report.differences == []
    assert not report.passed
    for tally in report.tallies:
        assert ("no Neural Engine here" in str(tally.notes)) == (tally.strategy in DRAFTING)


# Near-ties


def test_twins_part_at_margin_zero_and_pass_at_temperature_0(
    twin_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "LAWS", (SamplingParams(),))
    with open_tiny(twin_pair, plant=twin_token) as engine:
        report = compare(engine, PAIR_OF_PROMPTS, 16)
    assert report.differences
    assert all(difference.near_tie for difference in report.differences)
    assert all(difference.margin < 1e-4 for difference in report.differences)
    assert report.passed


def test_noise_breaks_the_tie_of_twins(twin_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LAWS", (SamplingParams(temperature=0.8, seed=7),))
    with open_tiny(twin_pair, plant=twin_token) as engine:
        report = compare(engine, PAIR_OF_PROMPTS, 16)
    assert report.differences
    assert not any(difference.near_tie for difference in report.differences)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_margin_is_that_of_the_laws_scores(
    engine: Engine, tiny_model: tiny.TinyModel, temperature: float
) -> None:
    law = SamplingParams(temperature=temperature, seed=7)
    answer = engine.generate("Go on.", Options(law, 6, strategy="plain"))
    tokenizer = engine.model.tokenizer
    prompt = "<|user|>Go on.<|end|><|assistant|>"
    history = tokenizer.encode(prompt, add_special_tokens=False) + list(answer.token_ids[:5])
    scores = tiny.logits_by_hand(tiny_model, history)[-1]
    if temperature:
        scores = scores / temperature + noise(7, len(history), len(scores))
    chosen, rival = answer.token_ids[5], 77
    assert int(np.argmax(scores)) == chosen
    measured = margin(engine, "Go on.", law, answer.token_ids[:5], (chosen, rival))
    assert measured == pytest.approx(scores[chosen] - scores[rival], abs=1e-3)
    assert margin(engine, "Go on.", law, answer.token_ids[:5], (chosen,)) == 0


def test_forced_tokens_come_first_and_then_any() -> None:
    forced = Forced((3, 1), 5)
    state = forced.start()
    allowed = []
    for token in (3, 1, 4):
        allowed.append(np.flatnonzero(forced.allowed(state)).tolist())
        state = forced.advance(state, token)
    assert allowed == [[3], [1], [0, 1, 2, 3, 4]]


# The command


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capfd, monkeypatch)


def test_json_is_one_object(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With fixed costs: measured on a busy machine, a tiny drafter may not be worth its time.
    monkeypatch.setattr(check_command, "open_engine", lambda pair: open_tiny(Path(pair)))
    (tmp_path / "prompts.txt").write_text("One.\n\nTwo.\n", encoding="utf-8")
    status, out, err = run(
        *("check", tiny_pair, "--prompts", tmp_path / "prompts.txt", "--max-tokens", 8, "--json")
    )
    assert status == 0
    assert err.splitlines() == [
        f"check: {done} of 32 answers" for done in (4, 7, 10, 13, 16, 20, 23, 26, 29, 32)
    ]
    found = json.loads(out)
    assert out == json.dumps(found) + "\n"
    assert found["passed"] is True
    assert (found["prompts"], found["max_tokens"]) == (2, 8)
    assert [r["strategy"] for r in found["results"]] == [*STRATEGIES, *STRATEGIES]
    assert [r["tokens"] for r in found["results"]] == [16] * 16


def test_mistakes_are_one_line(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    assert_one_line(run("check", "no-such-pair"), 2, "no-such-pair")
    assert_one_line(run("check", "no-such-pair", "--max-tokens", 0), 2, "max tokens")
    assert_one_line(run("check", tiny_pair, "--prompts", tmp_path / "none"), 2, "none")
    assert_one_line(run("check", tiny_pair, "--prompts", tmp_path / "empty"), 2, "no prompt")


def test_the_built_in_prompts_are_thirty_and_distinct() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 30
