"""The drafter: a small model in Core ML functions, its cache in the host's slots.

A step is one call of `t{T}_s{S}` (DESIGN section 3): embeddings, angles and masks go in, keys,
values and logits of its T rows come out. Everything the next step needs is written by the host
between two steps. A step that fails leaves every slot as it was.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ondevice.artifact import DrafterManifest, FunctionShape, RopeManifest
from ondevice.coreml.runtime import CoreMLRuntime, FunctionSignature, TensorSpec
from ondevice.drafterfolder import Functions, LoadedDrafter, RuntimeFactory, load_drafter
from ondevice.errors import UnitFailed
from ondevice.models.drafter_weights import CHUNK_ROWS
from ondevice.models.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RotarySettings,
    cos_sin,
    inverse_frequencies,
)
from ondevice.proposing import Family, Head, RowTokens, ranked_children, sampled_child
from ondevice.records import DraftResult, DraftRow, Proposal
from ondevice.sampling import Law
from ondevice.slots import CacheShape, SlotPool, StepRow
from ondevice.units import DraftRequest, UnitMemory

Array = npt.NDArray[Any]

_CACHE_PREFIXES = ("k_", "v_")


class CoreMLDrafter:
    """A DrafterUnit that runs a converted drafter through a CoreMLRuntime.

    Called by one thread, one method at a time. Input buffers are made once per function and reused:
    Core ML may still hold them for a second after a call (coremltools pull requests 2827, 2829).
    """

    name = "drafter"

    def __init__(self, loaded: LoadedDrafter) -> None:
        """loaded: see `load_drafter`."""
        self._manifest = manifest = loaded.manifest
        self._embedding = loaded.embedding
        self._runtime = loaded.runtime
        self._vocabulary = RowTokens(manifest.vocab_size, manifest.row_to_token)
        ropes = {"": manifest.rope, "_local": manifest.local_rope}
        self._frequencies = {
            suffix: inverse_frequencies(rotary_settings(rope, manifest.head_dim))
            for suffix, rope in ropes.items()
            if rope is not None
        }
        self._row_counts = sorted(manifest.row_counts)
        self._functions = {
            (shape.rows, shape.context): _Function(self._runtime, shape, manifest)
            for shape in manifest.functions
        }
        self._weights_bytes = loaded.weights_bytes
        self._pools: dict[int, SlotPool] = {}
        self._handles = itertools.count()
        self._idle: tuple[str, dict[str, Array]] | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        verifier_folder: Path,
        runtime: RuntimeFactory | None = None,
        functions: Functions | None = None,
    ) -> Self:
        """The drafter in `folder`, checked; see `load_drafter`."""
        return cls(load_drafter(folder, verifier_folder, runtime, functions))

    @property
    def manifest(self) -> DrafterManifest:
        """What the drafter is."""
        return self._manifest

    @property
    def runtime_name(self) -> str:
        """What runs it, for reports."""
        return self._runtime.name

    def memory(self) -> UnitMemory:
        """See `UnitMemory`. The peak is what the whole process had resident, since it began."""
        caches = [array.nbytes for pool in self._pools.values() for array in pool.buffers.values()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024
        return UnitMemory(self._weights_bytes, sum(caches), peak * unit)

    def open_session(self) -> int:
        """A new, empty slot pool; returns its handle."""
        manifest = self._manifest
        shape = CacheShape(
            manifest.num_layers,
            manifest.num_kv_heads,
            manifest.head_dim,
            next(iter(self._functions.values())).cache_dtype,
        )
        session = next(self._handles)
        self._pools[session] = SlotPool(shape, manifest.context_sizes, self._slots)
        return session

    def _slots(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._runtime.buffer(TensorSpec(shape, dtype))

    def close_session(self, session: int) -> None:
        """Free the pool; an unknown session is no error."""
        self._pools.pop(session, None)

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Append committed `tokens`, a step of the widest function at a time, until `stopped()`.

        Of a text that no context holds, only its first SINKS and its newest tokens are computed.
        Returns how many committed tokens the session has now. All nodes are dropped.
        """
        pool = self._pool(session)
        before = len(pool.tokens)
        pool.extend(tokens)
        while rows := list(itertools.islice(pool.missing(), self._widest(pool))):
            if stopped():
                pool.truncate(max(before, rows[0].position))
                break
            function = self._start(pool, rows, keep=())
            pool.write(rows, *function.predict())
        return len(pool.tokens)

    def draft(self, request: DraftRequest) -> DraftResult:
        """Expand the rows of the request: the best children of each, rank by rank.

        Rows that have no slot yet, ancestors included, share a step when they fit the widest
        function, else catch-up steps go first. Raises UnitFailed; `committed` and `dropped` are
        registered all the same.
        """
        start_ns = time.monotonic_ns()
        pool = self._pool(request.session)
        pool.commit(request.committed)
        pool.drop(request.dropped)
        plan = _Plan(pool, request.rows)
        proposals: list[Proposal] = []
        steps = done = 0
        while rows := plan.rows[done : done + self._widest(pool)]:
            function = self._start(pool, rows, plan.needed)
            wanted = plan.wanted(rows)
            keys, values = function.predict(with_head=bool(wanted))
            if wanted:
                head = function.head(list(wanted), self._vocabulary)
                for column, row in wanted.items():
                    family = self._family(pool, row, request.law)
                    proposals += _children(head, column, family, request)
            pool.write(rows, keys, values)
            done += len(rows)
            steps += 1
        return DraftResult(
            step=request.step,
            proposals=tuple(proposals),
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            catch_up_steps=max(0, steps - 1),
            function_rows=function.rows if steps == 1 else 0,
            window=pool.window,
        )

    def truncate(self, session: int, length: int) -> None:
        """Forget all nodes and every committed token from `length` on."""
        self._pool(session).truncate(length)

    def stay_awake(self) -> None:
        """Run the smallest function on nothing, where hardware would fall asleep otherwise."""
        if not self._runtime.sleeps:
            return
        if not self._idle:
            signatures = self._runtime.functions
            name = self._functions[min(self._functions)].name
            buffers = {key: self._runtime.buffer(s) for key, s in signatures[name].inputs.items()}
            self._idle = name, buffers
        self._runtime.predict(*self._idle)

    def close(self) -> None:
        """Free the pools and the runtime."""
        self._pools.clear()
        self._runtime.close()

    def _pool(self, session: int) -> SlotPool:
        pool = self._pools.get(session)
        if pool is None:
            raise UnitFailed(f"the drafter has no session {session}; open one first")
        return pool

    def _widest(self, pool: SlotPool) -> int:
        return min(self._row_counts[-1], pool.room)

    def _start(self, pool: SlotPool, rows: Sequence[StepRow], keep: Iterable[int]) -> _Function:
        """The smallest function that takes `rows`, with its inputs filled in."""
        pool.make_room(len(rows), keep)
        count = next(count for count in self._row_counts if count >= len(rows))
        function = self._functions[count, pool.context]
        positions = np.zeros(count, np.int64)
        positions[: len(rows)] = [row.position for row in rows]
        function.fill(
            pool,
            rows,
            self._embedding.rows([row.token for row in rows]),
            {suffix: cos_sin(positions, turn) for suffix, turn in self._frequencies.items()},
        )
        return function

    def _family(self, pool: SlotPool, row: DraftRow, law: Law) -> Family:
        history: list[int] = []
        if law.params.rewrites_logits:
            history = [*pool.tokens, *(entry.token for entry in row.path)]
        position = len(pool.tokens) + len(row.path)
        return Family(row.node, position, law, history, self.name)


