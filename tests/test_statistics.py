"""Statistics of hand-made turns, and the names that others rely on."""

from __future__ import annotations

import pytest

import ondevice
from ondevice.coordinator import Turn
from ondevice.policy import Schedule, acceptances
from ondevice.records import AnswerLimits, DraftRecord, Proposal, RoundRecord
from ondevice.statistics import summarise

MS = 1_000_000


def round_record(start_ms: int, drafted: int, accepted: int, committed: int) -> RoundRecord:
    by = ("drafter",) * accepted
    return RoundRecord(
        drafted, accepted, committed, start_ms * MS, (start_ms + 10) * MS, 0, False, by
    )


def turn(*rounds: RoundRecord, drafts: tuple[DraftRecord, ...] = ()) -> Turn:
    limits = AnswerLimits(100, lambda _: False)
    made = Turn(Schedule(), True, limits, prompt_tokens=5, started_ns=0, first_token_ns=20 * MS)
    made.rounds.extend(rounds)
    made.drafts.extend(drafts)
    made.count = sum(r.committed for r in rounds)
    made.ended_ns = 100 * MS
    return made


def test_figures_follow_from_the_records():
    stats = summarise(
        turn(
            round_record(10, 7, 2, 3),
            round_record(30, 7, 0, 1),
            round_record(60, 0, 0, 1),
            drafts=(DraftRecord(8, 3, 0, 25 * MS, 0), DraftRecord(8, 3, 30 * MS, 55 * MS, 12)),
        ),
        "because",
        seed=9,
    )
    assert stats.completion_tokens == 5
    assert stats.num_spec_steps == 2
    assert stats.num_draft_tokens == 14
    assert stats.num_accepted_draft_tokens == 2
    assert stats.mean_acceptance_length == pytest.approx(2.0)
    assert stats.draft_acceptance_rate == pytest.approx(2 / 14)
    assert stats.ttft_ms == pytest.approx(20)
    assert stats.decode_tok_s == pytest.approx(2 / 0.050)
    assert stats.verifier_busy == pytest.approx(30 / 90)
    assert stats.drafter_busy == pytest.approx((15 + 25) / 90)
    assert stats.drafter_window == 12
    assert stats.energy_mj is None
    assert stats.energy_reason


def test_what_was_not_measured_is_none():
    stats = summarise(turn(round_record(10, 0, 0, 1)), "because", seed=0)
    assert stats.mean_acceptance_length is None
    assert stats.draft_acceptance_rate is None
    assert stats.decode_tok_s is None


def test_the_contracts_names_are_all_there():
    names = set(summarise(turn(), "because", seed=0).as_json())
    assert names >= {
        "strategy", "reason", "prompt_tokens", "completion_tokens", "ttft_ms", "decode_tok_s",
        "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
        "mean_acceptance_length", "draft_acceptance_rate", "drafter_busy", "verifier_busy",
        "energy_mj", "energy_reason",
    }  # fmt: skip


def test_every_public_name_can_be_imported():
    assert sorted(ondevice.__all__) == ondevice.__all__
    for name in ondevice.__all__:
        assert getattr(ondevice, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        ondevice.no_such_name  # noqa: B018


def children(*gaps: float) -> list[Proposal]:
    return [Proposal(0, token, -0.5 - token, token, gap, "test") for token, gap in enumerate(gaps)]


def test_chances_of_siblings_never_exceed_one_and_fall_with_rank():
    for greedy in (True, False):
        chances = acceptances(children(1.5, 0.3, 2.0, float("inf")), greedy)
        assert sum(chances) <= 1
        assert chances == sorted(chances, reverse=True)


def test_a_clear_lead_is_a_high_chance():
    assert acceptances(children(6.0), greedy=False)[0] > 0.99
    assert acceptances(children(0.0), greedy=False)[0] == pytest.approx(0.5)
