"""Proposers without a model: chances, chains, Jacobi's fixed point, windows, who is credited."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import VOCAB, World, logits, plain_text

from ondevice.arbiter import Arbiter
from ondevice.costs import CostModel, StepCosts, table_from
from ondevice.engine import Engine
from ondevice.errors import BadRequest
from ondevice.jacobi import Jacobi
from ondevice.policy import Experience
from ondevice.proposers import HitRates
from ondevice.records import ROOT_ROW, StartVerify, StepRecord, Verdict, VerifyRow, Window
from ondevice.sampling import Law, SamplingParams
from ondevice.schedule import Schedule, Sizes
from ondevice.session import Options
from ondevice.statistics import Tally
from ondevice.tree import SpeculationTree
from ondevice.weightless import ALL, Use, Weightless
from ondevice.windows import DECIDED_EVERY, FIRST_PAUSE, SHAPES, Windows

TEXTS = st.lists(st.integers(1, 4), min_size=3, max_size=60)


def proposed(text: list[int], use: Use, rates=None) -> SpeculationTree:
    weightless = Weightless()
    weightless.begin(use, defaultdict(HitRates) if rates is None else rates)
    tree = SpeculationTree()
    tree.reset(text[-1])
    weightless.propose(tree, text)
    return tree


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_the_chances_of_siblings_are_at_most_one_together(text):
    tree = proposed(text, Use(ALL))
    for node in tree.likeliest():
        children = [tree[child].chance for child in node.children.values()]
        assert sum(children) <= 1 + 1e-4
        assert all(0 < chance <= 1 for chance in children)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_a_verifier_that_takes_chains_gets_a_chain(text):
    tree = proposed(text, Use(ALL, chain=True))
    assert all(len(node.children) <= 1 for node in tree.likeliest())


def test_guesses_that_were_right_are_believed_and_those_that_were_wrong_are_not():
    """Text is text, however it was decoded: here nothing was ever put before a verifier."""
    for hit in (True, False):
        rates: defaultdict[str, HitRates] = defaultdict(HitRates)
        weightless = Weightless()
        weightless.begin(Use(("lookup",)), rates)
        text = [1, 2, 3]
        for turn in range(60):
            tree = SpeculationTree()
            tree.reset(text[-1])
            weightless.propose(tree, text)
            text = [*text, (1, 2, 3)[turn % 3] if hit else 10 + turn]
        kinds = rates["lookup"]._kinds.values()
        right = sum(right for right, _ in kinds)
        judged = sum(judged for _, judged in kinds)
        assert (judged > 30 and right / judged > 0.9) if hit else right == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fixed_point_of_jacobis_iteration_is_the_sampled_text(temperature):
    """Nothing is committed between the forwards: after n of them n guesses stand."""
    law = Law(SamplingParams(temperature=temperature, seed=5), VOCAB)
    prompt, block = [1, 2, 3], 6
    jacobi = Jacobi()
    jacobi.block = block
    guess = [each.token for each in jacobi.propose(prompt)]
    truth = plain_text(prompt, law, block)
    for iteration in range(block + 1):
        histories = [[*prompt, *guess[:at]] for at in range(block)]
        assert guess[:iteration] == truth[: min(iteration, len(truth))]
        guess = [law.choose(logits(history), history) for history in histories]


def test_jacobi_proposes_what_was_said_behind_the_first_wrong_guess():
    jacobi = Jacobi()
    tokens = (5, 1, 2, 3, 4)
    rows = tuple(VerifyRow(at, token, at - 1) for at, token in enumerate(tokens))
    side = VerifyRow(9, 7, 0)
    command = StartVerify(0, (*rows, side), "coupled")
    said = (1, 6, 3, 8, 9, 0)  # after 5 comes 1, after that 6 and not 2
    jacobi.observe(command, Verdict(0, (1,), (1, 6), (), 0, 1, row_tokens=said))
    guesses = jacobi.propose([5, 1, 6])
    assert [guess.token for guess in guesses] == [3, 8, 9]
    assert [guess.parent for guess in guesses] == [-1, 0, 1]
    assert [guess.kind[1] for guess in guesses] == [2, 1, 1]  # 3 had been guessed, too
    assert list(jacobi.propose([5, 1, 6, 2])) == []


def test_without_what_the_rows_said_jacobi_is_silent():
    jacobi = Jacobi()
    root = VerifyRow(0, 1, ROOT_ROW)
    jacobi.observe(StartVerify(0, (root,), "coupled"), Verdict(0, (), (2,), (), 0, 1))
    assert list(jacobi.propose([1, 2])) == []


def test_a_window_whose_rows_are_dear_does_not_ride_and_is_tried_again_later():
    windows, costs = Windows(), StepCosts(table_from([20.0] * 64, []).verifier)
    assert windows.choose(lambda riders: -1.0 * riders, costs) is None
    rounds = 0
    while windows.choose(lambda riders: 0.0, costs) is None:
        windows.learn(None, 0)
        rounds += 1
    assert rounds == FIRST_PAUSE
    assert windows.chosen == SHAPES[-1]


def test_a_window_that_finds_nothing_is_given_up():
    windows, costs = Windows(), StepCosts(table_from([20.0] * 64, []).verifier)
    rounds = 0
    while (used := windows.choose(lambda riders: -0.004 * riders, costs)) is not None:
        windows.learn(used, accepted=0)
        rounds += 1
        assert rounds < 20 * DECIDED_EVERY
    assert rounds >= DECIDED_EVERY


def test_a_window_of_unknown_cost_is_run_once_before_it_is_decided_on():
    windows, costs = Windows(), StepCosts(table_from([20.0] * 16, []).verifier)
    used = windows.choose(lambda riders: 0.0, costs)
    assert used == SHAPES[-1]
    assert not costs.knows(used.riders + 1)
    costs.observe(used.riders + 1, 0, 0.0, 200.0)
    windows.learn(used, 0)
    measured = costs.exactly(used.riders + 1)
    assert windows.choose(lambda riders: -1.0 if riders > 40 else 0.0, costs) != used
    assert measured == pytest.approx(200.0)


def test_a_drafter_that_does_not_pay_gives_way_to_none_and_then_to_plain():
    arbiter = Arbiter()
    arbiter.begin(("pipelined", "sequential", "weightless"))
    seen = [arbiter.strategy]
    for _ in range(400):
        speed = {"weightless": 1.5}.get(arbiter.strategy, 0.8)
        arbiter.learn(1, 20 / speed, 20.0, 1.0, drafted=True)
        if arbiter.strategy != seen[-1]:
            seen.append(arbiter.strategy)
    assert seen[:2] == ["pipelined", "weightless"]
    assert seen[-1] == "weightless"
    for _ in range(200):
        arbiter.learn(1, 25, 20.0, 1.0, drafted=True)
    assert arbiter.parked or arbiter.strategy in ("pipelined", "sequential", "weightless")


def test_without_a_drafter_auto_is_weightless_or_plain():
    world = World("perfect", seed=1, drafter=False)
    world.coordinator.experience = Experience(CostModel(table_from([20.0] * 32, [(8, 4.0)])))
    params = SamplingParams(seed=5)
    text = world.answer([1, 2, 3] * 4, params, Schedule("auto"), 40)
    assert text == plain_text([1, 2, 3] * 4, Law(params, VOCAB), 40)
    assert {record.strategy for record in world.records} <= {"weightless", "plain"}
    assert "weightless" in {record.strategy for record in world.records}


def test_statistics_tell_whose_tokens_were_drafted_and_accepted():
    window = Window(4, 3, 4)
    record = StepRecord(
        strategy="weightless",
        context=9,
        rows=11,
        drafted=3,
        accepted=2,
        committed=3,
        start_ns=0,
        end_ns=1,
        waited_ns=0,
        root_was_known=False,
        accepted_by=("lookup", "lookahead"),
        drafted_by=("lookup", "lookahead", "lookup"),
        offered_by=(("jacobi", 2), ("lookahead", 1), ("lookup", 5)),
        window=window,
    )
    tally = Tally("weightless", 3, 0)
    tally.add(record)
    stats = tally.summary("", 0)
    assert stats.proposers == {
        "jacobi": {"offered": 2, "verified": 0, "accepted": 0},
        "lookahead": {"offered": 1, "verified": 1, "accepted": 1},
        "lookup": {"offered": 5, "verified": 2, "accepted": 1},
    }
    assert stats.lookahead == {"W": 4, "N": 3, "G": 4}


@pytest.mark.parametrize("strategy", ["weightless", "lookup", "lookahead", "jacobi"])
def test_an_engine_counts_every_draft_token_for_one_proposer(engine: Engine, strategy):
    options = Options(max_tokens=40, strategy=strategy, sizes=Sizes(8, 4))
    stats = engine.generate("one two one two one two", options).stats
    offered = [counts["offered"] for counts in stats.proposers.values()]
    drafted = [counts["verified"] for counts in stats.proposers.values()]
    accepted = [counts["accepted"] for counts in stats.proposers.values()]
    assert sum(drafted) == stats.num_draft_tokens > 0
    assert all(n >= m for n, m in zip(offered, drafted, strict=True))
    assert sum(accepted) == stats.num_accepted_draft_tokens
    assert (stats.lookahead is None) == (strategy in ("lookup", "jacobi"))


def test_the_published_shape_rides_in_every_forward_when_it_is_asked_for(engine: Engine):
    window = Window(5, 4, 5)
    stats = engine.generate("a b a b", Options(max_tokens=24, strategy="lookahead", window=window))
    assert stats.stats.lookahead == {"W": 5, "N": 4, "G": 5}


def test_a_window_out_of_range_is_the_users_mistake(engine: Engine):
    with pytest.raises(BadRequest, match="lookahead's N"):
        engine.generate("a", Options(strategy="lookahead", window=Window(5, 2, 5)))
    with pytest.raises(BadRequest, match="must be a Window"):
        engine.generate("a", Options(strategy="lookahead", window=(5, 4, 5)))


def test_lookahead_without_trees_says_why_it_decodes_plainly(engine: Engine) -> None:
    answer = engine.generate("a b", Options(max_tokens=4, strategy="lookahead", children=1))
    assert answer.stats.strategy == "plain"
    assert answer.stats.reason == "plain: lookahead needs trees, and one child a node was asked"