def _children(head: Head, column: int, family: Family, request: DraftRequest) -> list[Proposal]:
    if request.rule == "rejection":
        return sampled_child(head, column, family)
    return ranked_children(head, column, family, request.children)


def rotary_settings(rope: RopeManifest, head_dim: int) -> RotarySettings:
    """A manifest's rotary embedding for heads of size `head_dim`."""
    scaling: RopeScaling | None = None
    if rope.original_context is not None:
        scaling = Llama3Scaling(
            factor=rope.factor or 1.0,
            low_freq_factor=rope.low_freq_factor or 1.0,
            high_freq_factor=rope.high_freq_factor or 1.0,
            original_context=rope.original_context,
        )
    elif rope.factor is not None:
        scaling = LinearScaling(rope.factor)
    return RotarySettings(head_dim, rope.theta, scaling, rope.rotated)


class _Plan:
    """The rows that a request needs, ancestors first: text without slots, then nodes.

    needed: all nodes on the requested paths.
    """

    def __init__(self, pool: SlotPool, requested: Sequence[DraftRow]) -> None:
        if not pool.tokens:
            raise UnitFailed("the drafter's session has no text; commit a token before drafting")
        self._root = len(pool.tokens) - 1
        self._requested = {row.path[-1].node if row.path else None: row for row in requested}
        self.needed = {entry.node for row in requested for entry in row.path}
        self.rows = list(pool.missing())
        if None in self._requested and not self.rows:
            self.rows.append(StepRow(pool.tokens[self._root], self._root))
        planned: set[int] = set()
        for node, row in self._requested.items():
            above: list[int] = []
            for position, entry in enumerate(row.path, start=self._root + 1):
                at = entry.node
                if at not in planned and (at == node or not pool.holds(at)):
                    planned.add(at)
                    self.rows.append(StepRow(entry.token, position, at, tuple(above)))
                above.append(at)

    def wanted(self, rows: Sequence[StepRow]) -> dict[int, DraftRow]:
        """Which of `rows` were requested, by index."""
        found = {}
        for index, row in enumerate(rows):
            requested = self._requested.get(row.node)
            if requested is not None and (row.node is not None or row.position == self._root):
                found[index] = requested
        return found


