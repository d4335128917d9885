"""What an engine is asked in a wrong way is refused in one sentence, before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.errors import BadRequest
from ondevice.sampling import SamplingParams
from ondevice.session import Options

PROMPT = [9, 40, 77, 41, 9]
SHORT = Options(max_tokens=16)


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        b"hi",
        bytearray(b"hi"),
        [1, "a"],
        [1.5],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "alien", "content": "x"}],
    ],
)
def test_a_prompt_of_the_wrong_kind_is_refused(engine, prompt):
    with engine.session() as session, pytest.raises(BadRequest):
        session.generate(prompt, SHORT)


def test_token_ids_may_be_numpys(engine):
    numbers = [np.int64(token) for token in PROMPT]
    assert engine.generate(numbers, SHORT).token_ids == engine.generate(PROMPT, SHORT).token_ids


@pytest.mark.parametrize(
    "options",
    [
        Options(max_tokens=2.5),
        Options(max_tokens="5"),
        Options(stop=("",)),
        Options(stop=(5,)),
        Options(stop=5),
        Options(stop=b"abc"),
        Options(children=1.5),
        Options({"temperature": 1}),
        Options(SamplingParams(temperature="a")),
        Options(SamplingParams(seed=1.5)),
        Options(SamplingParams(temperature=10**400)),
        Options(SamplingParams(logit_bias=[1])),
        Options(SamplingParams(constraint=5)),
        Options(SamplingParams(repetition_penalty=1e39)),
        Options(SamplingParams(logit_bias={"a": 1.0})),
        {"max_tokens": 3},
    ],
)
def test_options_of_the_wrong_kind_are_refused(engine, options):
    with engine.session() as session, pytest.raises(BadRequest):
        session.generate(PROMPT, options)


def test_one_stop_string_need_not_be_in_a_tuple(engine):
    one = engine.generate("talk", Options(max_tokens=30, stop="ab"))
    assert one.text == engine.generate("talk", Options(max_tokens=30, stop=("ab",))).text


@pytest.mark.parametrize("system", [5, b"x", ["a"]])
def test_a_system_message_is_text(engine, system):
    with pytest.raises(BadRequest, match="system"):
        engine.session(system=system)
