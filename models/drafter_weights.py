"""The drafter's matrices as its package stores them: folded, rounded to fp16, head in parts.

The gain of an RMSNorm is folded into the columns of the matrices that read it, the query scale into
the query matrix, the family's residual scale into the matrices that write the residual stream; such
a norm has no gain in the graph. Where a norm's output is not read by a matrix (after a sublayer, or
on a head before RoPE) its gain is stored, with those factors in it.

The residual scale keeps sums inside half precision; a norm's output does not change when its eps is
scaled with it. Layer 11 of SmolLM2 adds 24,900 to one channel of the first token (27,200 the
largest of 400 random first tokens); 32,752 is where a product becomes infinite on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ondevice.errors import UnsupportedModel
from ondevice.models.ane import ANE_MAX_AXIS, FP16_MAX, MASKED
from ondevice.models.config import ModelConfig
from ondevice.models.family import MATRICES
from ondevice.models.packed import Half, Matrix, dense

Single = npt.NDArray[np.float32]
Tensors = Callable[[str], Single]

CHUNK_ROWS = 128
"""Consecutive logit rows that share one `chunk_max` and one `chunk_sum`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices of one decoder layer, each (out, in), folded; biases and gains as vectors, fp16.

    vectors: by name, what the family has of QUERY_NORM, KEY_NORM (head_dim,), AFTER_ATTENTION,
    AFTER_MLP (hidden,) and "query_bias", ... (out,).
    """

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    vectors: Mapping[str, Half] = field(default_factory=dict)


QUERY_NORM, KEY_NORM = "query_norm", "key_norm"
AFTER_ATTENTION, AFTER_MLP = "after_attention", "after_mlp"
_HEAD_NORMS = {QUERY_NORM: "self_attn.q_norm", KEY_NORM: "self_attn.k_norm"}


def vector_names(config: ModelConfig) -> list[str]:
    """Keys of `LayerWeights.vectors` in a drafter of this configuration."""
    names = [f"{matrix}_bias" for matrix in MATRICES if matrix in config.biases]
    names += _HEAD_NORMS if config.traits.qk_norm else ()
    return names + [name for name in (AFTER_ATTENTION, AFTER_MLP) if name in config.traits.norms]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Rows of the output matrix, (rows, D); `bias` (rows,) is MASKED on padding rows, else None."""

    weight: Matrix
    bias: Half | None


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """All that weight.bin holds."""

    layers: tuple[LayerWeights, ...]
    head: tuple[HeadPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases."""
        arrays = [getattr(layer, name) for layer in self.layers for name in MATRICES]
        arrays += [vector for layer in self.layers for vector in layer.vectors.values()]
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


Pack = Callable[[Half], Matrix]


def as_half(matrix: Half) -> Matrix:
    """Store the matrix as it is."""
    return matrix


def folded(
    tensors: Tensors,
    config: ModelConfig,
    layers: Sequence[int],
    pack_layer: Pack = as_half,
    pack_head: Pack = as_half,
    on_layer: Callable[[], None] = lambda: None,
) -> DrafterWeights:
    """The stored weights of a drafter made of `layers` of a checkpoint.

    `tensors` maps a canonical name to fp32 values of `config`'s checkpoint. pack_layer, pack_head:
    how a matrix is stored; each is packed as soon as it is folded, so that one is in memory in half
    precision at a time. on_layer: called after each layer. Raises UnsupportedModel when a folded
    weight does not fit fp16.
    """
    folded_layers = []
    for index in layers:
        folded_layers.append(_LayerFolder(tensors, config, index, pack_layer).folded())
        on_layer()
    name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    head = tensors(f"{name}.weight") * _gain(tensors("model.norm.weight"), config)
    return DrafterWeights(
        layers=tuple(folded_layers), head=_head_parts(_half(head, f"{name}.weight"), pack_head)
    )


def _gain(weight: Single, config: ModelConfig) -> Single:
    return weight + np.float32(config.traits.norm_offset)


def rotated_first(rows: npt.NDArray[np.float32], heads: int, rotated: int) -> Single:
    """Rows of a query or key matrix with the rotary pairs of each head in the two halves.

    rows: (heads x head_dim, ...). Dimension i < rotated / 2 of a head is paired with dimension
    i + rotated / 2; here with dimension i + head_dim / 2, and pairs of what is not rotated follow.
    Scores do not change when queries and keys are reordered alike.
    """
    head_dim = len(rows) // heads
    half, passed = rotated // 2, (head_dim - rotated) // 2
    order = np.concatenate(
        [
            np.arange(half),
            rotated + np.arange(passed),
            half + np.arange(half),
            rotated + passed + np.arange(passed),
        ]
    )
    return np.ascontiguousarray(rows.reshape(heads, head_dim, -1)[:, order].reshape(rows.shape))


def as_stored(rows: npt.NDArray[np.float32], heads: int, rotated: int) -> Single:
    """The inverse of `rotated_first`."""
    head_dim = len(rows) // heads
    index = np.arange(len(rows), dtype=np.float32)
    order = rotated_first(index, heads, rotated).astype(np.int64)
    result = np.empty_like(rows)
    result[order] = rows
    assert head_dim * heads == len(rows)
    return result


class _LayerFolder:
    """Reads one layer of a checkpoint and folds it."""

    def __init__(self, tensors: Tensors, config: ModelConfig, index: int, pack: Pack) -> None:
        self._tensors, self._config, self._prefix = tensors, config, f"model.layers.{index}"
        self._pack = pack

    def folded(self) -> LayerWeights:
        config, traits = self._config, self._config.traits
        residual = 1.0 if traits.norms.keys() >= {AFTER_ATTENTION} else traits.residual_scale
        before_attention, before_mlp = (
            self._norm(traits.norms[role]) for role in ("before_attention", "before_mlp")
        )
        scale = np.float32(1 if traits.qk_norm else config.score_scale)
        vectors = {f"{name}_bias": self._bias(name, residual, scale) for name in config.biases}
        if traits.qk_norm:
            vectors |= self._head_norms()
        for role in (AFTER_ATTENTION, AFTER_MLP):
            if role in traits.norms:
                name = traits.norms[role]
                vectors[role] = _half(self._norm(name) * traits.residual_scale, self._name(name))
        return LayerWeights(
            query=self._matrix("query", before_attention * scale),
            key=self._matrix("key", before_attention),
            value=self._matrix("value", before_attention),
            output=self._matrix("output", residual),
            gate=self._matrix("gate", before_mlp),
            up=self._matrix("up", before_mlp),
            down=self._matrix("down", residual),
            vectors=vectors,
        )

    def _name(self, module: str) -> str:
        return f"{self._prefix}.{module}.weight"

    def _norm(self, module: str) -> Single:
        return _gain(self._tensors(self._name(module)), self._config)

    def _matrix(self, field: str, gain: Single | float) -> Matrix:
        name = self._name(MATRICES[field])
        return self._pack(_half(self._in_halves(field, self._tensors(name) * gain), name))

    def _bias(self, field: str, residual: float, scale: np.float32) -> Half:
        name = f"{self._prefix}.{MATRICES[field]}.bias"
        factor = {"query": float(scale), "output": residual, "down": residual}.get(field, 1.0)
        return _half(self._in_halves(field, self._tensors(name) * np.float32(factor)), name)

    def _in_halves(self, field: str, rows: Single) -> Single:
        heads = {"query": self._config.num_heads, "key": self._config.num_kv_heads}
        if field not in heads or self._config.rotary_dim is None:
            return rows
        return rotated_first(rows, heads[field], self._config.rotary_dim)

    def _head_norms(self) -> dict[str, Half]:
        scales = {QUERY_NORM: self._config.score_scale, KEY_NORM: 1.0}
        gains = {}
        for role, module in _HEAD_NORMS.items():
            gain = self._norm(module) * np.float32(scales[role])
            if self._config.rotary_dim is not None:
                gain = rotated_first(gain, 1, self._config.rotary_dim)
            gains[role] = _half(gain, self._name(module))
        return gains


def unfolded(weights: DrafterWeights, config: ModelConfig) -> dict[str, Single]:
    """The stored weights by canonical name, as a model with unit gains would hold them.

    Scales and orders of rows are taken out again. `lm_head.weight` is the stored head without
    padding rows, so the model is untied whatever `config` says; the embedding is not stored.
    """
    found = unfolded_ends([dense(part.weight) for part in weights.head], config)
    for index, layer in enumerate(weights.layers):
        found |= unfolded_layer(layer, index, config)
    return found


def unfolded_ends(head: Sequence[Half], config: ModelConfig) -> dict[str, Single]:
    """As `unfolded`: the final norm and the head, from the weights of its parts."""
    rows = np.concatenate(head, dtype=np.float32, casting="safe")[: config.vocab_size]
    return {"model.norm.weight": _unit(config), "lm_head.weight": rows}


def _unit(config: ModelConfig) -> Single:
    return np.full(config.hidden_size, 1 - config.traits.norm_offset, np.float32)


def unfolded_layer(layer: LayerWeights, index: int, config: ModelConfig) -> dict[str, Single]:
    """As `unfolded`: layer `index`."""
    traits, prefix = config.traits, f"model.layers.{index}"
    found = {
        f"{prefix}.{traits.norms[role]}.weight": _unit(config)
        for role in ("before_attention", "before_mlp")
    }
    factors = _unfolding_factors(config)
    for name, module in MATRICES.items():
        stored = {"weight": dense(getattr(layer, name)), "bias": layer.vectors.get(f"{name}_bias")}
        for leaf, values in stored.items():
            if values is not None:
                rows = _unordered(name, values.astype(np.float32), config)
                found[f"{prefix}.{module}.{leaf}"] = rows * np.float32(factors[name])
    for name, vector in layer.vectors.items():
        if not name.endswith("_bias"):
            found |= _unfolded_gain(prefix, name, vector.astype(np.float32), config)
    return found


def _unfolding_factors(config: ModelConfig) -> dict[str, float]:
    """What each matrix is multiplied by to undo the folding of scales."""
    traits = config.traits
    residual = 1.0 if AFTER_ATTENTION in traits.norms else 1 / traits.residual_scale
    score = 1.0 if traits.qk_norm else 1 / config.score_scale
    factors = dict.fromkeys(MATRICES, 1.0)
    return factors | {"query": score, "output": residual, "down": residual}


def _unordered(name: str, rows: Single, config: ModelConfig) -> Single:
    heads = {"query": config.num_heads, "key": config.num_kv_heads}
    if name not in heads or config.rotary_dim is None:
        return rows
    return as_stored(rows, heads[name], config.rotary_dim)


def _unfolded_gain(prefix: str, name: str, gain: Single, config: ModelConfig) -> dict[str, Single]:
    traits = config.traits
    if name in _HEAD_NORMS:
        module = _HEAD_NORMS[name]
        gain = gain / np.float32(config.score_scale if name == QUERY_NORM else 1)
        if config.rotary_dim is not None:
            gain = as_stored(gain, 1, config.rotary_dim)
    else:
        module = traits.norms[name]
        gain = gain / np.float32(traits.residual_scale)
    return {f"{prefix}.{module}.weight": gain - np.float32(traits.norm_offset)}


def _half(values: Single, name: str) -> Half:
    largest = float(np.abs(values).max())
    if not largest <= FP16_MAX:
        raise UnsupportedModel(
            f"{name} with its norm gain reaches {largest:g}, fp16 holds at most {FP16_MAX:g}; "
            "this model cannot be a Neural Engine drafter"
        )
    return values.astype(np.float16)


def _head_parts(head: Half, pack: Pack) -> tuple[HeadPart, ...]:
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
        parts.append(HeadPart(pack(weight), bias))
    return tuple(parts)
