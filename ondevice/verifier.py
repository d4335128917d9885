"""The verifier: an mlx-lm model that scores trees, decides the text and keeps its caches exact.

Everything here is called on one thread, the unit's own; MLX streams belong to a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any, Self, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ondevice.errors import UnitFailed, UnsupportedModel
from ondevice.families import shape_of, tolerance, tree_error
from ondevice.mlxfolder import load_folder
from ondevice.plainrun import PlainRun, require_finite
from ondevice.records import FloatArray, Verdict, VerifyRow
from ondevice.rows import Instrumented, NormTap, is_chain, tree_of
from ondevice.sampling import Law, history_with_path, walk_coupled, walk_rejection
from ondevice.sampling_mlx import NO_EDITS, Choices, DeviceLaw, RowEdits, floats, ints
from ondevice.treecache import TreeCache, window_of
from ondevice.units import RunRequest, TreeShape, UnitMemory, VerifyRequest

PREFILL_ROWS = 512
"""Tokens of a prefill chunk; a cancelled prefill ends after the running chunk."""


@dataclass(slots=True)
class _Session:
    """tokens: what the cache holds. layers: None when they must be computed again from tokens.

    law: that of the last request, with its arrays on the device.
    """

    tokens: list[int] = field(default_factory=list)
    layers: list[Any] | None = None
    law: DeviceLaw | None = None

    def device_law(self, law: Law) -> DeviceLaw:
        if self.law is None or self.law.law is not law:
            self.law = DeviceLaw(law)
        return self.law


@dataclass(frozen=True, slots=True)
class _Scored:
    """A request's forward, submitted but not yet read."""

    request: VerifyRequest
    prefix: int
    choices: Choices
    rider_tokens: mx.array | None
    hidden: mx.array | None

    def arrays(self) -> list[mx.array]:
        more = (self.rider_tokens, self.hidden)
        return [*self.choices.arrays(), *(array for array in more if array is not None)]


