"""Plain decoding with the next forward queued before the last token is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic_ns

import mlx.core as mx
import numpy as np

from ondevice.errors import UnitFailed
from ondevice.records import Verdict
from ondevice.sampling_mlx import NO_EDITS, Choices, DeviceLaw, floats, ints
from ondevice.units import RunRequest

CLEAR_EVERY = 256
"""Tokens between releases of MLX's freed buffers, as in mlx-lm's `generate_step`."""


@dataclass(slots=True)
class PlainRun:
    """One `RunRequest` at work.

    forward: appends one token, int (1,), to the cache and returns its logits, (1, vocab). known:
    the tokens of the cache as far as they have been read; this run appends to it.
    """

    forward: Callable[[mx.array], mx.array]
    law: DeviceLaw
    known: list[int]
    request: RunRequest

    def verdicts(self, stopped: Callable[[], bool]) -> Iterator[Verdict]:
        """One verdict a token: see `VerifierUnit.run`.

        With a constraint the mask of token t + 1 needs token t on the host, so forwards are not
        queued ahead; penalties and noise stay on the device and keep the pipeline.
        """
        ahead_allowed = self.law.law.params.constraint is None
        start_ns = monotonic_ns()
        position = len(self.known) + 1
        pending = self._submit_known(self.request.root, position)
        for left in range(self.request.limit - 1, -1, -1):
            if stopped():
                yield Verdict(self.request.step, (), (), (), start_ns, monotonic_ns())
                return
            position += 1
            last = left == 0 or not self.request.goes_on()
            ahead = None if last or not ahead_allowed else self._submit(pending.tokens, position)
            if ahead is not None and not self.law.law.greedy:
                self.law.law.noise(position + 1)  # made while the device is busy
            verdict = self._read(pending, start_ns, position - 1, more=not last)
            if ahead is not None:
                self.known.append(verdict.tokens[0])
            yield verdict
            if last:
                return
            if left % CLEAR_EVERY == 0:
                mx.clear_cache()
            start_ns = verdict.end_ns
            pending = ahead or self._submit_known(verdict.tokens[0], position)

    def _submit_known(self, token: int, position: int) -> Choices:
        choices = self._submit(mx.array([token]), position, [*self.known, token])
        self.known.append(token)
        return choices

    def _submit(self, fed: mx.array, position: int, history: list[int] | None = None) -> Choices:
        """Queue the forward of `fed`, and the choice of the token at `position` after it."""
        logits = self.forward(fed)
        if not self.law.law.params.rewrites_logits:
            edits = NO_EDITS
        elif history is not None:
            edits = self.law.edits([history])
        else:
            edits = self.law.edits_ahead(self.known, fed)
        choices = self.law.choose(logits, [position], edits)
        mx.async_eval(choices.arrays())  # type: ignore[no-untyped-call]  # C++
        return choices

    def _read(self, choices: Choices, start_ns: int, position: int, more: bool) -> Verdict:
        """Wait for a token; the only place where a run does."""
        (token,) = ints(choices.tokens)
        (logprob,), (score,) = floats(choices.logprobs), floats(choices.scores)
        require_finite(logprob, score, position)
        top = (choices.top(0),) if choices.top_tokens is not None else ()
        return Verdict(
            step=self.request.step,
            accepted=(),
            tokens=(token,),
            logprobs=(logprob,),
            start_ns=start_ns,
            end_ns=monotonic_ns(),
            top_logprobs=top,
            more=more,
        )


def require_finite(logprob: float, score: float, position: int) -> None:
    """Raise UnitFailed when the row that chooses the token at `position` is no distribution."""
    if not np.isfinite(logprob):
        raise UnitFailed(
            f"the verifier's logits at position {position} are not finite; "
            "its weights or its precision are broken: convert it again, or use float32"
        )
    if not np.isfinite(score):
        raise UnitFailed(f"the constraint allows no token at position {position}")
