"""Engine and session on a real tiny pair: both units on their threads, the package emulated."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engines import open_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.coordinator import Coordinator
from ondevice.errors import BadRequest, ContextOverflow
from ondevice.prompt import Message
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES
from ondevice.session import Options

PROMPT = [9, 40, 77, 41, 9]
SHORT = Options(max_tokens=16)


@pytest.fixture(scope="module")
def engine(tiny_pair):
    """Both units in this process, where their caches can be looked at."""
    with open_here(tiny_pair) as engine:
        yield engine


def units(session):
    """The session's caches as the units see them: (verifier tokens, drafter tokens)."""
    driver = session._driver
    drain(driver)
    verifier = driver._verifier.call(lambda unit: unit._sessions[driver._verifier_session].tokens)
    drafter = driver._drafter.call(lambda unit: unit._pools[driver._drafter_session].tokens)
    return list(verifier), list(drafter)


def drain(driver) -> None:
    """Let what runs run out, as the next answer would."""
    while not driver.coordinator.at_rest:
        driver._carry_out(driver._inbox.get(timeout=30)(0))
    driver._verifier.call(lambda unit: None)
    driver._drafter.call(lambda unit: None)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=st.lists(st.integers(4, 200), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.7, 1.2]),
    top_p=st.sampled_from([1.0, 0.9]),
    penalty=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 2**32),
)
def test_same_seed_same_text_for_any_strategy(engine, prompt, temperature, top_p, penalty, seed):
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, repetition_penalty=penalty, seed=seed
    )
    options = [Options(sampling, 24, strategy=strategy) for strategy in STRATEGIES]
    options.append(Options(sampling, 24, children=1))
    answers = [engine.generate(prompt, each) for each in options]
    assert len({answer.token_ids for answer in answers}) == 1


def test_the_drafter_works_while_chains_are_verified(engine):
    # Long, since a tiny verifier on a busy machine may be done before the drafter has begun.
    answer = engine.generate(PROMPT, Options(max_tokens=200, strategy="pipelined", children=1))
    assert answer.stats.drafter_busy > 0


def test_the_text_is_that_of_the_tokens_and_of_the_pieces(engine):
    with engine.session() as session:
        pieces = list(session.stream("say something", SHORT))
    answer = pieces[-1].answer
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(t.token for piece in pieces for t in piece.tokens) == answer.token_ids
    shown = [t for t in answer.token_ids if t not in engine.model.end_tokens]
    assert answer.text == engine.model.tokenizer.decode(shown, skip_special_tokens=True)
    assert len(answer.token_ids) == answer.stats.completion_tokens <= 16


def test_logprobs_are_the_verifiers(engine, tiny_verifier_folder):
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    sampling = SamplingParams(temperature=0.9, seed=1, top_k=20, top_logprobs=3)
    answer = engine.generate(PROMPT, Options(sampling, 8))
    model, _ = load_model(tiny_verifier_folder)
    logits = np.array(model(mx.array([[*PROMPT, *answer.token_ids]]))[0]).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for index, token in enumerate(answer.tokens):
        row = log_p[len(PROMPT) - 1 + index]
        assert token.logprob == pytest.approx(row[token.token], abs=1e-3)
        best = sorted(row, reverse=True)[:3]
        assert [value for _, value in token.top_logprobs] == pytest.approx(best, abs=1e-3)


def test_the_next_turn_reuses_both_caches(engine):
    with engine.session() as session:
        first = session.generate(PROMPT, SHORT)
        text = [*PROMPT, *first.token_ids]
        verifier, drafter = units(session)
        assert verifier == text[:-1]
        assert drafter == text[: len(drafter)]
        prompt = [*text, 50, 51]
        fresh = engine.generate(prompt, SHORT)
        seen = recorded_prefills(session)
        assert session.generate(prompt, SHORT).token_ids == fresh.token_ids
    assert seen["verifier"] == [(text[-1], 50)]
    assert len(seen["drafter"][0]) <= len(prompt) - 1 - len(drafter)


def recorded_prefills(session) -> dict[str, list[tuple[int, ...]]]:
    """Every prefill that the units get from now on."""
    seen: dict[str, list[tuple[int, ...]]] = {"verifier": [], "drafter": []}
    carry_out = session._driver._carry_out

    def recording(commands):
        for command in commands:
            if hasattr(command, "tokens") and hasattr(command, "unit"):
                seen[command.unit].append(command.tokens)
        return carry_out(commands)

    session._driver._carry_out = recording
    return seen


def test_a_conversation_keeps_what_was_said(engine):
    with engine.session(system="be brief") as session:
        first = session.generate("hello", SHORT)
        session.generate("and now", SHORT)
        assert [message["role"] for message in session.messages] == [
            "system", "user", "assistant", "user", "assistant",
        ]  # fmt: skip
        assert session.messages[2]["content"] == first.text
        session.clear()
        assert session.messages == [Message(role="system", content="be brief")]
        assert session.generate("hello", SHORT).token_ids == first.token_ids


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cancel_at_any_piece_frees_both_units_and_keeps_the_caches_right(engine, strategy):
    options = Options(max_tokens=60, strategy=strategy)
    whole = engine.generate(PROMPT, options).token_ids
    with engine.session() as session:
        for stop_after in (1, 2, 5):
            got: list[int] = []
            for count, piece in enumerate(session.stream(PROMPT, options), start=1):
                got += [token.token for token in piece.tokens]
                if count == stop_after:
                    session.cancel()
            assert piece.answer.finish_reason in ("cancelled", "stop", "length")
            assert tuple(got) == whole[: len(got)]
            verifier, drafter = units(session)
            text = [*PROMPT, *got]
            assert verifier == text[: len(verifier)]
            assert drafter == text[: len(drafter)]
        assert session.generate(PROMPT, options).token_ids == whole


