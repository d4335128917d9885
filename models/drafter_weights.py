"""The drafter's matrices as its package stores them: folded, rounded to fp16, head in parts.

The gain of each RMSNorm is folded into the columns of the matrices that read it, the query scale
1/sqrt(head_dim) into the query matrix, RESIDUAL_SCALE into the matrices that write the residual
stream; the graph norms without a gain and scales nothing but its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ondevice.errors import UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.mil import ANE_MAX_AXIS, FP16_MAX, MASKED, Half

Single = npt.NDArray[np.float32]
Tensors = Callable[[str], Single]

RESIDUAL_SCALE = 0.5
"""Factor on the residual stream; a norm's output does not change when its eps is scaled with it.

Layer 11 of SmolLM2 adds 24,900 to one channel of the first token (27,200 the largest of 400 random
first tokens); 32,752 is where a product becomes infinite on the engine. A power of two rounds
nothing; below 1/2 the fp16 storage of eps would (1e-5 / 16: off by 5 %).
"""

CHUNK_ROWS = 128
"""Consecutive logit rows that share one `chunk_max` and one `chunk_sum`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices of one decoder layer, each (out, in), fp16, folded."""

    query: Half
    key: Half
    value: Half
    output: Half
    gate: Half
    up: Half
    down: Half


MATRICES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Fields of LayerWeights and their names in a Hugging Face llama layer."""


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Rows of the output matrix, (rows, D); `bias` (rows,) is MASKED on padding rows, else None."""

    weight: Half
    bias: Half | None


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """All that weight.bin holds."""

    layers: tuple[LayerWeights, ...]
    head: tuple[HeadPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases."""
        arrays = [getattr(layer, field) for layer in self.layers for field in MATRICES]
        for part in self.head:
            arrays += [part.weight] if part.bias is None else [part.weight, part.bias]
        return sum(array.nbytes for array in arrays)


def head_partition(vocab_size: int) -> list[int]:
    """Rows of each logits output: multiples of 128, at most 16,384, as equal as possible.

    The vocabulary is padded to a multiple of 128. A padding row has weight 0 and bias -1e4: its
    logit is -1e4, which is never a maximum beside a real row, and exp(-1e4 - maximum) is 0 in fp16
    and in fp32, so that the chunk sums are those of the real rows alone.
    """
    chunks = -(-vocab_size // CHUNK_ROWS)
    parts = -(-chunks * CHUNK_ROWS // ANE_MAX_AXIS)
    small, larger = divmod(chunks, parts)
    return [CHUNK_ROWS * (small + (index < larger)) for index in range(parts)]


def folded(tensors: Tensors, config: ModelConfig, layers: Sequence[int]) -> DrafterWeights:
    """The stored weights of a drafter made of `layers` of a llama-family checkpoint.

    `tensors` maps a Hugging Face name to fp32 values of `config`'s checkpoint. Raises
    UnsupportedModel when a folded weight does not fit fp16.
    """
    name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    head = tensors(f"{name}.weight") * tensors("model.norm.weight")
    return DrafterWeights(
        layers=tuple(_folded_layer(tensors, config, index) for index in layers),
        head=_head_parts(_half(head, f"{name}.weight")),
    )


def unfolded(weights: DrafterWeights, config: ModelConfig) -> dict[str, Single]:
    """The stored weights by Hugging Face name, as a llama with unit gains would hold them.

    Query and residual scale are taken out again. `lm_head.weight` is the stored head without
    padding rows, so the model is untied whatever `config` says; the embedding is not stored.
    """
    found = {
        "model.norm.weight": np.ones(config.hidden_size, np.float32),
        "lm_head.weight": np.concatenate([part.weight for part in weights.head])[
            : config.vocab_size
        ].astype(np.float32),
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        matrices = {name: getattr(layer, field) for field, name in MATRICES.items()}
        found |= {
            f"{prefix}.{name}.weight": half.astype(np.float32) for name, half in matrices.items()
        }
        found[f"{prefix}.self_attn.q_proj.weight"] *= np.float32(config.head_dim**0.5)
        for writer in ("self_attn.o_proj", "mlp.down_proj"):
            found[f"{prefix}.{writer}.weight"] /= np.float32(RESIDUAL_SCALE)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = np.ones(config.hidden_size, np.float32)
    return found


def _folded_layer(tensors: Tensors, config: ModelConfig, index: int) -> LayerWeights:
    before_attention = tensors(f"model.layers.{index}.input_layernorm.weight")
    before_mlp = tensors(f"model.layers.{index}.post_attention_layernorm.weight")
    scale = np.float32(config.head_dim**-0.5)

    def matrix(field: str, gain: Single | float) -> Half:
        name = f"model.layers.{index}.{MATRICES[field]}.weight"
        return _half(tensors(name) * gain, name)

    return LayerWeights(
        query=matrix("query", before_attention * scale),
        key=matrix("key", before_attention),
        value=matrix("value", before_attention),
        output=matrix("output", RESIDUAL_SCALE),
        gate=matrix("gate", before_mlp),
        up=matrix("up", before_mlp),
        down=matrix("down", RESIDUAL_SCALE),
    )


def _half(values: Single, name: str) -> Half:
    largest = float(np.abs(values).max())
    if not largest <= FP16_MAX:
        raise UnsupportedModel(
            f"{name} with its norm gain reaches {largest:g}, fp16 holds at most {FP16_MAX:g}; "
            "this model cannot be a Neural Engine drafter"
        )
    return values.astype(np.float16)


def _head_parts(head: Half) -> tuple[HeadPart, ...]:
    parts = []
    first = 0
    for rows in head_partition(len(head)):
        weight = head[first : first + rows]
        first += rows
        padding = rows - len(weight)
        bias = None
        if padding:
            weight = np.pad(weight, ((0, padding), (0, 0)))
            bias = np.zeros(rows, np.float16)
            bias[-padding:] = MASKED
        parts.append(HeadPart(weight, bias))
    return tuple(parts)
