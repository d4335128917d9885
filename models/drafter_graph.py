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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.models.config import ModelConfig
from ondevice.models.drafter_layers import decoder_layer, rms_norm, stored_epsilon, views
from ondevice.models.drafter_weights import (
    CHUNK_ROWS,
    DrafterWeights,
    HeadPart,
    LayerWeights,
    Single,
    head_partition,
    unfolded_ends,
    unfolded_layer,
    vector_names,
)
from ondevice.models.family import MATRICES
from ondevice.models.mil import FunctionSource, Scope, Var
from ondevice.models.packed import Half

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

    @property
    def has_local_layers(self) -> bool:
        """Whether any layer sees a window only."""


def input_shapes(sizes: DrafterSizes, rows: int, context: int) -> Shapes:
    """Names and shapes of a function's inputs, all fp16.

    x: embeddings; cos, sin: `ondevice.models.rope.cos_sin`; mask over the slots and mask_new over
    this step's rows (row, column): 0 where a row sees, MASKED where not; the same four once more,
    `..._local`, where layers see a window only; k_i, v_i: the slots of layer i.
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
    if sizes.has_local_layers:
        shapes |= {f"{name}_local": shapes[name] for name in ("cos", "sin", "mask", "mask_new")}
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


def stored_tensors(
    constant: Callable[[str], npt.NDArray[Any]], config: ModelConfig
) -> Iterator[tuple[str, Single]]:
    """The weights of a package by canonical name (`drafter_weights.unfolded`), layer by layer.

    `constant(name)` is the value of a weight by the name that the graph gave it; raises what that
    raises.
    """

    def matrix(name: str) -> Half:
        return constant(name)[:, :, 0, 0].astype(np.float16)

    # The head first, which is the largest: who keeps them in 16 bits has nothing else by then.
    parts = range(len(head_partition(config.vocab_size)))
    yield from unfolded_ends([matrix(f"logits_{part}_weight") for part in parts], config).items()
    for index in range(config.num_layers):
        names = {name: f"layer{index}_{_constant_name(name)}" for name in MATRICES}
        vectors = {
            name: constant(f"layer{index}_{_constant_name(name)}").reshape(-1).astype(np.float16)
            for name in vector_names(config)
        }
        layer = LayerWeights(**{name: matrix(at) for name, at in names.items()}, vectors=vectors)
        yield from unfolded_layer(layer, index, config).items()


def _constant_name(name: str) -> str:
    """Name inside its layer of the constant that holds a matrix or vector of LayerWeights."""
    block = "mlp" if name.removesuffix("_bias") in ("gate", "up", "down") else "attention"
    if name.startswith("after_"):
        return f"{name}_gain"
    if name.endswith("_norm"):
        return f"{block}_{name}_gain"
    return f"{block}_{name}" if name.endswith("_bias") else f"{block}_{name}_weight"


def _decoder(
    function: DrafterFunction, weights: DrafterWeights, inputs: Mapping[str, Var]
) -> list[Var]:
    graph, config, traits = Scope(), function.config, function.config.traits
    seen = views(graph.within("step"), config, inputs)
    scale = np.float16(traits.residual_scale * embedding_scale(config))
    x = graph("mul", "residual", x=inputs["x"], y=scale)
    keys, values = [], []
    for index, layer_weights in enumerate(weights.layers):
        cache = (inputs[f"k_{index}"], inputs[f"v_{index}"])
        view = seen[config.kind(index)]
        scope = graph.within(f"layer{index}")
        x, key, value = decoder_layer(scope, x, config, layer_weights, view, cache)
        keys.append(key)
        values.append(value)
    outputs = [
        graph("concat", "k_new", values=keys, axis=0),
        graph("concat", "v_new", values=values, axis=0),
    ]
    eps = stored_epsilon(config.rms_norm_eps, traits.residual_scale)
    x = rms_norm(graph.within("final_norm"), x, eps)
    for index, part in enumerate(weights.head):
        outputs += _head(graph, x, index, part, function.rows)
    return outputs


def embedding_scale(config: ModelConfig) -> float:
    """What embedding rows are multiplied by: Gemma's sqrt(hidden size), rounded to bfloat16."""
    if not config.traits.scaled_embeddings:
        return 1.0
    bits = np.float32(config.hidden_size**0.5).view(np.uint32)
    rounded = (int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


def _head(graph: Scope, x: Var, index: int, part: HeadPart, rows: int) -> list[Var]:
    """Logits of one part of the vocabulary, and maximum and sum of exp of each 128 of them."""
    logits = graph.linear(f"logits_{index}", x, part.weight, part.bias)
    scope = graph.within(f"chunks_{index}")
    shape = (1, part.weight.shape[0] // CHUNK_ROWS, CHUNK_ROWS, rows)
    chunks = scope("reshape", "rows", x=logits, shape=shape)
    maximum = graph("reduce_max", f"chunk_max_{index}", x=chunks, axes=(2,), keep_dims=True)
    weights = scope("exp", "exp", x=scope("sub", "shifted", x=chunks, y=maximum))
    return [
        logits,
        maximum,
        graph("reduce_sum", f"chunk_sum_{index}", x=weights, axes=(2,), keep_dims=True),
    ]