class MLXVerifier:
    """See `ondevice.units.VerifierUnit`.

    probe_error: how far tree rows were from in-order decoding when the model was opened, in
    standard deviations of its logits; None where no tree is allowed.
    """

    def __init__(self, model: Module, vocab_size: int, context: int, far: int = 0) -> None:
        """Take over a loaded mlx-lm model. far: a position that the probe shall lie beyond."""
        self.vocab_size = vocab_size
        self.context = context
        self.shape: TreeShape
        self.shape_reason: str
        self.shape, self.shape_reason = shape_of(model)
        self.probe_error: float | None = None
        self._model = model
        self._wrapped = Instrumented(model)
        self._layout = self._wrapped.layout
        self._sessions: dict[int, _Session] = {}
        self._handles = itertools.count()
        if self.shape == "tree":
            self._prove(far)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Load an MLX folder; raises ArtifactError when it is incomplete, damaged or altered."""
        loaded = load_folder(folder)
        return cls(loaded.model, loaded.vocab_size, loaded.context, loaded.original_context)

    def close(self) -> None:
        """Free everything; gives the model its own modules back."""
        mx.synchronize()  # a run that was ended leaves a forward under way
        self._sessions.clear()
        self._wrapped.undo()
        del self._model
        mx.clear_cache()

    def memory(self) -> UnitMemory:
        """See `UnitMemory`. The peak is of all that MLX holds in this process."""
        peak_bytes = mx.get_peak_memory()
        mx.reset_peak_memory()
        layers = [layer for session in self._sessions.values() for layer in session.layers or ()]
        weights: Any = tree_flatten(self._model.parameters())  # type: ignore[no-untyped-call]
        weights_bytes = sum(array.nbytes for _, array in weights)
        return UnitMemory(weights_bytes, sum(layer.nbytes for layer in layers), peak_bytes)

    # Sessions

    def open_session(self) -> int:
        """A new, empty cache; returns its handle."""
        handle = next(self._handles)
        self._sessions[handle] = _Session(layers=self._new_layers())
        return handle

    def close_session(self, session: int) -> None:
        """Free the cache."""
        del self._sessions[session]

    def truncate(self, session: int, length: int) -> None:
        """Keep the first `length` tokens of the cache; it must hold that many."""
        kept = self._sessions[session]
        if not 0 <= length <= len(kept.tokens):
            raise UnitFailed(f"cannot keep {length} tokens of a cache of {len(kept.tokens)}")
        if length < len(kept.tokens):
            del kept.tokens[length:]
            self._rewind(kept)

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Append `tokens` to the cache, chunk by chunk until `stopped()`; returns its length."""
        at = self._sessions[session]
        self._layers(at)
        self._append(at, tokens, stopped)
        return len(at.tokens)

    def mlx_lm_cache(self, session: int) -> list[Any]:
        """The session's layers as mlx-lm's own cache objects, for its prompt-cache files."""
        layers = self._layers(self._sessions[session])
        return [cache.to_mlx_lm() if isinstance(cache, TreeCache) else cache for cache in layers]

    def row_logits(
        self, session: int, rows: Sequence[VerifyRow], riders: Sequence[VerifyRow] = ()
    ) -> FloatArray:
        """Logits after every row and rider, (rows + riders, vocab); the cache stays as it was."""
        at = self._sessions[session]
        try:
            return np.array(self._forward_rows(at, [*rows, *riders]).astype(mx.float32))
        finally:
            self._rewind(at)

    # Verification

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """Score, walk and commit: the cache gains the root and the accepted path, no other row.

        One forward for all rows of a request, and one wait for all requests. Raises UnitFailed for
        rows that are not finite or that this model may not be given; the caches stay as they were.
        """
        start_ns = monotonic_ns()
        try:
            scored = [self._submit(request) for request in requests]
            mx.eval([array for each in scored for array in each.arrays()])
            walks = [self._walk(each) for each in scored]
        except BaseException:
            for request in requests:
                self._rewind(self._sessions[request.session])
            raise
        for each, (accepted, _) in zip(scored, walks, strict=True):
            self._commit(each, accepted)
        end_ns = monotonic_ns()
        return [
            _verdict(each, accepted, tokens, start_ns, end_ns)
            for each, (accepted, tokens) in zip(scored, walks, strict=True)
        ]

    def run(self, request: RunRequest, stopped: Callable[[], bool]) -> Iterator[Verdict]:
        """Plain decoding, one verdict a token, forward t + 1 submitted before token t is read.

        However it ends, the cache then holds the root and every token whose forward was submitted.
        """
        at = self._sessions[request.session]
        layers = self._layers(at)

        def forward(token: mx.array) -> mx.array:
            logits: mx.array = self._model(token[None], cache=layers)
            return logits[:, -1]

        complete = False
        try:
            plain = PlainRun(forward, at.device_law(request.law), at.tokens, request)
            yield from plain.verdicts(stopped)
            complete = True
        except GeneratorExit:
            complete = True  # at a yield every submitted token has been read
            raise
        finally:
            if not complete:
                self._rewind(at)

    def _submit(self, request: VerifyRequest) -> _Scored:
        at = self._sessions[request.session]
        law, count = at.device_law(request.law), len(request.rows)
        with self._tap.capturing() if request.want_hidden else nullcontext():
            logits = self._forward_rows(at, [*request.rows, *request.riders])
        depths, _ = tree_of([row.parent for row in request.rows])
        choices = law.choose(
            logits[:count],
            (depths + len(at.tokens) + 1).tolist(),
            _edits(law, at.tokens, request.rows),
            with_log_p=_walks_by_rejection(request),
        )
        return _Scored(
            request=request,
            prefix=len(at.tokens),
            choices=choices,
            rider_tokens=mx.argmax(logits[count:], axis=-1) if request.riders else None,
            hidden=self._tap.take().astype(mx.float32) if request.want_hidden else None,
        )

    @property
    def _tap(self) -> NormTap:
        if self._wrapped.tap is None:
            raise UnsupportedModel(
                "hidden states were asked for, but this model's final norm was not found; "
                "use a proposer that needs none"
            )
        return self._wrapped.tap

    def _walk(self, scored: _Scored) -> tuple[list[int], list[int]]:
        rows, choices, law = scored.request.rows, scored.choices, scored.request.law
        position = scored.prefix + 1
        tokens = ints(choices.tokens)
        scores = floats(choices.scores)
        for logprob in floats(choices.logprobs):
            require_finite(logprob, 0.0, position)

        def choose(row: int) -> int:
            require_finite(0.0, scores[row], position)
            return tokens[row]

        if choices.log_p is None:
            return walk_coupled(rows, choose)
        log_p = np.array(choices.log_p)

        def distribution(row: int) -> FloatArray:
            choose(row)
            return cast(FloatArray, log_p[row])

        return walk_rejection(rows, distribution, law, position)

    def _commit(self, scored: _Scored, accepted: Sequence[int]) -> None:
        at, path = self._sessions[scored.request.session], [0, *accepted]
        at.tokens.extend(scored.request.rows[row].token for row in path)
        if self.shape != "plain":
            for cache in at.layers or ():
                cache.commit(scored.prefix, path)

    # The model

    def _forward_rows(self, at: _Session, rows: Sequence[VerifyRow]) -> mx.array:
        parents = [row.parent for row in rows]
        layers = self._layers(at)
        return self._forward([row.token for row in rows], parents, layers, len(at.tokens))

    def _forward(
        self, tokens: Sequence[int], parents: Sequence[int], layers: list[Any], prefix: int
    ) -> mx.array:
        """Logits of all rows, (rows, vocab), not evaluated; the rows are appended to `layers`."""
        self._require_shape(parents)
        chain = is_chain(parents)
        with nullcontext() if chain else self._layout.tree(parents, prefix):
            logits: mx.array = self._model(mx.array(list(tokens))[None], cache=layers)
        return logits[0]

    def _require_shape(self, parents: Sequence[int]) -> None:
        fits = self.shape == "tree" or is_chain(parents)
        if not fits or (self.shape == "plain" and len(parents) > 1):
            raise UnitFailed(
                f"this verifier takes {self.shape} rows only: {self.shape_reason}; "
                "the policy must not send it others"
            )

    def _append(self, at: _Session, tokens: Sequence[int], stopped: Callable[[], bool]) -> None:
        for start in range(0, len(tokens), PREFILL_ROWS):
            if stopped():
                return
            chunk = list(tokens[start : start + PREFILL_ROWS])
            assert at.layers is not None
            self._model(mx.array(chunk)[None], cache=at.layers)
            mx.eval([cache.state for cache in at.layers])
            if self.shape != "plain":
                for cache in at.layers:
                    cache.settle()
            at.tokens.extend(chunk)
            mx.clear_cache()

    def _layers(self, at: _Session) -> list[Any]:
        if at.layers is None:
            tokens, at.tokens[:] = list(at.tokens), []
            at.layers = self._new_layers()
            self._append(at, tokens, stopped=lambda: False)
        return at.layers

    def _new_layers(self, start: int = 0) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self._model)
        if self.shape == "plain":
            return caches
        return [TreeCache(self._layout, window_of(cache), start) for cache in caches]

    def _rewind(self, at: _Session) -> None:
        """Make the cache hold `at.tokens` and nothing else.

        Where that is further back than a window's layer remembers, all is computed again when it is
        needed; mlx-lm's recurrent and rotating caches cannot be rolled back at all.
        """
        length = len(at.tokens)
        if self.shape == "plain" or not all(cache.can_keep(length) for cache in at.layers or ()):
            at.layers = None
        for cache in at.layers or ():
            cache.truncate(len(at.tokens))

    def _prove(self, far: int) -> None:
        """Fall back to chains when tree rows do not equal decoding in order."""

        def forward(tokens: Sequence[int], parents: Sequence[int], layers: list[Any]) -> mx.array:
            return self._forward(tokens, parents, layers, layers[0].offset)

        windows = [layer.window for layer in self._new_layers() if layer.window is not None]
        self.probe_error = tree_error(forward, self._new_layers, self.vocab_size, far, windows)
        logits = self._model(mx.array([[0]]))
        if self.probe_error > tolerance(logits.dtype):
            self.shape = "chain"
            self.shape_reason = (
                f"in the probe tree rows differed from decoding in order by {self.probe_error:.2g} "
                "standard deviations of the logits"
            )


