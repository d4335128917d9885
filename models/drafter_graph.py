"""The drafter as pure Core ML functions `t{T}_s{S}`: T rows of a step over S cache slots.

Layout is (1, channels, 1, T), the Neural Engine's own. The host looks up embeddings, computes RoPE
angles and masks, and owns the cache; a function only reads. What a row may see is in the masks
alone, so that branches, scattered slots and unused rows need nothing here.

What the graph promises besides the numbers:
- Rows are independent. Keys and values of this step's rows that are not finite count as zero for
  the rows that do not see them (0 x Inf would be NaN); the outputs `k_new`, `v_new` and logits show
  them as they are, so that the host can fail the step. A value that is not finite in a *cache slot*
  poisons every row: to hide it the cache would have to be copied. The host never writes one.
- No product overflows by summing over many slots: attention weights are divided by their sum
  before they meet the values, so that each result is at most the largest value.
- An unused row needs a finite input and sees itself only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ondevice.models.config import ModelConfig
from ondevice.models.drafter_weights import (
    CHUNK_ROWS,
    RESIDUAL_SCALE,
    DrafterWeights,
    HeadPart,
    LayerWeights,
    head_partition,
)
from ondevice.models.mil import FP16_MAX, FunctionSource, Half, Scope, Var

Shapes = dict[str, tuple[int, ...]]


class DrafterSizes(Protocol):
    """What the shapes of a drafter depend on."""

    @property
    def hidden_size(self) -> int:
        """Size of an embedding row."""

    @property
    def num_layers(self) -> int:
        """Layers of the drafter."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""


def input_shapes(sizes: DrafterSizes, rows: int, context: int) -> Shapes:
    """Names and shapes of a function's inputs, all fp16.

    x: embeddings; cos, sin: `ondevice.models.rope.cos_sin`; mask over the slots and mask_new over
    this step's rows (row, column): 0 where a row sees, MASKED where not; k_i, v_i: the slots of
    layer i.
    """
    angles = (1, 1, sizes.head_dim, rows)
    cache = (1, sizes.num_kv_heads, context, sizes.head_dim)
    shapes: Shapes = {
        "x": (1, sizes.hidden_size, 1, rows),
        "cos": angles,
        "sin": angles,
        "mask": (1, 1, rows, context),
        "mask_new": (1, 1, rows, rows),
    }
    for layer in range(sizes.num_layers):
        shapes |= {f"k_{layer}": cache, f"v_{layer}": cache}
    return shapes


