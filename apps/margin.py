"""How close was it? Where two texts part, the scores of both tokens are computed once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ondevice.engine import Engine
from ondevice.sampling import SamplingParams, noise
from ondevice.session import Options

NEAR_TIE = 5e-4
"""Scores closer than this may change places when the same row is computed in a wider forward."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A `sampling.Constraint`: the answer begins with `tokens`, then anything may come."""

    tokens: tuple[int, ...]
    vocab_size: int

    def start(self) -> int:
        """No token has come yet."""
        return 0

    def advance(self, state: int, token: int) -> int:
        """One more has come."""
        return state + 1

    def allowed(self, state: int) -> npt.NDArray[np.bool_]:
        """Only the next of `tokens`; all of them once those are through. Shape (vocab_size,)."""
        mask = np.full(self.vocab_size, state >= len(self.tokens))
        if state < len(self.tokens):
            mask[self.tokens[state]] = True
        return mask


def margin(
    engine: Engine,
    prompt: str,
    sampling: SamplingParams,
    prefix: Sequence[int],
    rivals: Sequence[int],
) -> float:
    """By how much the law's own choice after `prefix` beats the worst of `rivals`; 0 or more.

    Plain decoding, one row a forward: `prefix` is forced, then the law chooses; then again with
    each rival forced in its place. A token's score is log p / T + g, its log-probability at
    temperature 0 (DESIGN: the law). sampling: a temperature and a seed, nothing else.
    """
    best = _score(engine, prompt, sampling, tuple(prefix), len(prefix))
    scores = [_score(engine, prompt, sampling, (*prefix, rival), len(prefix)) for rival in rivals]
    return max(0.0, best - min(scores))


def _score(
    engine: Engine, prompt: str, sampling: SamplingParams, forced: tuple[int, ...], at: int
) -> float:
    """Score of token `at` of the answer that begins with `forced`."""
    vocab_size = engine.model.vocab_size
    constrained = replace(sampling, constraint=Forced(forced, vocab_size))
    answer = engine.generate(prompt, Options(constrained, max_tokens=at + 1, strategy="plain"))
    token = answer.tokens[at]
    if sampling.temperature == 0:
        return token.logprob
    position = answer.stats.prompt_tokens + at
    g = noise(answer.stats.seed, position, vocab_size)
    return token.logprob / sampling.temperature + float(g[token.token])
