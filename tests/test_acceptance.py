"""What a drafter claims is believed as far as it was right, whatever the claim is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.acceptance import MOST_CHILDREN, Acceptance, ClaimKind, claims
from ondevice.modelled import BetaText
from ondevice.records import Outcome, Proposal

KINDS: tuple[ClaimKind, ...] = ("greedy", "noisy", "sampled")


def child(rank: int, log_q: float = -1.0, gap: float = 1.0, token: int = 0) -> Proposal:
    return Proposal(0, token or rank + 1, log_q, rank, gap, "test")


def family(kind: ClaimKind, chances: Sequence[float]) -> list[Proposal]:
    """Children whose claims are about `chances`, where the kind lets them be."""
    if kind == "greedy":
        return [child(rank, math.log(chance)) for rank, chance in enumerate(chances)]
    first = min(chances[0], 1 - 1e-9)
    lead = math.log(first / (1 - first))
    return [child(rank, gap=lead) for rank in range(1 if kind == "sampled" else len(chances))]


def outcomes(
    kind: ClaimKind, stated: Callable[[float], float], a: float = 0.7, seed: int = 1
) -> Iterator[tuple[tuple[float, ...], Outcome, Sequence[float]]]:
    """(claims, outcome, true chances) for ever; stated: what the first child's chance becomes."""
    rng = np.random.default_rng(seed)
    while True:
        true = [float(min(max(rng.beta(1.6 * a, 1.6 * (1 - a)), 1e-6), 1 - 1e-6))]
        while len(true) < 4:
            true.append((1 - sum(true)) * 0.45)
        claimed = stated(true[0])
        scale = (1 - claimed) / (1 - true[0])
        made = tuple(claims(family(kind, [claimed, *(scale * each for each in true[1:])]), kind))
        taken = int((rng.random() >= np.cumsum(true)).sum())
        yield made, Outcome(made, taken if taken < len(made) else -1), true


def learned(kind: ClaimKind, stated: Callable[[float], float], count: int) -> Acceptance:
    acceptance = Acceptance()
    for _, outcome, _ in (next(stream) for stream in [outcomes(kind, stated)] * count):
        acceptance.learn(outcome)
    return acceptance


def gap_of_first_choice(
    acceptance: Acceptance, kind: ClaimKind, stated: Callable[[float], float]
) -> tuple[float, float]:
    """Means over fresh outcomes: of the corrected chance, and of the hits."""
    stream = outcomes(kind, stated, seed=2)
    chances, hits = [], []
    for _ in range(3000):
        made, outcome, _ = next(stream)
        chances.append(acceptance.chances(made)[0])
        hits.append(outcome.taken == 0)
    return float(np.mean(chances)), float(np.mean(hits))


# Claims


def test_at_temperature_0_the_claim_is_the_drafters_probability():
    children = [child(0, math.log(0.6)), child(1, math.log(0.3)), child(2, 0.5)]
    assert claims(children, "greedy") == pytest.approx([0.6, 0.3, 1.0])


def test_with_noise_a_greater_lead_claims_more():
    leads = [0.0, 0.1, 1.0, 3.0, 10.0]
    made = [claims([child(0, gap=lead)], "noisy")[0] for lead in leads]
    assert made[0] == pytest.approx(0.5)
    assert all(low < high for low, high in pairwise(made))


def test_a_lone_child_leads_without_end():
    (claim,) = claims([child(0, gap=math.inf)], "noisy")
    assert 0.999 < claim <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(0, 50)), min_size=1, max_size=16))
def test_with_noise_all_children_together_claim_at_most_one(scores):
    children = [child(rank, log_q, gap) for rank, (log_q, gap) in enumerate(scores)]
    made = claims(children, "noisy")
    assert sum(made) <= 1 + 1e-9
    assert all(later <= one for one, later in pairwise(made[1:]))


@settings(max_examples=100, deadline=None)
@given(st.floats(-30, 0), st.floats(0, 50), st.integers(0, 10**6), st.floats(-30, 0))
def test_under_rejection_nothing_of_the_sampled_token_is_in_its_claim(log_q, gap, token, other):
    one, two = child(0, log_q, gap), child(0, other, gap / 2 + 1, token)
    assert claims([one], "sampled") == claims([two], "sampled")


