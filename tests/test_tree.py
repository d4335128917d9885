"""The speculation tree against a plain dictionary of paths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.records import Outcome, Proposal
from ondevice.tree import SpeculationTree


def proposal(parent: int, token: int) -> Proposal:
    return Proposal(parent, token, -1.0, 0, 1.0, "test")


def grown(seed: int, count: int) -> tuple[SpeculationTree, dict[int, float]]:
    """A random tree, and every node's path probability."""
    rng = random.Random(seed)
    tree = SpeculationTree()
    probability = {tree.root: 1.0}
    for _ in range(count):
        parent = rng.choice(list(probability))
        token = rng.randrange(5)
        chance = rng.random()
        if token in tree[parent].children:
            continue
        node = tree.add(proposal(parent, token), chance)
        assert node is not None
        probability[node] = probability[parent] * chance
    return tree, probability


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 60))
def test_likeliest_is_sorted_and_every_prefix_is_connected(seed, count):
    tree, probability = grown(seed, count)
    root, *rest = tree.likeliest()
    assert root.id == tree.root
    seen = {tree.root}
    last = 1.0
    for node in rest:
        assert node.parent in seen
        assert node.reach == pytest.approx(probability[node.id])
        assert node.reach <= last
        assert node.depth - root.depth == len(tree.path(node.id))
        last = node.reach
        seen.add(node.id)
    assert seen == tree.ids() == set(probability)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 60), st.lists(st.integers(0, 4), max_size=5))
def test_commit_keeps_the_new_roots_subtree_and_names_the_rest(seed, count, tokens):
    tree, _ = grown(seed, count)
    tokens = [*tokens, 3]
    before = {tuple(e.token for e in tree.path(node)): node for node in tree.ids()}
    old_root, ids = tree.root, tree.ids()
    rerooted = tree.commit(tokens)
    survivors = {
        path[len(tokens) :]: node
        for path, node in before.items()
        if path[: len(tokens)] == tuple(tokens)
    }
    after = {tuple(e.token for e in tree.path(node)): node for node in tree.ids()}
    if survivors:
        assert after == survivors
    else:
        assert len(tree) == 1
        assert tree.root not in ids
    passed = {entry.node for entry in rerooted.committed}
    assert [entry.token for entry in rerooted.committed] == tokens
    assert rerooted.committed[-1].node == tree.root
    assert set(rerooted.dropped) == ids - tree.ids() - passed - {old_root}
    known = sum(tuple(tokens[: i + 1]) in before for i in range(len(tokens)))
    assert rerooted.known == known


def test_a_child_of_a_node_that_left_is_ignored():
    tree = SpeculationTree()
    gone = tree.add(proposal(tree.root, 1), 0.5)
    tree.commit([2])
    assert gone is not None
    assert tree.add(proposal(gone, 1), 0.5) is None
    assert len(tree) == 1


def test_the_same_token_twice_is_one_node_with_the_better_chance():
    tree = SpeculationTree()
    first = tree.add(proposal(tree.root, 1), 0.2)
    assert tree.add(proposal(tree.root, 1), 0.6) == first
    assert tree[first].chance == 0.6
    assert tree.add(proposal(tree.root, 1), 0.1) == first
    assert tree[first].chance == 0.6


def test_ids_are_never_reused():
    tree = SpeculationTree()
    seen = tree.ids()
    for _ in range(3):
        tree.add(proposal(tree.root, 1), 0.5)
        seen |= tree.ids()
        fresh = tree.reset(token=4).id
        assert fresh not in seen
        seen.add(fresh)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 60))
def test_reach_is_the_product_of_chances_after_anything_that_happens(seed, count):
    tree, _ = grown(seed, count)
    rng = random.Random(seed)
    for _ in range(4):
        node = tree[rng.choice(sorted(tree.ids()))]
        if node.id != tree.root:
            tree.add(proposal(node.parent, node.token), rng.random())
        tree.commit([rng.randrange(5)])
        for kept in tree.ids():
            product = 1.0
            for entry in tree.path(kept):
                product *= tree[entry.node].chance
            assert tree[kept].reach == pytest.approx(product)


def test_a_commit_says_what_became_of_the_drafters_children():
    tree = SpeculationTree()
    root = tree[tree.root]
    root.offered, root.claims = (7, 8, 9), (0.5, 0.2, 0.1)
    tree.add(proposal(tree.root, 7), 0.5)
    known = tree.commit([8, 1])
    assert known.outcomes == (Outcome((0.5, 0.2, 0.1), 1), Outcome((), -1))
    assert known.known == 0  # token 8 was offered, but not worth a node
