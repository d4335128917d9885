"""Statistics of hand-made rounds, and the names that others rely on."""

from __future__ import annotations

import pytest

import ondevice
from ondevice.records import DraftRecord, Emit, EmittedToken, StepRecord, Stop
from ondevice.statistics import Tally

MS = 1_000_000


def a_round(
    start_ms: int, drafted: int, accepted: int, committed: int, *drafts: DraftRecord
) -> Emit:
    by = ("drafter",) * accepted
    record = StepRecord(
        strategy="pipelined",
        context=5,
        rows=drafted + 1,
        drafted=drafted,
        accepted=accepted,
        committed=committed,
        start_ns=start_ms * MS,
        end_ns=(start_ms + 10) * MS,
        waited_ns=0,
        root_was_known=False,
        accepted_by=by,
        drafts=drafts,
    )
    return Emit((EmittedToken(1, 0.0, (), None),) * committed, record)


def a_draft(start_ms: int, end_ms: int, window: int = 0) -> DraftRecord:
    return DraftRecord(8, 8, 3, start_ms * MS, end_ms * MS, window)


def tally(*events: Emit | Stop) -> Tally:
    made = Tally("pipelined", prompt_tokens=5, asked_ns=0)
    for event in events:
        made.take(event, 20 * MS)
    return made


def test_figures_follow_from_the_records():
    stats = tally(
        a_round(10, 7, 2, 3),
        a_round(30, 7, 0, 1, a_draft(0, 25)),
        a_round(60, 0, 0, 1),
        Stop("length", drafts=(a_draft(30, 55, window=12), a_draft(65, 99))),
    ).summary("because", seed=9)
    assert stats.completion_tokens == 5
    assert stats.num_spec_steps == 2
    assert stats.num_draft_tokens == 14
    assert stats.num_accepted_draft_tokens == 2
    assert stats.mean_acceptance_length == pytest.approx(2.0)
    assert stats.draft_acceptance_rate == pytest.approx(2 / 14)
    assert stats.ttft_ms == pytest.approx(20)
    assert stats.decode_tok_s == pytest.approx(2 / 0.050)
    assert stats.verifier_busy == pytest.approx(30 / 60)
    assert stats.drafter_busy == pytest.approx((15 + 25 + 5) / 60)
    assert stats.drafter_window == 12
    assert stats.energy_mj is None


def test_what_was_not_measured_is_none():
    stats = tally(a_round(10, 0, 0, 1)).summary("because", seed=0)
    assert stats.mean_acceptance_length is None
    assert stats.draft_acceptance_rate is None
    assert stats.decode_tok_s is None


def test_the_contracts_names_are_all_there():
    names = set(tally().summary("because", seed=0).as_json())
    assert names >= {
        "strategy", "reason", "prompt_tokens", "completion_tokens", "ttft_ms", "decode_tok_s",
        "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
        "mean_acceptance_length", "draft_acceptance_rate", "drafter_busy", "verifier_busy",
        "energy_mj", "energy_reason", "energy_idle_mw", "energy_per_token_mj",
        "energy_rejected_drafts_mj", "thermal_state", "low_power_mode",
    }  # fmt: skip


def test_every_public_name_can_be_imported():
    assert sorted(ondevice.__all__) == ondevice.__all__
    for name in ondevice.__all__:
        assert getattr(ondevice, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        ondevice.no_such_name  # noqa: B018
