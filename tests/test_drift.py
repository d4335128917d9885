"""Drift: a worse drafter is found, a repeat left alone, another verifier named; no false alarms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ondevice.apps.drift import drift, drift_lines, student
from ondevice.apps.figures import EVERY, Drafts, Figures, profile_figures
from ondevice.apps.report import Identity, Report, now
from ondevice.spans import Busy

IDENTITY = Identity(
    ondevice="0",
    pair="p",
    verifier_sha256="a" * 64,
    drafter_sha256="b" * 64,
    cpu="cpu",
    system="system",
)
Text = Callable[[int], tuple[int, int]]


def figures(domain: str, by_question: dict[str, Drafts]) -> Figures:
    empty = dict.fromkeys(("ttft_ms", "prefill_ms", "decode_tok_s", "speed_up"))
    zeros = dict.fromkeys(
        (
            *("answers", "prompt_tokens", "tokens", "compared", "same_text", "rounds"),
            *("committed",),
            *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
            *("rerooting_rounds", "rerooting_hits"),
        ),
        0,
    )
    return Figures(
        "pipelined", domain, **empty, **zeros, busy=Busy(), by_depth=(), by_proposer={},
        by_question=by_question,
    )  # fmt: skip


def report(domains: dict[str, dict[str, Drafts]], **changes: object) -> Report:
    every = {question: drafts for of_one in domains.values() for question, drafts in of_one.items()}
    made = Report(
        identity=IDENTITY,
        measured_at=now(),
        prompts=len(every),
        max_tokens=64,
        repeats=1,
        planned=0,
        answers=0,
        stopped="",
        placement=[],
        left_out={},
        costs=None,
        figures=[figures(EVERY, every), *(figures(*each) for each in domains.items())],
    )
    return made.model_copy(update=changes)


def drawn(rate: float, seed: int, prompts: int = 10, tokens: int = 64) -> dict[str, Drafts]:
    """Prompts differ: each has a rate of its own around `rate`."""
    rng = np.random.default_rng(seed)
    found = {}
    for prompt in range(prompts):
        own = rng.beta(12 * rate, 12 * (1 - rate))
        right = int(rng.binomial(tokens, own))
        found[str(prompt)] = Drafts(2 * tokens, right, tokens, right)
    return found


def test_a_repeat_is_quiet_and_a_worse_drafter_is_not() -> None:
    good = report({"code": drawn(0.8, 1), "chat": {f"c{k}": v for k, v in drawn(0.6, 2).items()}})
    assert not drift(good, good).fell
    assert all((change.low, change.high) == (0, 0) for change in drift(good, good).changes)
    worse = report({"code": drawn(0.6, 1), "chat": {f"c{k}": v for k, v in drawn(0.6, 2).items()}})
    found = drift(good, worse)
    fallen = [(change.domain, change.what) for change in found.changes if change.fell]
    assert ("code", "first choice right") in fallen
    assert not any(domain == "chat" for domain, _ in fallen)
    assert "distil it again" in drift_lines(found)[-1]
    better = drift(worse, good)
    assert not better.fell
    assert any(change.higher for change in better.changes)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Other prompts of the same kind, 200 times: in 5 % of them at most."""
    alarms = sum(
        drift(report({"x": drawn(0.7, 2 * n)}), report({"x": drawn(0.7, 2 * n + 1)})).fell
        for n in range(200)
    )
    assert alarms <= 20


def test_prompts_are_paired_only_with_themselves() -> None:
    """One prompt is far harder: paired, it hides nothing; with other prompts it does."""
    then = {str(n): Drafts(100, 80, 100, 80) for n in range(6)} | {"6": Drafts(100, 10, 100, 10)}
    now_ = {
        name: replace(d, right=d.right - 4, accepted=d.accepted - 4) for name, d in then.items()
    }
    paired = drift(report({"x": then}), report({"x": now_}))
    others = {f"new{name}": drafts for name, drafts in now_.items()}
    apart = drift(report({"x": then}), report({"x": others}))
    assert all(change.paired for change in paired.changes)
    assert paired.fell
    assert not apart.fell


def test_of_a_profile_that_was_cut_short_the_prompts_that_both_have_are_compared() -> None:
    whole = drawn(0.7, 1)
    part = {name: whole[name] for name in list(whole)[:7]}
    (change, *_) = drift(report({"x": whole}), report({"x": part})).changes
    assert (change.prompts, change.paired) == (7, True)
    assert (change.then, change.low, change.high) == (change.now, 0, 0)


