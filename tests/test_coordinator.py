"""Laws of the coordinator, over random proposers, completion orders, cancellations and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import END, SCRIPTS, VOCAB, World, plain_text

from ondevice.coordinator import Coordinator
from ondevice.costs import CostModel, table_from
from ondevice.errors import UnitFailed
from ondevice.modelled import NO_CHILD, BetaText
from ondevice.policy import Experience
from ondevice.records import (
    AcceptanceRule,
    AnswerLimits,
    Emit,
    EndRun,
    NodeToken,
    StartDraft,
    StartRun,
    StartVerify,
    StepRecord,
    Verdict,
    Window,
)
from ondevice.sampling import Law, SamplingParams
from ondevice.schedule import STRATEGIES, Schedule, Sizes
from ondevice.simulate import _Machine
from ondevice.weightless import Weightless

PROMPTS = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**31)
FIXED_STRATEGIES = st.sampled_from(["plain", "sequential", "pipelined"])
WEIGHTLESS_ONLY = st.sampled_from(["weightless", "lookup", "lookahead", "jacobi"])
SIZES = st.builds(
    Sizes,
    verify_rows=st.integers(1, 12),
    depth=st.integers(1, 6),
    draft_rows=st.integers(1, 8),
)
CHILDREN = st.integers(1, 4)
WINDOWS = st.builds(Window, st.integers(2, 7), st.integers(3, 5), st.integers(1, 6))
SCHEDULES = st.one_of(
    st.builds(Schedule, strategy=st.sampled_from(STRATEGIES), children=CHILDREN),
    st.builds(Schedule, strategy=FIXED_STRATEGIES, children=CHILDREN, sizes=SIZES),
    st.builds(
        Schedule,
        strategy=WEIGHTLESS_ONLY,
        sizes=SIZES | st.none(),
        window=WINDOWS | st.none(),
        drafter=st.booleans(),
    ),
    st.builds(Schedule, strategy=st.sampled_from(["auto", "pipelined"]), window=WINDOWS),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=SEEDS,
)


def expected(prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> list[int]:
    return plain_text(prompt, Law(params, VOCAB), max_tokens)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SCRIPTS)), SEEDS, PROMPTS, SCHEDULES, PARAMS, st.integers(1, 30))
def test_any_schedule_gives_the_plain_text(script, seed, prompt, schedule, params, max_tokens):
    world = World(script, seed)
    assert world.answer(prompt, params, schedule, max_tokens) == expected(
        prompt, params, max_tokens
    )
    assert world.stop.reason == ("stop" if world.text[-1] == END else "length")
    world.settle()
    assert world.verifier.cache == world.coordinator.committed[:-1]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(sorted(SCRIPTS)), SEEDS)
def test_turns_cancels_and_changes_of_schedule_leave_every_later_text_right(data, script, seed):
    world = World(script, seed)
    prompt = data.draw(PROMPTS)
    for _ in range(data.draw(st.integers(2, 4))):
        params, schedule = data.draw(PARAMS), data.draw(SCHEDULES)
        cancel = data.draw(st.none() | st.integers(1, 40))
        text = world.answer(prompt, params, schedule, 16, cancel_after=cancel)
        whole = expected(prompt, params, 16)
        assert text == whole[: len(text)]
        assert text == whole or world.stop.reason == "cancelled"
        assert world.coordinator.committed == prompt + text
        if data.draw(st.booleans()):
            world.settle()
        kept = data.draw(st.integers(0, len(prompt) + len(text)))
        prompt = (prompt + text)[:kept] + data.draw(PROMPTS)
    world.settle()
    cache, told = world.verifier.cache, world.drafter.told
    assert cache == world.coordinator.committed[: len(cache)]
    assert told == world.coordinator.committed[: len(told)]


def test_answers_cancelled_while_a_run_ends_truncate_to_what_there_is():
    """Two of them: the second one's truncation is smaller than the first one's, which waited."""
    world, greedy = World("adversarial", 0), SamplingParams(temperature=0.0, seed=0)
    world.answer([1], greedy, Schedule(strategy="auto"), 16)
    penal = replace(greedy, repetition_penalty=1.3)
    world.answer([1], penal, Schedule(strategy="plain"), 16)
    for prompt in ([1, 1], [1]):
        world.answer(prompt, greedy, Schedule(strategy="auto"), 16, cancel_after=1)
    world.settle()
    assert world.verifier.cache == world.coordinator.committed[:-1]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SCRIPTS)), SEEDS, PROMPTS, SCHEDULES, PARAMS, st.integers(1, 40))
def test_a_dead_drafter_costs_no_token(script, seed, prompt, schedule, params, when):
    world = World(script, seed)
    text = world.answer(prompt, params, schedule, 20, fail=("drafter", when))
    assert text == expected(prompt, params, 20)
    world.settle()
    again = world.answer([*prompt, 1], params, schedule, 5)
    assert again == expected([*prompt, 1], params, 5)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(SCRIPTS)), SEEDS, PROMPTS, SCHEDULES, PARAMS, st.integers(1, 40))
def test_a_dead_verifier_ends_the_answer_with_its_error(
    script, seed, prompt, schedule, params, when
):
    world = World(script, seed)
    text = world.answer(prompt, params, schedule, 20, fail=("verifier", when))
    assert text == expected(prompt, params, 20)[: len(text)]
    world.settle()
    if "verifier" in world.dead:
        assert world.stop.reason == "error"
        assert world.stop.error is not None
        with pytest.raises(UnitFailed):
            world.answer(prompt, params, schedule, 5)


@settings(max_examples=60, deadline=None)
@given(SEEDS, PROMPTS, FIXED_STRATEGIES, st.integers(1, 20))
def test_rejection_ends_where_it_should_and_keeps_the_caches(seed, prompt, strategy, max_tokens):
    rule: AcceptanceRule = "rejection"
    schedule = Schedule(strategy, children=1, rule=rule)
    world = World("perfect", seed)
    text = world.answer(prompt, SamplingParams(temperature=1.0, seed=seed), schedule, max_tokens)
    assert END not in text[:-1]
    assert len(text) == max_tokens or text[-1] == END
    world.settle()
    assert world.verifier.cache == world.coordinator.committed[:-1]


def test_a_perfect_drafter_saves_rounds():
    params = SamplingParams(seed=3)
    world = World("perfect", seed=1)
    text = world.answer([1, 2], params, Schedule("sequential"), 24)
    assert len(world.records) < len(text) / 2


def test_without_any_proposer_there_is_one_run():
    world = World("perfect", seed=1, drafter=False, weightless=False)
    text = world.answer([1, 2, 3], SamplingParams(seed=5), Schedule("pipelined"), 12)
    assert text == expected([1, 2, 3], SamplingParams(seed=5), 12)
    assert all(r.drafted == 0 for r in world.records)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lost_drafter_leaves_one_run_and_is_told_nothing(strategy):
    """Plain decoding at its full speed: a run of one token at a time would queue no forward."""
    coordinator = Coordinator(drafter=True)
    limits = AnswerLimits(500, lambda _: False)
    coordinator.on_prompt(0, [1], limits, Schedule(strategy), greedy=True)
    commands = coordinator.on_failure(1, "drafter", UnitFailed("lost"))
    running = coordinator._verifier.running
    if isinstance(running, StartVerify):  # a forward that was under way is taken first
        verdict = Verdict(running.step, (), (3,), (0.0,), 1, 2)
        commands = coordinator.on_verdict(2, verdict)
        (running,) = [each for each in commands if isinstance(each, StartRun)]
    assert isinstance(running, StartRun)
    assert running.limit >= 499
    for count in range(400):
        verdict = Verdict(running.step, (), (count % 7,), (0.0,), 2, 3, more=True)
        (emit,) = coordinator.on_verdict(3 + count, verdict)
        assert isinstance(emit, Emit)
        assert emit.record.strategy == "plain"
    assert len(coordinator._untold) <= 2


def test_without_a_guess_worth_a_forward_a_run_goes_on_until_there_is_one():
    """Here a forward of one row takes 1.4 times what a token of a run does, as SmolLM2's did."""
    costs = table_from([28.0 + n for n in range(32)], [], plain_ms=20.0)
    coordinator = Coordinator(
        drafter=False, weightless=Weightless(), experience=Experience(CostModel(costs))
    )
    limits = AnswerLimits(500, lambda _: False)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    commands = coordinator.on_prompt(0, prompt, limits, Schedule("lookup"), greedy=True)
    (prefill,) = commands
    (run,) = coordinator.on_prefill(1, "verifier", prefill.step, len(prompt) - 1)
    assert isinstance(run, StartRun)
    assert run.watched
    ends = []
    for count, token in enumerate([20, 21, 1, 2, 3, 4, 5]):
        verdict = Verdict(run.step, (), (token,), (0.0,), 2, 3, more=True)
        found = coordinator.on_verdict(20_000_000 * (count + 1), verdict)
        ends += [(token, each) for each in found if isinstance(each, EndRun)]
    ((token, end),) = ends  # said once
    assert token in (2, 3, 4)
    assert end.step == run.step
    last = Verdict(run.step, (), (6,), (0.0,), 2, 3)
    _, verify = coordinator.on_verdict(10**9, last)
    assert isinstance(verify, StartVerify)
    assert [row.token for row in verify.rows[:4]] == [6, 7, 8, 9]