# Corrections


@pytest.mark.parametrize("kind", KINDS[:2])
def test_honest_claims_stay_as_they_are(kind):
    acceptance = learned(kind, lambda chance: chance, 4000)
    stream = outcomes(kind, lambda chance: chance, seed=3)
    for _ in range(300):
        made, _, _ = next(stream)
        chances = acceptance.chances(made)
        assert chances[0] == pytest.approx(made[0], abs=0.1)
        assert sum(chances) <= 1 + 1e-9
    mean, hits = gap_of_first_choice(acceptance, kind, lambda chance: chance)
    assert mean == pytest.approx(hits, abs=0.04)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stated",
    [lambda chance: chance**0.2, lambda chance: 0.99, lambda chance: chance**3],
    ids=["over-confident", "always sure", "modest"],
)
def test_a_drafter_that_misjudges_itself_is_corrected(kind, stated):
    mean, hits = gap_of_first_choice(learned(kind, stated, 800), kind, stated)
    assert mean == pytest.approx(hits, abs=0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_is_never_right_is_soon_not_believed(kind):
    acceptance = Acceptance()
    made = tuple(claims(family(kind, [0.95, 0.03]), kind))
    for _ in range(60):
        acceptance.learn(Outcome(made, -1))
    assert acceptance.chances(made)[0] < 0.2
    assert acceptance.first_choice < 0.1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_siblings_together_are_no_more_than_certain(data):
    acceptance = Acceptance()
    lists = st.lists(st.floats(0, 1), min_size=1, max_size=MOST_CHILDREN)
    for _ in range(data.draw(st.integers(0, 30))):
        made = tuple(data.draw(lists))
        acceptance.learn(Outcome(made, data.draw(st.integers(-1, len(made) - 1))))
        chances = acceptance.chances(data.draw(lists))
        assert sum(chances) <= 1 + 1e-9
        assert all(0 <= chance <= 1 for chance in chances)
        assert 0 <= sum(acceptance.expected(4)) <= 1 + 1e-9


def test_every_child_gets_a_chance():
    acceptance = Acceptance()
    for count in (1, 4, MOST_CHILDREN):
        assert len(acceptance.chances([0.01] * count)) == count


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_subject_is_learned_within_a_few_hundred_tokens(kind):
    def good(chance: float) -> float:
        return chance

    acceptance = learned(kind, good, 2000)
    made = tuple(claims(family(kind, [0.9, 0.05]), kind))
    before = acceptance.chances(made)[0]
    for index in range(400):
        acceptance.learn(Outcome(made, 0 if index % 5 == 0 else -1))
    during = acceptance.chances(made)[0]
    for index in range(600):
        acceptance.learn(Outcome(made, 0 if index % 10 else -1))
    after = acceptance.chances(made)[0]
    assert during < 0.6 * before
    assert after > 0.75


def test_ranks_are_learned_apart():
    """The second child may be the good one."""
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.learn(Outcome((0.6, 0.3), 1))
    first, second = acceptance.chances((0.6, 0.3))
    assert first < 0.1
    assert second > 0.6
    assert acceptance.expected(2)[1] > acceptance.expected(2)[0]


def test_a_node_without_children_teaches_nothing():
    acceptance = Acceptance()
    fresh = acceptance.chances((0.5,)), acceptance.expected(4), acceptance.seen
    for _ in range(50):
        acceptance.learn(Outcome((), -1))
    assert (acceptance.chances((0.5,)), acceptance.expected(4), acceptance.seen) == fresh


def test_the_average_of_the_first_choice_is_that_of_the_text():
    text, acceptance = BetaText(0.8, seed=4), Acceptance()
    for position in range(2000):
        taken = text.token(position)
        acceptance.learn(Outcome(text.claims(position), taken if taken < 4 else -1))
    assert acceptance.first_choice == pytest.approx(0.8, abs=0.06)
    assert acceptance.seen <= 400