def test_closing_the_stream_cancels(engine):
    with engine.session() as session:
        stream = session.stream("tell me", Options(max_tokens=500))
        first = next(stream)
        stream.close()
        assert session.messages[-1]["role"] == "assistant"
        assert session.messages[-1]["content"].startswith(first.text)
        assert session.generate(PROMPT, SHORT) is not None


def test_cancel_without_an_answer_does_not_touch_the_next_one(engine):
    with engine.session() as session:
        session.cancel()
        whole = session.generate(PROMPT, SHORT)
        session.cancel()
        assert session.generate(PROMPT, SHORT).token_ids == whole.token_ids


def test_two_answers_at_once_in_one_session_are_refused(engine):
    with engine.session() as session:
        stream = session.stream(PROMPT, SHORT)
        next(stream)
        with pytest.raises(BadRequest, match="is answering"):
            session.generate(PROMPT, SHORT)
        assert list(stream)[-1].answer is not None


def test_sessions_on_two_threads_do_not_mix(engine):
    prompts = [[10 + i, 20, 30 + i] for i in range(4)]
    options = Options(SamplingParams(temperature=0.8, seed=5), 20)
    alone = [engine.generate(prompt, options).token_ids for prompt in prompts]
    together: dict[int, tuple[int, ...]] = {}

    def ask(index: int) -> None:
        together[index] = engine.generate(prompts[index], options).token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(prompts))] == alone


def test_astream_gives_the_same_and_leaving_it_cancels(engine):
    async def read(limit: int) -> list[str]:
        texts = []
        with engine.session() as session:
            pieces = session.astream("hi", Options(max_tokens=40))
            async for piece in pieces:
                texts.append(piece.text)
                if len(texts) == limit:
                    break
            await pieces.aclose()
        return texts

    whole = asyncio.run(read(10_000))
    with engine.session() as session:
        assert "".join(whole) == session.generate("hi", Options(max_tokens=40)).text
    assert asyncio.run(read(1)) == whole[:1]


def test_astream_raises_what_stream_raises(engine):
    async def read() -> None:
        with engine.session() as session:
            async for _ in session.astream("  "):
                pass

    with pytest.raises(BadRequest, match="empty"):
        asyncio.run(read())


def test_a_stop_string_ends_text_tokens_and_statistics(engine):
    with engine.session() as session:
        whole = session.generate("talk", Options(max_tokens=40))
    at = len(whole.text) // 2
    stop = whole.text[at : at + 2]
    with engine.session() as session:
        cut = session.generate("talk", Options(max_tokens=40, stop=(stop,)))
        assert cut.text == whole.text[: whole.text.find(stop)]
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.stats.completion_tokens == len(cut.token_ids)
        verifier, _ = units(session)
        assert verifier == session._driver.coordinator.committed[:-1]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(max_tokens=0), "max tokens"),
        (Options(SamplingParams(temperature=-1)), "temperature"),
        (Options(strategy="fast"), "strategy"),
        (Options(rule="typical"), "rule"),
        (Options(children=0), "children"),
    ],
)
def test_a_bad_option_is_named_and_leaves_the_session_usable(engine, options, what):
    with engine.session() as session:
        with pytest.raises(BadRequest, match=what):
            session.generate("hello", options)
        assert session.messages == []
        assert session.generate("hello", SHORT).text is not None


@pytest.mark.parametrize("prompt", ["", "  \n", [], [-1], [10**6]])
def test_a_bad_prompt_is_refused(engine, prompt):
    with engine.session() as session, pytest.raises(BadRequest):
        session.generate(prompt, SHORT)


def test_a_prompt_beyond_the_verifiers_context_is_refused_and_beyond_the_drafters_is_not(engine):
    with engine.session() as session:
        with pytest.raises(ContextOverflow, match="context"):
            session.generate([5] * engine.model.context, SHORT)
        long = [5 + i % 190 for i in range(600)]  # the largest drafter function has 256 slots
        answer = session.generate(long, Options(max_tokens=200, strategy="pipelined"))
        assert answer.stats.drafter_window > 0
        plain = engine.generate(long, Options(max_tokens=200, strategy="plain"))
        assert answer.token_ids == plain.token_ids


def test_the_answer_ends_where_the_context_does(engine):
    prompt = [7 + i % 100 for i in range(engine.model.context - 5)]
    answer = engine.generate(prompt, Options(max_tokens=100, strategy="plain"))
    assert answer.finish_reason in ("length", "stop")
    assert len(answer.token_ids) <= 5


def test_rejection_with_several_children_says_that_it_is_coupled(engine):
    sampling = SamplingParams(temperature=1.0, seed=2)
    asked = engine.generate(PROMPT, Options(sampling, 8, rule="rejection", children=3))
    assert "coupled" in asked.stats.reason
    assert asked.token_ids == engine.generate(PROMPT, Options(sampling, 8)).token_ids


def test_a_coordinator_takes_one_prompt_at_a_time(engine):
    with engine.session() as session:
        stream = session.stream(PROMPT, SHORT)
        next(stream)
        coordinator: Coordinator = session._driver.coordinator
        turn = coordinator.turn
        with pytest.raises(RuntimeError, match="under way"):
            coordinator.on_prompt(0, PROMPT, turn.limits, turn.schedule, greedy=True)
        stream.close()
