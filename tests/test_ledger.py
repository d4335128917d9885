"""The books: what a round's record says, and what the costs learn from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ondevice.costs import CostModel, table_from
from ondevice.ledger import Ledger, emitted_tokens
from ondevice.records import (
    DraftRecord,
    DraftResult,
    Outcome,
    StartVerify,
    StepRecord,
    Verdict,
    VerifyRow,
)
from ondevice.tree import NOWHERE, SpeculationTree

MS = 1_000_000


def model() -> CostModel:
    """10 ms a forward of any width, twice that beside the drafter; 4 ms a step of 8 rows."""
    forwards = [10.0] * 8
    return CostModel(
        table_from(forwards, [(8, 4.0), (64, 20.0)], verifier_slowdown=2.0, drafter_slowdown=1.5)
    )


def result(start_ms: float, end_ms: float, function_rows: int = 8, window: int = 0) -> DraftResult:
    times = round(start_ms * MS), round(end_ms * MS)
    return DraftResult(7, (), *times, function_rows=function_rows, window=window)


def a_round(start_ms: float, end_ms: float, *drafts: DraftResult, strategy: str = "pipelined"):
    """A record of a forward of 4 rows at context 100."""
    return StepRecord(
        strategy=strategy,
        context=100,
        rows=1 if strategy == "plain" else 4,
        drafted=0,
        accepted=0,
        committed=1,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
        waited_ns=0,
        root_was_known=False,
        drafts=tuple(
            DraftRecord(3, each.function_rows, 2, each.start_ns, each.end_ns, each.window)
            for each in drafts
        ),
    )


def taught(record: StepRecord, running_since_ms: float | None = None) -> CostModel:
    """A model after many rounds alike."""
    costs = model()
    ledger = Ledger(costs)
    since_ns = None if running_since_ms is None else round(running_since_ms * MS)
    for _ in range(300):
        ledger.learn(record, since_ns, record.end_ns)
    return costs


# Records


def test_a_record_says_what_was_put_up_taken_and_thrown_away():
    rows = (
        VerifyRow(0, 1, -1),
        VerifyRow(1, 5, 0),
        VerifyRow(2, 6, 0),
        VerifyRow(3, 7, 1),
        VerifyRow(4, 8, 3),
    )
    fill = (VerifyRow(NOWHERE, 8, 4),)
    tree = SpeculationTree()
    tree.reset(1)
    rerooted = replace(
        tree.commit([5, 7]),
        outcomes=(Outcome((0.5,), 0), Outcome((), -1)),
        known=1,
        offered=(("drafter", 4), ("lookup", 9)),
        lived_on=6,
        dropped=(2, 4),
    )
    ledger = Ledger(model())
    ledger.drafted(result(1, 5, window=12), rows=3, kept=2)
    verdict = Verdict(9, (1,), (5, 7), (0.0, 0.0), 2 * MS, 12 * MS)
    command = StartVerify(9, rows, "coupled", fill)
    record = ledger.close_round(
        "sequential",
        verdict,
        command,
        rerooted,
        40,
        3 * MS,
        ["drafter"],
        ["", "drafter", "lookup", "drafter", "lookup"],
    )
    assert record == StepRecord(
        strategy="sequential",
        context=40,
        rows=6,
        drafted=4,
        accepted=1,
        committed=2,
        start_ns=2 * MS,
        end_ns=12 * MS,
        waited_ns=3 * MS,
        root_was_known=False,
        accepted_by=("drafter",),
        drafted_by=("drafter", "lookup", "drafter", "lookup"),
        drafted_at=(1, 1, 2, 3),
        refused=(7, 8),
        lived_on=6,
        dropped=2,
        offered_by=(("drafter", 4), ("lookup", 9)),
        outcomes=rerooted.outcomes,
        drafts=(DraftRecord(3, 8, 2, 1 * MS, 5 * MS, 12),),
    )
    assert ledger.left_over() == ()


def test_rows_below_the_answers_end_count_nowhere():
    rows = tuple(VerifyRow(node, 5 + node, node - 1) for node in range(5))
    tree = SpeculationTree()
    tree.reset(5)
    verdict = Verdict(9, (1, 2, 3), (6, 7, 8, 9), (0.0,) * 4, 0, MS)
    record = Ledger(model()).close_round(
        "sequential",
        verdict,
        StartVerify(9, rows, "coupled"),
        tree.commit([6, 7]),  # the second one ends the answer
        40,
        0,
        ["drafter"] * 2,
        ["", *["drafter"] * 4],
    )
    assert (record.drafted, record.drafted_at, record.refused) == (2, (1, 2), ())


def test_a_token_of_a_run_is_plain_whatever_was_set():
    """As after the loss of the drafter."""
    tree = SpeculationTree()
    verdict = Verdict(3, (), (5,), (0.0,), 0, MS, more=True)
    record = Ledger(model()).close_round(
        "pipelined", verdict, None, tree.commit([5]), 40, 0, [], []
    )
    assert (record.strategy, record.rows, record.drafted, record.committed) == ("plain", 1, 0, 1)


def test_steps_that_ended_after_the_last_round_are_left_over():
    ledger = Ledger(model())
    for start in range(3):
        ledger.drafted(result(start, start + 1), rows=1, kept=1)
    assert [draft.start_ns for draft in ledger.left_over()] == [0, MS, 2 * MS]


def test_emitted_tokens_name_who_proposed_them_and_stop_at_the_cut():
    verdict = Verdict(1, (4, 5), (7, 8, 9), (-1.0, -2.0, -3.0), 0, 1, ((), ((8, -2.0),), ()))
    emitted = emitted_tokens((7, 8), verdict, ("drafter", "lookup"))
    assert [(each.token, each.logprob, each.proposer) for each in emitted] == [
        (7, -1.0, "drafter"),
        (8, -2.0, "lookup"),
    ]
    assert emitted[1].top_logprobs == ((8, -2.0),)
    assert emitted_tokens((7, 8, 9), verdict, ("drafter",))[2].proposer is None


# What costs learn


def test_a_rounds_time_is_that_since_the_last_one():
    ledger = Ledger(model())
    ledger.begin(5 * MS)
    assert ledger.learn(a_round(6, 16), None, 17 * MS) == pytest.approx(12)
    assert ledger.learn(a_round(20, 30), None, 31 * MS) == pytest.approx(14)


def test_a_forward_alone_teaches_its_own_cost():
    costs = taught(a_round(0, 12))
    assert costs.verifier.exactly(4, 100) == pytest.approx(12, rel=0.02)
    assert costs.plain.ms(1) == 10


@pytest.mark.parametrize("drafts", [(result(-5, 25),), (result(0, 10), result(10, 20))])
def test_a_forward_beside_the_drafter_is_compared_with_that(drafts):
    costs = taught(a_round(0, 20, *(replace(each, function_rows=0) for each in drafts)))
    assert costs.verifier.exactly(4, 100) == pytest.approx(10, rel=0.02)


def test_a_drafter_step_still_under_way_counts_as_beside():
    assert taught(a_round(0, 20), running_since_ms=-3).verifier.exactly(4) == pytest.approx(10)
    half = taught(a_round(0, 15), running_since_ms=7.5)
    assert half.verifier.exactly(4) == pytest.approx(10, rel=0.02)


def test_a_run_teaches_the_cost_of_plain_decoding_alone():
    costs = taught(a_round(0, 13, strategy="plain"))
    assert costs.plain.ms(1, 100) == pytest.approx(13, rel=0.02)
    assert costs.verifier.exactly(1) == 10


def test_a_drafter_step_teaches_its_function():
    costs = taught(a_round(100, 110, result(0, 5)))
    assert costs.drafter.exactly(8) == pytest.approx(5, rel=0.02)
    beside = taught(a_round(0, 30, result(10, 16)))
    assert beside.drafter.exactly(8) == pytest.approx(4, rel=0.02)


def test_a_step_of_several_functions_teaches_none():
    costs = taught(a_round(100, 110, result(0, 50, function_rows=0)))
    assert costs.drafter.exactly(8) == 4
    assert costs.drafter.row_counts == [8, 64]


def test_a_clock_that_stood_still_teaches_nothing():
    costs = taught(a_round(5, 5, result(3, 3)))
    assert costs.verifier.exactly(4) == 10
    assert costs.drafter.exactly(8) == 4
