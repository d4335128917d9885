"""A unit on the bench: a step of a given size, and how long the unit says it took."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ondevice.errors import OnDeviceError
from ondevice.records import DraftRow, NodeToken, VerifyRow
from ondevice.sampling import Law, SamplingParams
from ondevice.units import DrafterUnit, DraftRequest, RunRequest, VerifierUnit, VerifyRequest
from ondevice.worker import UnitWorker

RUN_TOKENS = 5
"""Of a plain run."""
DRAFTER_CONTEXT = 32
"""Tokens; a drafter function takes the same time for any text that its slots hold."""
CHILDREN = 4
"""Proposals asked for per row, as for trees."""


class VerifierBench:
    """Forwards of the verifier at several context depths, a session for each."""

    def __init__(self, worker: UnitWorker[VerifierUnit]) -> None:
        unit = worker.opened()
        self.shape, self.context, self.vocab_size = unit.shape, unit.context, unit.vocab_size
        self._worker = worker
        self._law = _greedy(self.vocab_size)
        self._sessions: dict[int, int] = {}

    def fill(self, context: int) -> None:
        """See that there is a session whose cache holds `context` tokens."""
        if context in self._sessions:
            return
        session = self._worker.call(lambda unit: unit.open_session())
        self._sessions[context] = session
        tokens, stopped = _text(context, self.vocab_size), self._worker.closing.is_set
        self._worker.call(lambda unit: unit.prefill(session, tokens, stopped))

    def verify_ms(self, context: int, parents: Sequence[int]) -> float:
        """A forward of rows with these `parents`, after `context` tokens."""
        tokens = _text(len(parents), self.vocab_size)
        rows = tuple(
            VerifyRow(row, token, parent)
            for row, (token, parent) in enumerate(zip(tokens, parents, strict=True))
        )
        session = self._sessions[context]
        request = VerifyRequest(session, 0, rows, "coupled", self._law)

        def work(unit: VerifierUnit) -> float:
            (verdict,) = unit.verify([request])
            unit.truncate(session, context)
            return _ms(verdict.start_ns, verdict.end_ns)

        return self._worker.call(work)

    def run_ms(self, context: int) -> float:
        """A token of a plain run that begins after `context` tokens, or some more.

        Where rolling back means computing the text again (shape "plain"), the text grows instead.
        """
        session = self._sessions[context]
        request = RunRequest(session, 0, _text(1, self.vocab_size)[0], RUN_TOKENS, self._law)
        stopped = self._worker.closing.is_set

        def work(unit: VerifierUnit) -> float:
            first, *rest = unit.run(request, stopped)
            if unit.shape != "plain":
                unit.truncate(session, context)
            # From the start: when the first token is read, the second forward is under way (from
            # there on SmolLM2 seemed to take 48 ms a token, not 62). Not the median: a token that
            # is read late makes the next one's span short.
            return _ms(first.start_ns, rest[-1].end_ns) / RUN_TOKENS

        return self._worker.call(work)

    def close(self) -> None:
        """Free the caches; harmless when the unit is gone."""
        for session in self._sessions.values():
            with suppress(OnDeviceError):
                self._worker.call(_closing(session))


class DrafterBench:
    """Steps of the drafter after a short text; its session is opened by the first one."""

    def __init__(self, worker: UnitWorker[DrafterUnit], vocab_size: int) -> None:
        self._worker, self._vocab_size = worker, vocab_size
        self._law = _greedy(vocab_size)
        self._session: int | None = None
        self._nodes = itertools.count(1)
        self._grown: tuple[int, ...] = ()

    def step_ms(self, rows: int) -> float:
        """A step that expands `rows` new nodes, all of them children of the root."""
        session = self._open() if self._session is None else self._session
        tokens = _text(rows, self._vocab_size)
        nodes = [NodeToken(next(self._nodes), token) for token in tokens]
        request = self._request(session, tuple(DraftRow(each.node, (each,)) for each in nodes))
        self._grown = tuple(each.node for each in nodes)
        result = self._worker.call(lambda unit: unit.draft(request))
        return _ms(result.start_ns, result.end_ns)

    def close(self) -> None:
        """Free the cache; harmless when the unit is gone."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(OnDeviceError):
                self._worker.call(lambda unit: unit.close_session(session))

    def _open(self) -> int:
        """A text, and its last token expanded as the root."""
        session = self._session = self._worker.call(lambda unit: unit.open_session())
        *before, root = _text(DRAFTER_CONTEXT, self._vocab_size)
        stopped = self._worker.closing.is_set
        self._worker.call(lambda unit: unit.prefill(session, before, stopped))
        request = self._request(session, (DraftRow(0, ()),), (NodeToken(0, root),))
        self._worker.call(lambda unit: unit.draft(request))
        return session

    def _request(
        self, session: int, rows: tuple[DraftRow, ...], committed: tuple[NodeToken, ...] = ()
    ) -> DraftRequest:
        return DraftRequest(
            session=session,
            step=0,
            rows=rows,
            committed=committed,
            dropped=self._grown,
            children=CHILDREN,
            rule="coupled",
            law=self._law,
        )


def _closing(session: int) -> Callable[[VerifierUnit], None]:
    return lambda unit: unit.close_session(session)


def _greedy(vocab_size: int) -> Law:
    return Law(SamplingParams(seed=0), vocab_size)


def _text(length: int, vocab_size: int) -> list[int]:
    """Tokens from all over the vocabulary, always the same."""
    tokens: list[int] = np.random.default_rng(0).integers(vocab_size, size=length).tolist()
    return tokens


def _ms(start_ns: int, end_ns: int) -> float:
    return max(1, end_ns - start_ns) / 1e6  # never 0: figures are divided by each other