def _walks_by_rejection(request: VerifyRequest) -> bool:
    """At temperature 0 both rules accept the law's own choice and nothing else."""
    return request.rule == "rejection" and not request.law.greedy


def _edits(law: DeviceLaw, committed: Sequence[int], rows: Sequence[VerifyRow]) -> RowEdits:
    if not law.law.params.rewrites_logits:
        return NO_EDITS
    return law.edits([history_with_path(committed, rows, row) for row in range(len(rows))])


def _verdict(
    scored: _Scored, accepted: Sequence[int], tokens: Sequence[int], start_ns: int, end_ns: int
) -> Verdict:
    request, choices, walked = scored.request, scored.choices, [0, *accepted]
    hidden = None if scored.hidden is None else np.array(scored.hidden[walked[-1]])
    top = [choices.top(row) for row in walked] if choices.top_tokens is not None else []
    return Verdict(
        step=request.step,
        accepted=tuple(request.rows[row].node for row in accepted),
        tokens=tuple(tokens),
        logprobs=choices.logprobs_of(walked, tokens),
        start_ns=start_ns,
        end_ns=end_ns,
        top_logprobs=tuple(top),
        hidden=hidden,
        row_tokens=tuple(ints(choices.tokens)),
        rider_tokens=() if scored.rider_tokens is None else tuple(ints(scored.rider_tokens)),
    )
