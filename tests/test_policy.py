"""Decisions of the policy, and what `rejection` must not let tokens decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.coordinator import Coordinator
from ondevice.costs import CostModel, CostPoint, CostTable, table_from
from ondevice.modelled import NO_CHILD, BetaText
from ondevice.planning import MOST_ROWS
from ondevice.policy import Experience, Policy, policy_for
from ondevice.records import (
    AnswerLimits,
    DraftResult,
    Outcome,
    Proposal,
    StartDraft,
    StepRecord,
    VerifyRow,
)
from ondevice.sampling import Law, SamplingParams, noise, walk_rejection
from ondevice.schedule import Schedule, Sizes, Strategy
from ondevice.simulate import simulate
from ondevice.tree import SpeculationTree
from ondevice.view import View

DRAFTER_ALONE = Schedule("pipelined", weightless=False)


def chain(*chances: float) -> SpeculationTree:
    tree = SpeculationTree()
    node = tree.root
    for token, chance in enumerate(chances):
        node = tree.add(Proposal(node, token, -1.0, 0, 1.0, "test"), chance)
    return tree


def policy(strategy: Strategy = "pipelined", sizes: Sizes | None = None, **table: Any) -> Policy:
    """On a machine of 20 ms a forward, 3 % a row, and 4 ms a drafter step."""
    costs = table_from([20 * (1 + 0.03 * n) for n in range(32)], [(8, 4.0)], **table)
    schedule = Schedule(strategy, sizes=sizes)
    return policy_for(schedule, Experience(CostModel(costs)), "greedy", 0)


def view(tree: SpeculationTree, **fields: Any) -> View:
    return View(**{"tree": tree, "context": 9, "levels": 9, "verifying": False, **fields})


def test_a_row_that_costs_more_than_it_brings_is_not_taken():
    tree = chain(0.9, 0.9, 0.02, 0.9)
    assert len(policy().to_verify(view(tree)).nodes) == 2


def test_rows_that_cost_nothing_are_filled():
    costs = CostModel(
        CostTable(
            (CostPoint(1, 0, 20, 20), CostPoint(3, 0, 27, 27), CostPoint(4, 0, 20, 20)),
            (CostPoint(1, 0, 20, 20),),
        )
    )
    made = policy_for(DRAFTER_ALONE, Experience(costs), "greedy", 0)
    few = made.to_verify(view(chain(0.9)))
    assert (len(few.nodes), few.rows) == (1, 4)
    many = made.to_verify(view(chain(0.9, 0.01, 0.9, 0.9)))
    assert (len(many.nodes), many.rows) == (3, 4)


def test_no_row_lies_deeper_than_the_answer_can_use():
    tree = chain(*[1.0] * 9)
    assert len(policy().to_verify(view(tree, levels=2)).nodes) == 2
    assert len(policy().to_expand(view(tree, levels=3))) == 3


def test_fixed_sizes_bound_rows_and_depth():
    tree = chain(*[1.0] * 9)
    made = policy(sizes=Sizes(verify_rows=4, depth=3))
    assert len(made.to_verify(view(tree)).nodes) == 3
    assert len(made.to_expand(view(tree))) == 3


def test_a_bare_root_is_worth_waiting_for_and_a_good_tree_is_not():
    bare, rich = chain(), chain(*[0.8] * 8)
    assert policy().shall_wait(view(bare, expanding=[bare.root], remaining_ms=1.0))
    for node in rich.likeliest():
        node.expansion = "done"
    assert not policy().shall_wait(view(rich, expanding=[max(rich.ids())], remaining_ms=4.0))


def test_nothing_is_drafted_beside_a_verifier_that_it_slows_down_more_than_it_helps():
    tree = chain(0.9, 0.001)
    for node in tree.likeliest()[:2]:
        node.expansion = "done"
    busy = view(tree, verifying=True)
    assert policy().to_expand(busy)
    assert not policy(verifier_slowdown=1.5).to_expand(busy)
    assert policy(verifier_slowdown=1.5).to_expand(view(tree))


def test_under_rejection_a_node_has_one_child_for_good():
    """A second sample for the same place would let the drafter choose between two."""
    coordinator = Coordinator(drafter=True)
    schedule = Schedule(children=1, rule="rejection")
    limits = AnswerLimits(9, lambda _: False)
    commands = coordinator.on_prompt(0, [1], limits, schedule, greedy=False)
    (draft,) = [command for command in commands if isinstance(command, StartDraft)]
    root = coordinator.tree.root
    coordinator.tree.add(Proposal(root, 3, -1.0, 0, 1.0, "test"), 0.5)
    q = np.full(8, 1 / 8, np.float32)
    late = Proposal(root, 5, -1.0, 0, 1.0, "test", q)
    coordinator.on_draft(1, DraftResult(draft.step, (late,), 0, 1))
    assert list(coordinator.tree[root].children) == [3]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_token_after_an_accepted_chain_takes_the_noise_of_its_own_position(length):
    law = Law(SamplingParams(temperature=1.0, seed=11), 8)
    sure = np.zeros(8, np.float32)
    sure[2] = 1
    rows = [VerifyRow(0, 1, -1), *(VerifyRow(i + 1, 2, i, sure) for i in range(length))]
    flat = np.full(8, np.log(1 / 8), np.float32)
    certain = np.log(np.maximum(sure, 1e-30))

    def log_p(row: int):
        return flat if row == length else certain

    accepted, tokens = walk_rejection(rows, log_p, law, position=40)
    assert accepted == list(range(1, length + 1))
    assert tokens == [2] * length + [int(np.argmax(noise(11, 40 + length, 8)))]


TABLE = table_from([20 * (1 + 0.03 * n) for n in range(32)], [(8, 4.0)])


def a_record(strategy: str, committed: int, **fields: Any) -> StepRecord:
    rest = {"context": 9, "rows": 5, "drafted": 4, "accepted": committed - 1}
    times = {"start_ns": 0, "end_ns": 1, "waited_ns": 0, "root_was_known": False}
    return StepRecord(strategy, **{**rest, **times, "committed": committed, **fields})


@pytest.mark.parametrize("strategy", ["sequential", "pipelined"])
def test_a_drafter_that_was_useless_is_heard_again_when_it_is_not(strategy):
    """Its worth is known from its answers alone: without any it would be useless for ever."""
    text = BetaText(0.9, seed=2)

    class Late(BetaText):
        def token(self, position: int) -> int:
            return NO_CHILD if position < 800 else text.token(position)

    ends_ms: list[float] = []

    def note(record: StepRecord) -> None:
        ends_ms.extend([record.end_ns / 1e6] * record.committed)

    simulate(TABLE, Late(0.9, seed=2), Schedule(strategy), 2800, on_record=note)
    assert 200 * 20 / (ends_ms[799] - ends_ms[599]) > 0.95
    assert 800 * 20 / (ends_ms[2799] - ends_ms[1999]) > 1.8


def test_the_less_a_round_is_worth_the_fewer_rows_it_gets():
    """At a higher pace the time of a row is worth more tokens."""
    tree = chain(*[0.75] * 12)
    slow, fast = policy(), policy()
    for _ in range(40):
        slow.learn(a_record("pipelined", 1), 25.0)
        fast.learn(a_record("pipelined", 5), 25.0)
    assert len(fast.to_verify(view(tree)).nodes) < len(slow.to_verify(view(tree)).nodes)


def test_no_forward_has_more_rows_than_it_may():
    free = table_from([20.0] * 64, [(8, 4.0)])
    made = policy_for(DRAFTER_ALONE, Experience(CostModel(free)), "greedy", 0)
    selection = made.to_verify(view(chain(*[1.0] * 60), levels=100))
    assert (len(selection.nodes), selection.rows) == (MOST_ROWS - 1, MOST_ROWS)


@pytest.mark.parametrize("reach", [1.0, 0.6, 0.2])
def test_nodes_put_up_are_a_subtree_parents_first(reach):
    tree = SpeculationTree()
    for rank in range(4):
        child = tree.add(Proposal(tree.root, rank, -1.0, rank, 1.0, "test"), reach / (rank + 1))
        for below in range(3):
            tree.add(Proposal(child, 10 + below, -1.0, below, 1.0, "test"), reach / (below + 2))
    seen = {tree.root}
    for node in policy().to_verify(view(tree)).nodes:
        assert node.parent in seen
        seen.add(node.id)


def test_plain_runs_to_the_end_and_auto_to_the_next_probe():
    assert policy("plain").run_tokens(500) == 500
    experience = Experience(CostModel(TABLE))
    auto = policy_for(Schedule("auto"), experience, "greedy", 0)
    while auto.strategy != "plain":
        auto.learn(a_record(auto.strategy, 1), 60.0)
    assert auto.run_tokens(5000) == experience.arbiter.run_tokens < 200
    assert auto.run_tokens(3) == 3
    assert auto.reason.startswith("parked: ")
    assert "rows cost" in auto.reason


def test_a_run_in_place_of_a_lost_drafter_says_nothing_of_speculation():
    experience = Experience(CostModel(TABLE))
    auto = policy_for(Schedule("auto"), experience, "greedy", 0)
    for _ in range(100):
        auto.learn(a_record("plain", 1, rows=1, drafted=0), 60.0)
        assert auto.strategy == "pipelined"


def test_fixed_sizes_need_a_strategy():
    with pytest.raises(ValueError, match="auto"):
        policy_for(Schedule(sizes=Sizes(4, 3)), Experience(), "greedy", 0)


def test_what_was_learned_is_copied_and_then_learned_apart():
    one = Experience(CostModel(TABLE))
    other = one.copy()
    for _ in range(50):
        other.costs.verifier.observe(1, 0, 0.0, 90.0)
        other.acceptances["greedy"].learn(Outcome((0.9,), -1))
    assert one.costs.verifier.ms(1) == 20
    assert one.acceptances["greedy"].first_choice > 0.5
