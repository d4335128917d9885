"""Decisions of the policy, and what `rejection` must not let tokens decide."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.coordinator import Coordinator
from ondevice.policy import Policy, Schedule
from ondevice.records import AnswerLimits, DraftResult, Proposal, StartDraft, VerifyRow
from ondevice.sampling import Law, SamplingParams, noise, walk_rejection
from ondevice.tree import SpeculationTree


def chain(*chances: float) -> SpeculationTree:
    tree = SpeculationTree()
    node = tree.root
    for token, chance in enumerate(chances):
        node = tree.add(Proposal(node, token, -1.0, 0, 1.0, "test"), chance)
    return tree


def test_unlikely_nodes_get_no_row_when_coupled():
    tree = chain(0.9, 0.9, 0.001, 0.9)
    assert len(Policy(Schedule()).nodes_to_verify(tree, depth=9)) == 2


def test_under_rejection_no_token_decides_whether_it_is_tested():
    tree = chain(0.9, 0.9, 0.001, 0.9)
    policy = Policy(Schedule(children=1, rule="rejection"))
    assert len(policy.nodes_to_verify(tree, depth=9)) == 4
    tree[tree.root].expansion = "done"
    assert len(policy.nodes_to_expand(tree)) == 4


def test_rows_and_depth_are_bounded():
    tree = chain(*[1.0] * 9)
    assert len(Policy(Schedule(verify_rows=4)).nodes_to_verify(tree, depth=9)) == 3
    assert len(Policy(Schedule(verify_rows=9)).nodes_to_verify(tree, depth=2)) == 2
    assert len(Policy(Schedule(depth=3, draft_rows=8)).nodes_to_expand(tree)) == 3
    assert Policy(Schedule(tree_nodes=9)).nodes_to_expand(tree) == []


def test_sequential_waits_for_every_step_and_pipelined_for_the_first():
    with_child, bare = chain(0.5), chain()
    assert Policy(Schedule("sequential")).shall_wait(with_child)
    assert not Policy(Schedule("pipelined")).shall_wait(with_child)
    assert Policy(Schedule("pipelined")).shall_wait(bare)


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