def output_shapes(sizes: DrafterSizes, rows: int, logit_rows: Sequence[int]) -> Shapes:
    """Names and shapes of a function's outputs, all fp16.

    k_new (after RoPE), v_new: this step's rows for the slots; logits_i: part i of the vocabulary,
    `logit_rows[i]` of it (`head_partition`); chunk_max_i: maximum of each 128 logits, chunk_sum_i:
    sum of exp(logit - that maximum).
    """
    new = (sizes.num_layers, sizes.num_kv_heads, rows, sizes.head_dim)
    shapes: Shapes = {"k_new": new, "v_new": new}
    for part, logits in enumerate(logit_rows):
        chunks = (1, logits // CHUNK_ROWS, 1, rows)
        shapes[f"logits_{part}"] = (1, logits, 1, rows)
        shapes |= {f"chunk_max_{part}": chunks, f"chunk_sum_{part}": chunks}
    return shapes


@dataclass(frozen=True, slots=True)
class DrafterFunction:
    """One function: `config` (num_layers is the drafter's), T = `rows`, S = `context` slots."""

    config: ModelConfig
    rows: int
    context: int

    @property
    def name(self) -> str:
        """The function's name in the package."""
        return f"t{self.rows}_s{self.context}"

    def inputs(self) -> Shapes:
        """Names and shapes of the inputs: `input_shapes`."""
        return input_shapes(self.config, self.rows, self.context)

    def outputs(self) -> Shapes:
        """Names and shapes of the outputs: `output_shapes`."""
        return output_shapes(self.config, self.rows, head_partition(self.config.vocab_size))

    def source(self, weights: DrafterWeights) -> FunctionSource:
        """The function with `weights`, to be built by `ondevice.models.mil.program`."""
        return FunctionSource(self.name, self.inputs(), partial(_decoder, self, weights))


def stored_weights(constant: Callable[[str], Half], config: ModelConfig) -> DrafterWeights:
    """The weights of a package, read back by the names that the graph gave them.

    `constant(name)` is the value of a `const` op as it was built; raises what that raises.
    """

    def layer(index: int) -> LayerWeights:
        read = {
            field: constant(f"layer{index}_{block}_{field}_weight")[:, :, 0, 0]
            for block, fields in _BLOCKS.items()
            for field in fields
        }
        return LayerWeights(**read)

    parts = len(head_partition(config.vocab_size))
    head = [constant(f"logits_{part}_weight")[:, :, 0, 0] for part in range(parts)]
    return DrafterWeights(
        layers=tuple(layer(index) for index in range(config.num_layers)),
        head=tuple(HeadPart(weight, None) for weight in head),
    )


_BLOCKS = {"attention": ("query", "key", "value", "output"), "mlp": ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share; `cos`, `sin` (1,1,hd,T), masks repeated per group member."""

    function: DrafterFunction
    cos: Var
    signed_sin: Var
    mask: Var
    mask_new: Var


def _decoder(
    function: DrafterFunction, weights: DrafterWeights, inputs: Mapping[str, Var]
) -> list[Var]:
    graph = Scope()
    step = _prepare(graph.within("step"), function, inputs)
    x = graph("mul", "residual", x=inputs["x"], y=np.float16(RESIDUAL_SCALE))
    keys, values = [], []
    for index, layer in enumerate(weights.layers):
        scope = graph.within(f"layer{index}")
        attended, key, value = _attention(
            scope.within("attention"),
            step,
            _rms_norm(scope.within("attention_norm"), x, function.config),
            layer,
            (inputs[f"k_{index}"], inputs[f"v_{index}"]),
        )
        x = scope("add", "attention_residual", x=x, y=attended)
        normed = _rms_norm(scope.within("mlp_norm"), x, function.config)
        x = scope("add", "mlp_residual", x=x, y=_mlp(scope.within("mlp"), normed, layer))
        keys.append(key)
        values.append(value)
    outputs = [
        graph("concat", "k_new", values=keys, axis=0),
        graph("concat", "v_new", values=values, axis=0),
    ]
    x = _rms_norm(graph.within("final_norm"), x, function.config)
    for index, part in enumerate(weights.head):
        outputs += _head(graph, x, index, part, function.rows)
    return outputs


def _prepare(scope: Scope, function: DrafterFunction, inputs: Mapping[str, Var]) -> _Step:
    """Fold the minus sign of the rotation into sin; give each query head of a group its mask row.

    The queries of a group are rows of one matrix, so their masks are `group_size` copies one below
    the other; made once for all layers, it saves them a reshape each way.
    """
    half = function.config.head_dim // 2
    sign = np.ones((1, 1, 2 * half, 1), np.float16)
    sign[:, :, :half] = -1
    group = function.config.group_size

    def per_query(name: str) -> Var:
        mask = inputs[name]
        return mask if group == 1 else scope("concat", name, values=[mask] * group, axis=2)

    return _Step(
        function=function,
        cos=inputs["cos"],
        signed_sin=scope("mul", "signed_sin", x=inputs["sin"], y=scope.weight("sign", sign)),
        mask=per_query("mask"),
        mask_new=per_query("mask_new"),
    )


def _rms_norm(scope: Scope, x: Var, config: ModelConfig) -> Var:
    """x / sqrt(mean(x^2) + eps) over channels of an unscaled x, as a layer norm of [x, -x].

    That vector has mean 0 and variance mean(x^2), so eps keeps its meaning; mean(x^2) itself would
    overflow fp16 for |x| > 255 (ANEMLL; facts of the engine: its layer norm accumulates in fp32).
    MIL stores eps in fp16: 2.5e-6 (1e-5 for the unscaled x) becomes 2.503e-6.
    """
    negative = scope("mul", "negative", x=x, y=np.float16(-1))
    both = scope("concat", "both", values=[x, negative], axis=1)
    eps = np.float16(config.rms_norm_eps * RESIDUAL_SCALE**2)
    normed = scope("layer_norm", "layer_norm", x=both, axes=(1,), epsilon=eps)
    size = (1, config.hidden_size, 1, x.shape[3])
    return scope("slice_by_size", "first_half", x=normed, begin=(0, 0, 0, 0), size=size)


def _rope(scope: Scope, x: Var, step: _Step) -> Var:
    """x (1, heads, hd, T) rotated: x * cos + swapped halves * (-sin, sin)."""
    low, high = scope("split", "halves", x=x, num_splits=2, axis=2)
    swapped = scope("concat", "swapped", values=[high, low], axis=2)
    straight = scope("mul", "straight", x=x, y=step.cos)
    crossed = scope("mul", "crossed", x=swapped, y=step.signed_sin)
    return scope("add", "rotated", x=straight, y=crossed)


def _heads(scope: Scope, x: Var, heads: int) -> Var:
    """x (1, heads * hd, 1, T) as (1, heads, hd, T)."""
    rows = x.shape[3]
    return scope("reshape", "heads", x=x, shape=(1, heads, x.shape[1] // heads, rows))


def _attention(
    scope: Scope, step: _Step, x: Var, weights: LayerWeights, cache: tuple[Var, Var]
) -> tuple[Var, Var, Var]:
    """Attention over the cache and this step's rows; x (1, D, 1, T).

    Returns the output (1, D, 1, T) and the new keys (after RoPE) and values, (1, KV, T, hd).
    """
    config, rows = step.function.config, step.function.rows
    to_rows = (0, 1, 3, 2)
    query = _heads(scope.within("query"), scope.linear("query", x, weights.query), config.num_heads)
    query = scope(
        "transpose", "query_rows", x=_rope(scope.within("query"), query, step), perm=to_rows
    )
    grouped = (1, config.num_kv_heads, config.group_size * rows, config.head_dim)
    query = scope("reshape", "query_groups", x=query, shape=grouped)
    key = _heads(scope.within("key"), scope.linear("key", x, weights.key), config.num_kv_heads)
    key = scope("transpose", "key_rows", x=_rope(scope.within("key"), key, step), perm=to_rows)
    value = scope.linear("value", x, weights.value)
    value = _heads(scope.within("value"), value, config.num_kv_heads)
    value = scope("transpose", "value_rows", x=value, perm=to_rows)

    new = (key, value)
    if rows > 1:
        new = (
            _finite(scope.within("key"), key),
            _finite(scope.within("value"), value),
        )
    mixed = _softmax_mix(scope, query, cache, new, (step.mask, step.mask_new))
    split = (1, config.num_heads, rows, config.head_dim)
    mixed = scope("reshape", "mixed_heads", x=mixed, shape=split)
    mixed = scope("transpose", "mixed_columns", x=mixed, perm=to_rows)
    channels = (1, config.num_heads * config.head_dim, 1, rows)
    mixed = scope("reshape", "mixed_channels", x=mixed, shape=channels)
    return scope.linear("output", mixed, weights.output), key, value


def _finite(scope: Scope, x: Var) -> Var:
    """x with 0 in place of NaN and infinity (comparisons with NaN are false).

    abs, less_equal and select run on the engine of M1 to M5 (ANEForge op-catalog).
    """
    size = scope("abs", "size", x=x)
    fits = scope("less_equal", "fits", x=size, y=np.float16(FP16_MAX))
    return scope("select", "finite", cond=fits, a=x, b=np.float16(0))


def _softmax_mix(
    scope: Scope, query: Var, cache: tuple[Var, Var], new: tuple[Var, Var], masks: tuple[Var, Var]
) -> Var:
    """One softmax over slots and new rows without joining them; query (1, KV, G*T, hd).

    Scores are two products with one common maximum and one common sum, so that a cache input is
    read by its products only (for Qwen3-0.6B at S = 2048 a concat would move four times as much).
    """
    parts = (scope.within("cache"), scope.within("new"))
    scores = [
        part("add", "scores", x=part("matmul", "dots", x=query, y=keys, transpose_y=True), y=mask)
        for part, (keys, _), mask in zip(parts, (cache, new), masks, strict=True)
    ]
    maxima = [
        part("reduce_max", "maximum", x=score, axes=(3,), keep_dims=True)
        for part, score in zip(parts, scores, strict=True)
    ]
    maximum = scope("maximum", "maximum", x=maxima[0], y=maxima[1])
    weights = [
        part("exp", "exp", x=part("sub", "shifted", x=score, y=maximum))
        for part, score in zip(parts, scores, strict=True)
    ]
    sums = [
        part("reduce_sum", "sum", x=weight, axes=(3,), keep_dims=True)
        for part, weight in zip(parts, weights, strict=True)
    ]
    total = scope("add", "sum", x=sums[0], y=sums[1])
    mixed = [
        part("matmul", "mixed", x=part("real_div", "weights", x=weight, y=total), y=values)
        for part, weight, (_, values) in zip(parts, weights, (cache, new), strict=True)
    ]
    return scope("add", "mixed", x=mixed[0], y=mixed[1])


def _mlp(scope: Scope, x: Var, weights: LayerWeights) -> Var:
    """down(silu(gate(x)) * up(x)), all (1, D, 1, T)."""
    gate = scope("silu", "silu", x=scope.linear("gate", x, weights.gate))
    product = scope("mul", "gated", x=gate, y=scope.linear("up", x, weights.up))
    return scope.linear("down", product, weights.down)


def _head(graph: Scope, x: Var, index: int, part: HeadPart, rows: int) -> list[Var]:
    """Logits of one part of the vocabulary, and maximum and sum of exp of each 128 of them."""
    logits = graph.linear(f"logits_{index}", x, part.weight, part.bias)
    scope = graph.within(f"chunks_{index}")
    shape = (1, len(part.weight) // CHUNK_ROWS, CHUNK_ROWS, rows)
    chunks = scope("reshape", "rows", x=logits, shape=shape)
    maximum = graph("reduce_max", f"chunk_max_{index}", x=chunks, axes=(2,), keep_dims=True)
    weights = scope("exp", "exp", x=scope("sub", "shifted", x=chunks, y=maximum))
    return [
        logits,
        maximum,
        graph("reduce_sum", f"chunk_sum_{index}", x=weights, axes=(2,), keep_dims=True),
    ]
