"""Reader of Hugging Face model folders: config.json, safetensors (sharded or not), tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from ondevice.converters.checkpoint import SUPPORTED_FAMILIES, Checkpoint
from ondevice.converters.tokenizer import tokenizer_from_folder
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import Llama3Scaling, ModelConfig

_FLOAT_DTYPES = ("F32", "F16", "BF16")


class _RopeFields(BaseModel):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before) of a config.json."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    partial_rotary_factor: float = 1.0


class _ConfigFields(BaseModel):
    """The parts of a Llama's config.json that matter; defaults are those of transformers."""

    model_config = ConfigDict(extra="ignore")

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    partial_rotary_factor: float = 1.0
    quantization: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None


def open_folder(folder: Path) -> Checkpoint:
    """Open the model in `folder`; raises as `open_checkpoint` does."""
    config_file = folder / "config.json"
    raw = _read_json(config_file)
    family = raw.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModel(
            f"{config_file}: model family {family!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        )
    try:
        fields = _ConfigFields.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadCheckpoint(
            f"{config_file}: {where}: {first['msg']}; download the model again"
        ) from error
    _refuse_features(fields, config_file)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise BadCheckpoint(
            f"{folder}: expected tokenizer.json, got no such file; download the whole repository"
        )
    store = SafetensorsStore(folder)
    return Checkpoint(
        config=_model_config(fields, config_file),
        eos_token_ids=_eos_token_ids(fields, folder),
        label=str(folder),
        store=store,
        files=(config_file, *store.files, tokenizer_file),
        load_tokenizer=partial(tokenizer_from_folder, folder),
    )


class SafetensorsStore:
    """The safetensors files of a folder, one or sharded; headers are checked at once."""

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.files = _weight_files(folder)
        for file in self.files:
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    part = opened.get_slice(name)
                    if part.get_dtype() not in _FLOAT_DTYPES:
                        raise UnsupportedModel(
                            f"{file}: tensor {name} is of type {part.get_dtype()}, supported: "
                            f"{', '.join(_FLOAT_DTYPES)}; use the unquantised model"
                        )
                    self._where[name] = file
                    self._shapes[name] = tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(
                f"{file}: expected a whole safetensors file, got {file.stat().st_size} bytes that "
                f"do not read as one ({error}); download it again"
            ) from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the files, from their headers."""
        return self._shapes

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name` as float32: one read of its bytes, nothing else of the file."""
        import mlx.core as mx

        # safetensors' numpy side knows no bfloat16; mx.load is lazy, so only this one is read.
        loaded = mx.load(str(self._where[name]))
        assert isinstance(loaded, dict)
        return np.array(loaded[name].astype(mx.float32))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise BadCheckpoint(
                f"{folder}: expected model.safetensors or model.safetensors.index.json, got "
                "neither; download the safetensors version of the model"
            )
        return [single]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: expected a weight_map, got none; download it again")
    files = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise BadCheckpoint(
                f"{folder}: expected shard {file.name} of {len(files)} in {index.name}, got no "
                "such file; download it again"
            )
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(
            f"{file.parent}: expected {file.name}, got no such file; "
            "give a folder in Hugging Face format"
        ) from error
    except (OSError, ValueError) as error:
        raise BadCheckpoint(
            f"{file}: expected JSON, got something else ({error}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{file}: expected a JSON object, got a {type(content).__name__}")
    return content


def _refuse_features(fields: _ConfigFields, config_file: Path) -> None:
    rope = fields.rope_parameters or fields.rope_scaling or _RopeFields()
    rotated = {fields.partial_rotary_factor, rope.partial_rotary_factor}
    features = {
        "attention_bias": fields.attention_bias,
        "mlp_bias": fields.mlp_bias,
        f"hidden_act {fields.hidden_act!r}": fields.hidden_act != "silu",
        "sliding_window": fields.sliding_window is not None,
        "quantised weights": fields.quantization is not None
        or fields.quantization_config is not None,
        "partial_rotary_factor": rotated != {1.0},
        f"rope type {_rope_type(rope)!r}": _rope_type(rope) not in ("default", "llama3"),
    }
    for feature, present in features.items():
        if present:
            raise UnsupportedModel(
                f"{config_file}: {feature} is not supported; supported: plain Llama with rope "
                "type default or llama3, no biases, weights in F32, F16 or BF16"
            )


def _rope_type(rope: _RopeFields) -> str:
    return rope.rope_type or rope.type or "default"


def _model_config(fields: _ConfigFields, config_file: Path) -> ModelConfig:
    rope = fields.rope_parameters or fields.rope_scaling or _RopeFields()
    return ModelConfig(
        family="llama",
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_dim or fields.hidden_size // fields.num_attention_heads,
        context=fields.max_position_embeddings,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope.rope_theta or fields.rope_theta,
        rope_scaling=_llama3_scaling(rope, config_file),
        tied_embeddings=fields.tie_word_embeddings,
    )


def _llama3_scaling(rope: _RopeFields, config_file: Path) -> Llama3Scaling | None:
    if _rope_type(rope) != "llama3":
        return None
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    if factor is None or low is None or high is None or original is None or low >= high:
        raise BadCheckpoint(
            f"{config_file}: llama3 rope needs factor, low_freq_factor < high_freq_factor and "
            f"original_max_position_embeddings, got {factor}, {low}, {high}, {original}; "
            "download the model again"
        )
    return Llama3Scaling(factor, low, high, original)


def _eos_token_ids(fields: _ConfigFields, folder: Path) -> tuple[int, ...]:
    """generation_config.json's list, which instruct models keep complete, else config.json's."""
    stated: Any = fields.eos_token_id
    generation = folder / "generation_config.json"
    if generation.is_file():
        stated = _read_json(generation).get("eos_token_id", stated)
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(token, int) and 0 <= token < fields.vocab_size for token in ids):
        raise BadCheckpoint(
            f"{folder}: expected eos_token_id below {fields.vocab_size}, got {stated}; "
            "correct generation_config.json"
        )
    return tuple(dict.fromkeys(ids))