def test_a_drafter_that_must_catch_up_is_not_waited_for():
    """1,000 tokens decoded plainly go through its widest function, 64 at a time."""
    coordinator = Coordinator(drafter=True)
    limits = AnswerLimits(5000, lambda _: False)
    coordinator.on_prompt(0, [1], limits, Schedule("pipelined"), greedy=True)
    coordinator._drafter.rest(0)
    coordinator._verifier.rest(0)
    coordinator.tree.reset(1)
    coordinator._untold += [NodeToken(-2, 1)] * 1000
    commands = coordinator._proceed(1)
    assert any(isinstance(command, StartDraft) for command in commands)
    assert any(isinstance(command, StartVerify) for command in commands)


class Muted:
    """A text whose drafter is sure and never right."""

    claims = stray_claims = staticmethod(lambda _: (0.9, 0.05))
    token = staticmethod(lambda _: NO_CHILD)


def contents(thing: object, seen: set[int], skipped: tuple[object, ...]) -> int:
    """Entries of all containers that can be reached through objects of the runtime."""
    if id(thing) in seen or any(thing is each for each in skipped):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        inner = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | deque):
        inner = list(thing)
    elif type(thing).__module__.startswith("ondevice.") and not isinstance(thing, type):
        names = getattr(type(thing), "__slots__", ())
        inner = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
        inner += [getattr(thing, name) for name in names if hasattr(thing, name)]
    else:
        return 0
    return len(inner) + sum(contents(each, seen, skipped) for each in inner)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("text", [BetaText(0.7, seed=1), Muted()], ids=["good", "useless"])
def test_nothing_grows_with_an_answers_length_but_its_text(strategy, text):
    table = table_from([20 * (1 + 0.03 * rows) for rows in range(32)], [(8, 4.0)])
    coordinator = Coordinator(drafter=True, experience=Experience(CostModel(table)))
    sizes: list[int] = []
    count = 0

    def look(_: StepRecord) -> None:
        nonlocal count
        count += 1
        if count % 50 == 0:
            sizes.append(contents(coordinator, set(), (coordinator.committed,)))

    schedule = Schedule(strategy)
    _Machine(table, text, schedule, look).run(coordinator, schedule, 6000)
    assert len(coordinator.committed) == 6001
    early, late = sizes[len(sizes) // 4 : len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert max(late) < 1.5 * max(early) + 500
