"""Reader of GGUF files of the llama architecture, through `mx.load`.

`mx.load` neither names the type of a tensor nor refuses K-quants (it turns some into float16), so
the header is read here first: types are refused by name and sizes checked before MLX opens it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.gguf_header import Shape, read_header
from ondevice.converters.tokenizer import tokenizer_from_gguf
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.rope import Llama3Scaling, inverse_frequencies

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_KV_HEADS_KEY = "llama.attention.head_count_kv"
_BLOCK = 32  # weights that share a scale in Q4_0, Q4_1 and Q8_0


def open_gguf(file: Path) -> Checkpoint:
    """Open the GGUF `file`; raises as `open_checkpoint` does."""
    header = read_header(file)
    store = GgufStore(file, header)
    metadata = store.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama",):
        raise UnsupportedModel(
            f"{file}: architecture {architecture!r} is not supported; supported: llama"
        )
    config = _model_config(store, file)
    return Checkpoint(
        config=config,
        eos_token_ids=_eos_token_ids(metadata),
        label=str(file),
        store=store,
        files=(file,),
        load_tokenizer=partial(tokenizer_from_gguf, metadata, file.name),
    )


class GgufStore:
    """The tensors of one GGUF file under canonical names, dequantised when they are read."""

    def __init__(self, file: Path, header: dict[str, Shape]) -> None:
        self._file = file
        self._names = {canonical_name(name): name for name in header}
        self._header = header

    @cached_property
    def _loaded(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        import mlx.core as mx

        try:
            loaded: Any = mx.load(str(self._file), return_metadata=True)
        except (RuntimeError, ValueError) as error:
            raise BadCheckpoint(
                f"{self._file}: expected a whole GGUF file, got one that MLX cannot read "
                f"({error}); download it again"
            ) from error
        arrays, metadata = loaded
        # numpy views: an MLX array may only be used by the thread that made it.
        return (
            {name: np.asarray(array) for name, array in arrays.items()},
            {key: _plain(value) for key, value in metadata.items()},
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata as int, float, bool, str, list or numpy array."""
        return self._loaded[1]

    @property
    def has_rope_factors(self) -> bool:
        """Whether the file scales its rotary frequencies by a table."""
        return _ROPE_FACTORS in self._header

    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor, outputs first, as the header states it."""
        return {
            name: self._header[original]
            for name, original in self._names.items()
            if original != _ROPE_FACTORS
        }

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` in float32: scale x integer + offset of each block of 32."""
        original = self._names[name]
        tensor = self.dequantised(original)
        heads = self.metadata["llama.attention.head_count"]
        if original.endswith("attn_q.weight"):
            return _halves_layout(tensor, heads)
        if original.endswith("attn_k.weight"):
            return _halves_layout(tensor, self.metadata.get(_KV_HEADS_KEY, heads))
        return tensor

    def dequantised(self, original: str) -> npt.NDArray[np.float32]:
        """The tensor of GGUF name `original`, in llama.cpp's own row order."""
        import mlx.core as mx

        arrays = self._loaded[0]
        stem = original.removesuffix(".weight")
        weight = arrays[original]
        if f"{stem}.scales" not in arrays:
            return np.array(weight, dtype=np.float32)
        # float32 scales: in float16, MLX would round every weight once more.
        scales = mx.array(arrays[f"{stem}.scales"].astype(np.float32))
        biases = mx.array(arrays[f"{stem}.biases"].astype(np.float32))
        bits = weight.shape[-1] * 32 // (scales.shape[-1] * _BLOCK)
        return np.array(
            mx.dequantize(mx.array(weight), scales, biases, group_size=_BLOCK, bits=bits)
        )


def canonical_name(name: str) -> str:
    """Hugging Face's name of the GGUF tensor `name`; names without one are kept."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    index, _, leaf = rest.partition(".")
    if prefix == "blk" and leaf in _LAYER_NAMES:
        return f"model.layers.{index}.{_LAYER_NAMES[leaf]}"
    return name


def _halves_layout(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, where the two rows of a rotary pair are neighbours.

    rows: (heads x head_dim, hidden). Here row i of a head is paired with row i + head_dim / 2.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _plain(value: Any) -> Any:
    if isinstance(value, (str, list)):
        return value
    array = np.array(value)
    return array.item() if array.ndim == 0 else array


def _model_config(store: GgufStore, file: Path) -> ModelConfig:
    metadata, shapes = store.metadata, store.shapes()

    def need(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise BadCheckpoint(
                f"{file}: expected metadata llama.{key}, got none; download the file again"
            )
        return metadata[f"llama.{key}"]

    _refuse_features(metadata, file)
    heads = need("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", need("embedding_length") // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{file}: {key} {metadata[key]} differs from the head size {head_dim}; "
                "supported: rotary embedding over whole heads of one size"
            )
    if "model.embed_tokens.weight" not in shapes:
        raise BadCheckpoint(f"{file}: expected tensor token_embd.weight, got none")
    config = ModelConfig(
        family="llama",
        vocab_size=shapes["model.embed_tokens.weight"][0],
        hidden_size=need("embedding_length"),
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get(_KV_HEADS_KEY, heads),
        head_dim=head_dim,
        context=need("context_length"),
        rms_norm_eps=_shortest(need("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=None,
        tied_embeddings="lm_head.weight" not in shapes,
    )
    return _with_rope_factors(config, store, file)


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32 (1e-05, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _refuse_features(metadata: Mapping[str, Any], file: Path) -> None:
    features = {
        "experts": metadata.get("llama.expert_count", 0) != 0,
        "sliding_window": metadata.get("llama.attention.sliding_window", 0) != 0,
        "rope scaling type": metadata.get("llama.rope.scaling.type", "none") != "none",
        "heads that differ by layer": any(
            isinstance(metadata.get(f"llama.{key}"), np.ndarray)
            for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
        ),
    }
    for feature, present in features.items():
        if present:
            raise UnsupportedModel(
                f"{file}: {feature} is not supported; supported: plain Llama with rope type "
                "default or llama3"
            )


def _with_rope_factors(config: ModelConfig, store: GgufStore, file: Path) -> ModelConfig:
    """Recover llama3 scaling from the table of divisors that llama.cpp stores in its place.

    Only the largest divisor is free: Llama 3 models share low 1, high 4 and 8,192 positions. The
    table they give must be the one in the file.
    """
    if not store.has_rope_factors:
        return config
    factors = store.dequantised(_ROPE_FACTORS).astype(np.float64)
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    scaled = replace(config, rope_scaling=scaling)
    expected = inverse_frequencies(config) / inverse_frequencies(scaled)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModel(
            f"{file}: {_ROPE_FACTORS} is not Llama 3's scaling (low 1, high 4, 8192 positions); "
            "convert from the Hugging Face folder, which states it"
        )
    return scaled


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