class _Function:
    """One drafter function with its input buffers and, once it was asked for logits, theirs.

    rows: T of its name.
    """

    def __init__(
        self, runtime: CoreMLRuntime, shape: FunctionShape, manifest: DrafterManifest
    ) -> None:
        self._runtime, self.name = runtime, shape.name
        self.rows, self._logit_rows = shape.rows, manifest.logit_rows
        self._window = manifest.window
        self._signature = signature = runtime.functions[shape.name]
        self._own = {
            name: runtime.buffer(spec)
            for name, spec in signature.inputs.items()
            if not name.startswith(_CACHE_PREFIXES)
        }
        self._inputs: dict[str, Array] = {}

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """What the runtime takes keys and values in without a conversion."""
        return self._signature.inputs["k_0"].dtype

    def fill(
        self,
        pool: SlotPool,
        rows: Sequence[StepRow],
        embeddings: Array,
        angles: Mapping[str, tuple[Array, Array]],
    ) -> None:
        """Write the inputs of a step.

        embeddings: (len(rows), D); angles: cos and sin for all T by the suffix of their inputs.
        """
        x = self._own["x"]
        x[0, :, 0, : len(rows)] = embeddings.T
        x[0, :, 0, len(rows) :] = x[0, :, 0, :1]  # a norm of zeros would lean on its epsilon alone
        for suffix, (cosines, sines) in angles.items():
            self._own[f"cos{suffix}"][:], self._own[f"sin{suffix}"][:] = cosines, sines
        pool.fill_masks(rows, self._own["mask"], self._own["mask_new"])
        if self._window is not None:
            local = self._own["mask_local"], self._own["mask_new_local"]
            for ours, seen in zip(local, (self._own["mask"], self._own["mask_new"]), strict=True):
                ours[:] = seen
            pool.narrow_masks(rows, self._window, *local)
        self._inputs = {**self._own, **pool.buffers}

    def predict(self, with_head: bool = False) -> tuple[Array, Array]:
        """Run on what was filled in; returns k_new and v_new, (L, KV, T, head_dim)."""
        out = self._head_buffers.parts if with_head else None
        outputs = self._runtime.predict(self.name, self._inputs, out)
        return outputs["k_new"], outputs["v_new"]

    def head(self, columns: Sequence[int], vocabulary: RowTokens) -> Head:
        """Logits of the last `predict(with_head=True)`; UnitFailed unless finite in `columns`."""
        buffers = self._head_buffers
        head = Head(buffers.logits, buffers.maxima, buffers.sums, vocabulary)
        head.check(columns)
        return head

    @cached_property
    def _head_buffers(self) -> _HeadBuffers:
        return _HeadBuffers.empty(self._signature, self._logit_rows, self.rows)


@dataclass(frozen=True, slots=True)
class _HeadBuffers:
    """One array for all parts of the vocabulary, and the views that the function writes into."""

    logits: Array
    maxima: Array
    sums: Array
    parts: Mapping[str, Array]

    @classmethod
    def empty(cls, signature: FunctionSignature, logit_rows: Sequence[int], rows: int) -> Self:
        chunks = sum(logit_rows) // CHUNK_ROWS
        shapes = {
            "logits": (chunks, CHUNK_ROWS, rows),
            "chunk_max": (chunks, rows),
            "chunk_sum": (chunks, rows),
        }
        whole = {
            name: np.zeros(shape, signature.outputs[f"{name}_0"].dtype)
            for name, shape in shapes.items()
        }
        parts = {}
        first = 0
        for index, count in enumerate(logit_rows):
            last = first + count // CHUNK_ROWS
            for name, array in whole.items():
                part = f"{name}_{index}"
                parts[part] = array[first:last].reshape(signature.outputs[part].shape)
            first = last
        return cls(whole["logits"], whole["chunk_max"], whole["chunk_sum"], parts)