def test_trees_of_other_sizes_are_no_worse_drafter() -> None:
    """Twice the rows for the same accepted tokens, as when the verifier has become cheaper."""
    then = drawn(0.7, 1)
    wider = {name: replace(each, drafted=2 * each.drafted) for name, each in then.items()}
    found = drift(report({"x": then}), report({"x": wider}))
    (right, accepted, *_) = found.changes
    assert (right.lower, accepted.lower) == (False, True)
    assert not found.fell
    assert "lower, as trees of other sizes may be" in "".join(drift_lines(found))


def test_auto_is_not_asked_where_another_strategy_drafts() -> None:
    """It drafts where that pays at the moment, and there the drafter is better."""

    def both(auto: float) -> Report:
        every = replace(figures(EVERY, drawn(auto, 1)), strategy="auto")
        made = report({"x": drawn(0.6, 2)})
        return made.model_copy(update={"figures": [*made.figures, every]})

    assert not drift(both(0.9), both(0.3)).fell
    alone = [
        each.model_copy(update={"figures": [f for f in each.figures if f.strategy == "auto"]})
        for each in (both(0.9), both(0.3))
    ]
    assert drift(*alone).fell


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_few_prompts_tell_nothing_however_long_they_are(prompts: int) -> None:
    then = report({"x": {str(n): Drafts(900, 800, 900, 800) for n in range(prompts)}})
    now_ = report({"x": {str(n): Drafts(900, 300, 900, 300) for n in range(prompts)}})
    found = drift(then, now_)
    assert not found.fell
    assert {change.verdict for change in found.changes} == {"too few prompts to tell"}
    assert drift_lines(found)[-1].startswith("so few prompts cannot tell")


def test_prompts_that_both_have_may_have_no_drafts() -> None:
    then = report({"x": {"a": Drafts(5, 0, 0, 0), "b": Drafts(5, 5, 5, 5)}})
    now_ = report({"x": {"a": Drafts(5, 5, 5, 5), "c": Drafts(5, 5, 5, 5)}})
    assert all(change.what == "draft tokens accepted" for change in drift(then, now_).changes)


def test_another_verifier_is_named_first() -> None:
    other = report(
        {"x": drawn(0.7, 1)}, identity=IDENTITY.model_copy(update={"verifier_sha256": "c" * 64})
    )
    found = drift(report({"x": drawn(0.7, 1)}), other)
    assert found.notes[0].startswith("the verifier is another one: cccccccccccc now")
    assert drift_lines(found)[2] == found.notes[0]


def test_profiles_without_drafts_have_nothing_to_compare() -> None:
    none = report({"x": {}})
    assert drift(none, none).changes == ()
    assert "nothing to compare" in drift_lines(drift(none, none))[-1]
    assert profile_figures([]) == []


def test_no_more_is_promised_than_so_many_prompts_can_tell() -> None:
    many = drift(report({"x": drawn(0.7, 1, 40)}), report({"x": drawn(0.7, 2, 40)}))
    assert re.search(r"no sign that .* less than \d points", drift_lines(many)[-1])
    same = report({"x": drawn(0.7, 1)})
    assert drift_lines(drift(same, same))[-1] == "no sign that the drafter got worse"
    two = report({"x": {"0": Drafts(60, 20, 60, 20), "1": Drafts(60, 30, 60, 30)}})
    now_ = report({"x": {"0": Drafts(60, 16, 60, 16), "1": Drafts(60, 34, 60, 34)}})
    assert drift_lines(drift(two, now_))[-1].startswith("so few prompts cannot tell")


def test_counts_and_not_only_rates_are_told() -> None:
    lines = drift_lines(drift(report({"x": drawn(0.8, 1)}), report({"x": drawn(0.8, 1)})))
    assert any(" of 640 (" in line for line in lines)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 3, 3.182),
        (0.975, 9, 2.262),
        (0.995, 5, 4.032),
        (0.975, 1000, 1.962),
    ],
)
def test_student_s_quantiles_are_those_of_the_tables(
    probability: float, freedom: int, expected: float
) -> None:
    assert student(probability, freedom) == pytest.approx(expected, rel=0.006)
