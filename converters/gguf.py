"""Reader of GGUF files of the Llama and Qwen architectures, through `mx.load`.

`mx.load` neither names the type of a tensor nor refuses K-quants (it turns some into float16), so
the header is read here first: types are refused by name and sizes checked before MLX opens it. It
rounds bfloat16 to float16, so tensors of that type are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.gguf_header import Shape, TensorPlace, read_header
from ondevice.converters.tokenizer import tokenizer_from_gguf
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.family import FAMILIES
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
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_BLOCK = 32  # weights that share a scale in Q4_0, Q4_1 and Q8_0


def open_gguf(file: Path) -> Checkpoint:
    """Open the GGUF `file`; raises as `open_checkpoint` does."""
    header = read_header(file)
    store = GgufStore(file, header)
    metadata = store.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file}: architecture {architecture!r} is not supported in a GGUF; supported: "
            f"{', '.join(_ARCHITECTURES)}; convert from the Hugging Face folder instead"
        )
    config = _ConfigReader(store, str(architecture), file).config()
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

    def __init__(self, file: Path, header: dict[str, TensorPlace]) -> None:
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
            name: self._header[original].shape
            for name, original in self._names.items()
            if original != _ROPE_FACTORS
        }

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` in float32: scale x integer + offset of each block of 32."""
        original = self._names[name]
        tensor = self.dequantised(original)
        architecture = str(self.metadata["general.architecture"])
        if not FAMILIES[architecture].gguf_pairs:
            return tensor
        heads = self.metadata[f"{architecture}.attention.head_count"]
        if original.endswith("attn_q.weight"):
            return _halves_layout(tensor, heads)
        if original.endswith("attn_k.weight"):
            key = f"{architecture}.attention.head_count_kv"
            return _halves_layout(tensor, self.metadata.get(key, heads))
        return tensor

    def dequantised(self, original: str) -> npt.NDArray[np.float32]:
        """The tensor of GGUF name `original`, in llama.cpp's own row order."""
        import mlx.core as mx

        place = self._header[original]
        if place.type_name == "BF16":
            words = np.memmap(self._file, "<u2", "r", place.start, place.shape)
            return (words.astype(np.uint32) << 16).view(np.float32)
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


@dataclass(frozen=True, slots=True)
class _ConfigReader:
    """The configuration that metadata of an architecture state."""

    store: GgufStore
    architecture: str
    file: Path

    def config(self) -> ModelConfig:
        shapes, head_dim = self.store.shapes(), self._head_dim()
        _refuse_features(self.store.metadata, self.architecture, self.file)
        if "model.embed_tokens.weight" not in shapes:
            raise BadCheckpoint(f"{self.file}: expected tensor token_embd.weight, got none")
        heads = self._need("attention.head_count")
        config = ModelConfig(
            family=self.architecture,
            vocab_size=shapes["model.embed_tokens.weight"][0],
            hidden_size=self._need("embedding_length"),
            intermediate_size=self._need("feed_forward_length"),
            num_layers=self._need("block_count"),
            num_heads=heads,
            num_kv_heads=self._get("attention.head_count_kv", heads),
            head_dim=head_dim,
            context=self._need("context_length"),
            rms_norm_eps=_shortest(self._need("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(self._get("rope.freq_base", 10000.0)),
            rope_scaling=None,
            tied_embeddings="lm_head.weight" not in shapes,
            biases=FAMILIES[self.architecture].biases,
        )
        return _with_rope_factors(config, self.store, self.file)

    def _head_dim(self) -> int:
        whole = self._need("embedding_length") // self._need("attention.head_count")
        head_dim: int = self._get("attention.key_length", whole)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise UnsupportedModel(
                    f"{self.file}: {self.architecture}.{key} {self._need(key)} differs from the "
                    f"head size {head_dim}; supported: rotary embedding over whole heads of one "
                    "size"
                )
        return head_dim

    def _get(self, key: str, default: Any) -> Any:
        return self.store.metadata.get(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        found = self._get(key, None)
        if found is None:
            raise BadCheckpoint(
                f"{self.file}: expected metadata {self.architecture}.{key}, got none; download "
                "the file again"
            )
        return found


def _shortest(value: float) -> float:
    """The decimal number that was rounded to this float32 (1e-05, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _refuse_features(metadata: Mapping[str, Any], architecture: str, file: Path) -> None:
    def stated(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    features = {
        "experts": stated("expert_count", 0) != 0,
        "sliding_window": stated("attention.sliding_window", 0) != 0,
        "rope scaling type": stated("rope.scaling.type", "none") != "none",
        "heads that differ by layer": any(
            isinstance(stated(key, None), np.ndarray)
            for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
        ),
    }
    for feature, present in features.items():
        if present:
            raise UnsupportedModel(
                f"{file}: {feature} is not supported; supported: plain Llama and Qwen with rope "
                "type default or llama3"
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
