"""The figures of a profile: exact on a run in virtual time, and consistent with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from profiling import ONE, answered

from ondevice.apps.figures import EVERY, UNNAMED, DepthCount, Drafts, Figures, profile_figures
from ondevice.apps.questions import Question
from ondevice.apps.race import Measured, Spread, Task
from ondevice.apps.sides import Run
from ondevice.costs import table_from
from ondevice.modelled import BetaText
from ondevice.records import DraftRecord, StepRecord
from ondevice.schedule import Schedule, Sizes
from ondevice.spans import Busy, common, gaps, length_ns, merged

MS = 1_000_000


def by_name(measured: Sequence[Measured], domain: str = EVERY) -> dict[str, Figures]:
    return {each.strategy: each for each in profile_figures(measured) if each.domain == domain}


# Exact figures


def test_a_run_in_virtual_time_gives_known_figures() -> None:
    """Drafting 4 levels (16 ms), then verifying (20 ms); every fourth token is not the drafter's.

    Plain: a token in 20 ms. In turn: 10 rounds of 4 tokens, three of them drafted, the fourth the
    verifier's; 36 ms each but the last one, whose fourth level could not be used: 32 ms. What comes
    before the first forward is not decoding.
    """
    chain = Schedule("sequential", children=1, sizes=Sizes(verify_rows=5, depth=4))
    figures = by_name([answered("plain", Schedule("plain")), answered("sequential", chain)])
    plain, ours = figures["plain"], figures["sequential"]
    assert plain.decode_tok_s == Spread(50.0, 50.0, 50.0)
    assert plain.speed_up == Spread(1.0, 1.0, 1.0)
    assert (plain.rounds, plain.tokens, plain.num_draft_tokens) == (40, 40, 0)
    assert plain.acceptance_rate is None
    assert plain.tokens_per_verify == 1
    assert ours.committed == ours.tokens == 40
    assert ours.rounds == 10
    assert ours.tokens_per_verify == 4
    assert ours.num_draft_tokens == 39
    assert ours.decode_tok_s == Spread(112.5, 112.5, 112.5)  # 36 tokens in 8 x 36 + 32 ms
    assert ours.speed_up == Spread(2.25, 2.25, 2.25)
    assert ours.by_depth == (
        *(DepthCount(depth, 10, 10, 10) for depth in (1, 2, 3)),
        DepthCount(4, 9, 9, 0),
    )
    assert ours.acceptance_rate == 30 / 39
    assert ours.busy == Busy(
        wall_ms=340, verifier_ms=200, drafter_ms=140, both_ms=0, idle_ms=0, waited_ms=140
    )
    assert ours.ttft_ms == Spread(36.0, 36.0, 36.0)
    assert ours.prefill_ms == Spread(16.0, 16.0, 16.0)
    assert ours.by_proposer["modelled"].accepted == 30
    assert ours.rerooting_hits == 0  # the verifier's own token is never the drafter's
    assert ours.memory["verifier"].scratch_bytes == 30
    assert ours.energy_mj_per_token is None


def test_known_texts_give_known_first_choices() -> None:
    chain = Schedule("sequential", children=1, sizes=Sizes(verify_rows=5, depth=4))
    (ours,) = by_name([answered("sequential", chain)]).values()
    assert ours.drafts == Drafts(drafted=39, accepted=30, known=39, right=30)


# Consistency


@pytest.mark.parametrize("strategy", ["plain", "sequential", "pipelined", "auto"])
def test_sums_of_records_are_the_answers_own_statistics(strategy: str) -> None:
    schedule = Schedule(strategy)  # type: ignore[arg-type]
    measured = answered(strategy, schedule, 120, text=BetaText(0.7))
    assert measured.run.answer is not None
    stats = measured.run.answer.stats
    (figures,) = by_name([measured]).values()
    assert figures.tokens == figures.committed == stats.completion_tokens
    assert figures.num_spec_steps == stats.num_spec_steps
    assert figures.num_draft_tokens == stats.num_draft_tokens
    assert figures.num_accepted_draft_tokens == stats.num_accepted_draft_tokens
    assert figures.acceptance_rate == stats.draft_acceptance_rate
    assert figures.decode_tok_s is not None
    assert figures.decode_tok_s.median == pytest.approx(stats.decode_tok_s)
    assert figures.busy.share(figures.busy.verifier_ms) == pytest.approx(stats.verifier_busy)
    assert figures.busy.share(figures.busy.drafter_ms) == pytest.approx(stats.drafter_busy)
    by_name_of_stats = {
        name: {"offered": c.offered, "verified": c.verified, "accepted": c.accepted}
        for name, c in figures.by_proposer.items()
    }
    assert by_name_of_stats == stats.proposers


@pytest.mark.parametrize("strategy", ["plain", "sequential", "pipelined", "auto"])
def test_busy_and_idle_time_are_the_wall_time(strategy: str) -> None:
    table = table_from([20.0 + rows for rows in range(16)], [(8, 4.0)], verifier_slowdown=1.3)
    measured = answered(
        strategy,
        Schedule(strategy),  # type: ignore[arg-type]
        200,
        table=table,
        text=BetaText(0.7),
    )
    busy = Busy.of(measured.run.records)
    assert busy.verifier_ms + busy.drafter_ms - busy.both_ms + busy.idle_ms == pytest.approx(
        busy.wall_ms
    )
    # What the coordinator saw the verifier wait is what its spans leave free.
    assert busy.verifier_ms + busy.waited_ms == pytest.approx(busy.wall_ms, rel=0.01)
    if strategy == "pipelined":
        assert busy.both_ms > 0


def test_every_draft_token_has_a_level_and_a_proposer() -> None:
    measured = answered("pipelined", Schedule("pipelined"), 200, text=BetaText(0.7))
    for record in measured.run.records:
        assert len(record.drafted_at) == len(record.drafted_by) == record.drafted
        assert record.accepted == len(record.accepted_by) <= max(record.drafted_at, default=0)
    (figures,) = by_name([measured]).values()
    assert sum(each.rows for each in figures.by_depth) == figures.num_draft_tokens
    assert sum(each.accepted for each in figures.by_depth) == figures.num_accepted_draft_tokens
    assert all(each.accepted <= each.rounds <= each.rows for each in figures.by_depth)


# Groups


def test_domains_are_apart_and_all_of_them_together() -> None:
    questions = [Question(str(n), domain, "x") for n, domain in enumerate(["code", "chat", "code"])]
    measured = [
        answered(name, Schedule(name), 12 + 4 * n, question)  # type: ignore[arg-type]
        for n, question in enumerate(questions)
        for name in ("plain", "pipelined")
    ]
    found = profile_figures(measured)
    assert [(each.strategy, each.domain, each.answers) for each in found] == [
        *(("plain", EVERY, 3), ("plain", "code", 2), ("plain", "chat", 1)),
        *(("pipelined", EVERY, 3), ("pipelined", "code", 2), ("pipelined", "chat", 1)),
    ]
    whole, code, chat = found[3:]
    assert whole.tokens == code.tokens + chat.tokens
    assert whole.busy.wall_ms == pytest.approx(code.busy.wall_ms + chat.busy.wall_ms)
    assert whole.compared == whole.same_text == 3
    unnamed = answered("plain", Schedule("plain"), 4, Question("1", "", "x"))
    assert [each.domain for each in profile_figures([unnamed])] == [EVERY]
    assert UNNAMED not in by_name([unnamed])


def test_speed_ups_are_paired_and_an_interrupted_turn_has_none() -> None:
    one, two = ONE, Question("2", "code", "x")
    measured = [
        answered("plain", Schedule("plain"), 40, one),
        answered("sequential", Schedule("sequential"), 40, one),
        answered("sequential", Schedule("sequential"), 40, two),
    ]
    ours = by_name(measured)["sequential"]
    alone = by_name(measured[:2])["sequential"]
    assert ours.speed_up == alone.speed_up
    assert (ours.answers, ours.compared, ours.same_text) == (2, 1, 1)


def test_energy_is_a_token_s_and_a_dead_rail_is_left_out() -> None:
    measured = answered("plain", Schedule("plain"), 40)
    answer = measured.run.answer
    assert answer is not None
    stats = replace(answer.stats, energy_mj={"gpu": 80.0, "ane": None}, energy_reason="ane: dead")
    run = replace(measured.run, answer=replace(answer, stats=stats))
    (figures,) = by_name([replace(measured, run=run)]).values()
    assert figures.energy_mj_per_token == {"gpu": 2.0}
    assert figures.energy_reason == "ane: dead"


def test_what_was_not_measured_is_none() -> None:
    run = Run((), 0, ())
    (figures,) = by_name([Measured(Task(Question("1", "", "x"), (1,)), 0, "plain", run)]).values()
    assert (figures.decode_tok_s, figures.ttft_ms, figures.prefill_ms) == (None, None, None)
    assert (figures.acceptance_rate, figures.tokens_per_verify) == (None, None)
    assert figures.busy == Busy()
    assert figures.drafts == Drafts()


# Spans


def test_spans_are_merged_intersected_and_completed() -> None:
    assert merged([(5, 9), (0, 3), (2, 4), (4, 4)]) == [(0, 4), (5, 9)]
    assert common([(0, 10), (20, 30)], [(5, 22), (25, 40)]) == [(5, 10), (20, 22), (25, 30)]
    assert gaps([(2, 3), (5, 20)], (0, 10)) == [(0, 2), (3, 5)]
    assert gaps([], (0, 10)) == [(0, 10)]
    assert length_ns([(0, 4), (2, 6)]) == 6


def test_a_drafter_step_counts_only_while_text_is_decoded() -> None:
    drafts = (DraftRecord(8, 8, 3, -5 * MS, 4 * MS, 0), DraftRecord(8, 8, 3, 6 * MS, 12 * MS, 0))
    record = StepRecord("pipelined", 5, 8, 7, 0, 1, 0, 10 * MS, 0, False, drafts=drafts)
    busy = Busy.of([record])
    assert (busy.wall_ms, busy.drafter_ms, busy.both_ms, busy.idle_ms) == (10, 8, 8, 0)
