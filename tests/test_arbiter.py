"""`auto` in virtual time: what a bad drafter costs, when minds are changed, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ondevice.arbiter import (
    FIRST_PAUSE_TOKENS,
    LONGEST_PAUSE_TOKENS,
    WARM_UP_ROUNDS,
    Arbiter,
)
from ondevice.costs import CostModel, CostPoint, CostTable, table_from
from ondevice.modelled import NO_CHILD, BetaText, Claims, Text
from ondevice.records import StepRecord
from ondevice.schedule import Schedule
from ondevice.simulate import Simulated, simulate

CLIFFS = {1: 1.0, 2: 1.0, 3: 1.27, 4: 1.0, 8: 1.23, 16: 1.61}
"""DESIGN section 3: forwards of SmolLM2 on one x86 core, times one row."""


class Useless:
    """Never right, and as sure of itself as a good drafter; or, if honest, not sure at all."""

    def __init__(self, honest: bool = False) -> None:
        self._sure, self._honest = BetaText(0.8), honest

    def claims(self, position: int) -> Claims:
        return (0.03, 0.02, 0.02, 0.01) if self._honest else self._sure.claims(position)

    def token(self, position: int) -> int:
        return NO_CHILD

    def stray_claims(self, node: int) -> Claims:
        return self.claims(node)


class Stretches:
    """One text after the other. parts: (tokens, text)."""

    def __init__(self, *parts: tuple[int, Text]) -> None:
        self._parts = parts

    def _at(self, position: int) -> Text:
        for length, text in self._parts:
            if position < length:
                return text
            position -= length
        return self._parts[-1][1]

    def claims(self, position: int) -> Claims:
        return self._at(position).claims(position)

    def token(self, position: int) -> int:
        return self._at(position).token(position)

    def stray_claims(self, node: int) -> Claims:
        return self._parts[0][1].stray_claims(node)


def machine(
    cliffs: bool = True, slowdown: float = 1.0, draft_ms: float = 10.0, one_ms: float = 62.0
) -> CostTable:
    """62 ms a forward, with the measured cliffs or 3 % a row; 10 ms a drafter step."""
    if not cliffs:
        forwards = [one_ms * (1 + 0.03 * rows) for rows in range(32)]
        steps = [(8, draft_ms)]
        return table_from(forwards, steps, verifier_slowdown=slowdown, drafter_slowdown=slowdown)
    return CostTable(
        tuple(
            CostPoint(n, 0, one_ms * part, one_ms * part * slowdown) for n, part in CLIFFS.items()
        ),
        (CostPoint(1, 0, one_ms, one_ms * slowdown),),
        (CostPoint(8, 0, draft_ms, draft_ms * slowdown),),
    )


@dataclass
class Watched:
    """A simulated answer under `auto`, and the strategies that were in force, in turn."""

    answer: Simulated
    strategies: list[str] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    """Of every token."""

    @property
    def switches(self) -> int:
        return sum(one != other for one, other in pairwise(self.strategies))

    def speed(self, first: int, last: int, one_ms: float = 62.0) -> float:
        """Of the tokens from `first` to `last`, times plain."""
        return (last - first) * one_ms / (self.ends_ms[last - 1] - self.ends_ms[first])


def watch(table: CostTable, text: Text, tokens: int) -> Watched:
    records: list[StepRecord] = []
    answer = simulate(table, text, Schedule("auto"), tokens, on_record=records.append)
    watched = Watched(answer, [record.strategy for record in records])
    for record in records:
        watched.ends_ms += [record.end_ns / 1e6] * record.committed
    return watched


# Demand 6: a useless drafter costs 5 % at most, probing included


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize("slowdown", [1.0, 1.16, 1.3, 2.0])
@pytest.mark.parametrize("draft_ms", [10.0, 0.9 * 62])
@pytest.mark.parametrize("cliffs", [False, True])
def test_a_useless_drafter_costs_at_most_5_percent(cliffs, draft_ms, slowdown, honest):
    table = machine(cliffs, slowdown, draft_ms)
    for tokens in (600, 1000):
        assert simulate(table, Useless(honest), Schedule("auto"), tokens).speed >= 0.95


@pytest.mark.parametrize("slowdown", [1.0, 1.3])
def test_in_the_long_run_it_costs_half_a_percent_and_few_switches(slowdown):
    watched = watch(machine(slowdown=slowdown), Useless(), 10_000)
    assert watched.answer.speed >= 0.995
    assert watched.switches <= 40
    assert watched.strategies.count("plain") > 0.85 * 10_000


def test_it_is_parked_within_a_few_rounds():
    watched = watch(machine(slowdown=1.16), Useless(), 100)
    assert watched.strategies.index("plain") <= 8
    assert "parked" in watched.answer.stats.reason
    assert "acceptance 0." in watched.answer.stats.reason


# Changing its mind


@pytest.mark.parametrize("slowdown", [1.0, 1.16, 1.3])
def test_a_drafter_that_becomes_good_is_found_out(slowdown):
    table, good = machine(slowdown=slowdown), BetaText(0.9, seed=5)
    watched = watch(table, Stretches((400, Useless()), (3000, good)), 2400)
    assert watched.strategies[-1] != "plain"
    alone = simulate(table, good, Schedule("auto"), 1000).speed
    assert watched.speed(1400, 2400) > 0.7 * alone


@pytest.mark.parametrize("slowdown", [1.0, 1.3])
def test_good_then_useless_then_good_again(slowdown):
    good = BetaText(0.9, seed=5)
    text = Stretches((1000, good), (1000, Useless()), (4000, good))
    watched = watch(machine(slowdown=slowdown), text, 4000)
    assert watched.speed(100, 900) > 2.5
    assert watched.speed(1300, 2000) > 0.95
    assert watched.speed(3000, 4000) > 2.3
    assert watched.switches < 30


@pytest.mark.parametrize("a", [0.3, 0.5, 0.7, 0.9])
def test_it_does_not_flap_on_a_steady_text(a):
    watched = watch(machine(cliffs=False, slowdown=1.16), BetaText(a, seed=2), 4000)
    assert watched.switches <= 20


def test_where_overlapping_cannot_lose_nothing_else_is_tried():
    watched = watch(machine(), BetaText(0.8, seed=2), 1500)
    assert set(watched.strategies) == {"pipelined"}


@pytest.mark.parametrize("slowdown", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("a", [0.4, 0.6])
def test_drafting_in_turn_is_found_where_the_units_disturb_each_other(a, slowdown):
    """Also where overlapping is slower than plain decoding and gets parked first."""
    table = machine(cliffs=False, slowdown=slowdown, draft_ms=30.0)
    text = BetaText(a, seed=3)
    by_name = {
        name: simulate(table, text, Schedule(name), 2000).speed
        for name in ("sequential", "pipelined")
    }
    assert by_name["sequential"] > by_name["pipelined"]
    watched = watch(table, text, 2000)
    assert "sequential" in watched.strategies
    assert watched.answer.speed > 0.88 * by_name["sequential"]


def test_a_table_that_is_wrong_by_ten_does_not_park_a_good_drafter_for_long():
    from ondevice.policy import Experience

    true = machine()
    for factor in (0.1, 10.0):
        wrong = CostTable(
            tuple(
                CostPoint(p.rows, 0, p.alone_ms * factor, p.beside_ms * factor)
                for p in true.verifier
            ),
            true.plain,
            true.drafter,
        )
        experience = Experience(CostModel(wrong))
        speed = simulate(
            true, BetaText(0.8, seed=1), Schedule("auto"), 1500, experience=experience
        ).speed
        assert speed > 0.85 * simulate(true, BetaText(0.8, seed=1), Schedule("auto"), 1500).speed


# The arbiter alone


def taught(arbiter: Arbiter, rounds: int, tokens: int, round_ms: float, **fields: float) -> None:
    for _ in range(rounds):
        arbiter.learn(
            tokens, round_ms, plain_ms=10.0, slowdown=fields.get("slowdown", 1.0), drafted=True
        )


def parked(slowdown: float = 1.0) -> Arbiter:
    arbiter = Arbiter()
    taught(arbiter, 8, 1, 20.0, slowdown=slowdown)
    assert arbiter.parked
    return arbiter


def test_pauses_double_up_to_a_limit_and_a_success_makes_them_short_again():
    arbiter, pauses = parked(), []
    for _ in range(7):
        pauses.append(arbiter.run_tokens)
        while arbiter.parked:
            arbiter.learn(1, 10.0, 10.0, 1.0, False)
        while not arbiter.parked:
            arbiter.learn(1, 20.0, 10.0, 1.0, True)
    assert pauses[0] >= FIRST_PAUSE_TOKENS - 8
    assert [min(2 * pause, LONGEST_PAUSE_TOKENS) for pause in pauses[1:-1]] == pauses[2:]
    assert pauses[-1] == LONGEST_PAUSE_TOKENS
    while arbiter.parked:
        arbiter.learn(1, 10.0, 10.0, 1.0, False)
    taught(arbiter, 100, 3, 15.0)
    assert not arbiter.parked
    while not arbiter.parked:
        arbiter.learn(1, 20.0, 10.0, 1.0, True)
    assert arbiter.run_tokens == FIRST_PAUSE_TOKENS


def test_catching_up_after_a_long_pause_is_not_held_against_the_drafter():
    """The units' first rounds: the drafter reads what was decoded plainly, and nothing else."""
    arbiter = parked()
    while arbiter.parked:
        arbiter.learn(1, 10.0, 10.0, 1.0, False)
    for _ in range(WARM_UP_ROUNDS - 2):
        arbiter.learn(1, 13.0, 10.0, 1.16, False)
        assert not arbiter.parked
    arbiter.learn(1, 200.0, 10.0, 1.16, True)
    taught(arbiter, 40, 3, 15.0, slowdown=1.16)
    assert not arbiter.parked


def test_a_drafter_that_never_answers_is_parked_all_the_same():
    arbiter = Arbiter()
    for _ in range(WARM_UP_ROUNDS + 8):
        arbiter.learn(1, 20.0, 10.0, 1.0, False)
    assert arbiter.parked


def test_a_run_asks_for_the_tokens_of_the_pause_and_at_least_one():
    assert Arbiter().run_tokens == 1
    arbiter = parked()
    before = arbiter.run_tokens
    arbiter.learn(1, 10.0, 10.0, 1.0, False)
    assert arbiter.run_tokens == before - 1


def test_one_lucky_round_does_not_crown_a_rival():
    arbiter = Arbiter()
    taught(arbiter, 200, 3, 15.0, slowdown=1.5)
    assert arbiter.strategy in ("pipelined", "sequential")
    rivals = 0
    for _ in range(2000):
        fast = arbiter.strategy == "pipelined"
        rivals += not fast
        arbiter.learn(3, 15.0 if fast else 16.0, 10.0, 1.5, True)
    assert arbiter.strategy == "pipelined"
    assert rivals < 60
