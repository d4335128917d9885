"""config.json of a Hugging Face folder -> ModelConfig, or a refusal that names the feature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import LayerKind, ModelConfig
from ondevice.models.family import Family, family_named
from ondevice.models.rope import LinearScaling, Llama3Scaling, RopeScaling

_GEMMA_PATTERN = 6  # every sixth layer is global
_ROPE_TYPES = ("default", "llama3", "linear")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_KINDS: dict[str, LayerKind] = {"full_attention": "global", "sliding_attention": "local"}


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
    partial_rotary_factor: PositiveFloat | None = None

    @property
    def kind(self) -> str:
        """The type, however it is spelled."""
        return self.rope_type or self.type or "default"


class ConfigFields(BaseModel):
    """The parts of a config.json that matter; defaults are those of transformers' Llama."""

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
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_local_base_freq: PositiveFloat | None = None
    partial_rotary_factor: PositiveFloat = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    sliding_window: PositiveInt | None = None
    sliding_window_pattern: PositiveInt | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: PositiveInt = 4
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    eos_token_id: int | list[int] | None = None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; BadCheckpoint when there is none."""
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


def read_model_config(raw: Mapping[str, Any], file: Path) -> ModelConfig:
    """What the config.json `raw` describes; file: where it was read, for messages.

    Raises BadCheckpoint for values that are missing or make no sense, UnsupportedModel for a family
    or a feature that no drafter can have.
    """
    family = family_named(raw.get("model_type"), file)
    return _Reader(family, _fields({**family.defaults, **raw}, file), file).config()


def _fields(raw: Mapping[str, Any], file: Path) -> ConfigFields:
    try:
        return ConfigFields.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadCheckpoint(f"{file}: {where}: {first['msg']}; download the model again") from error


class _Reader:
    """One config.json of a family."""

    def __init__(self, family: Family, fields: ConfigFields, file: Path) -> None:
        self._family, self._fields, self._file = family, fields, file
        self._rope, self._local_rope = self._rope_fields()

    def config(self) -> ModelConfig:
        fields, family = self._fields, self._family
        self._refuse_features()
        kinds = self._kinds()
        local = "local" in kinds
        head_dim = fields.head_dim or fields.hidden_size // fields.num_attention_heads
        return ModelConfig(
            family=family.name,
            vocab_size=fields.vocab_size,
            hidden_size=fields.hidden_size,
            intermediate_size=fields.intermediate_size,
            num_layers=fields.num_hidden_layers,
            num_heads=fields.num_attention_heads,
            num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
            head_dim=head_dim,
            context=fields.max_position_embeddings,
            rms_norm_eps=fields.rms_norm_eps,
            rope_theta=self._rope.rope_theta or fields.rope_theta,
            rope_scaling=self._scaling(),
            tied_embeddings=fields.tie_word_embeddings,
            layer_kinds=kinds,
            window=self._window() if local else None,
            local_rope_theta=self._local_theta() if local else None,
            rotary_dim=self._rotary_dim(head_dim),
            query_scale=None
            if fields.query_pre_attn_scalar is None
            else fields.query_pre_attn_scalar**-0.5,
            biases=family.biases or self._biases(),
        )

    def _rope_fields(self) -> tuple[_RopeFields, _RopeFields | None]:
        """Of global and of local layers; transformers 5 nests them by layer type."""
        raw = self._fields.rope_parameters or self._fields.rope_scaling or {}
        try:
            if "full_attention" in raw or "sliding_attention" in raw:
                parts = [raw.get(name) or {} for name in ("full_attention", "sliding_attention")]
                return _RopeFields.model_validate(parts[0]), _RopeFields.model_validate(parts[1])
            return _RopeFields.model_validate(raw), None
        except ValidationError as error:
            first = error.errors()[0]
            raise BadCheckpoint(
                f"{self._file}: rope_scaling: {first['msg']}; download the model again"
            ) from error

    def _biases(self) -> tuple[str, ...]:
        attention = ("query", "key", "value", "output") if self._fields.attention_bias else ()
        mlp = ("gate", "up", "down") if self._fields.mlp_bias else ()
        return attention + mlp

    def _refuse_features(self) -> None:
        fields, family = self._fields, self._family
        activation = fields.hidden_activation or fields.hidden_act or family.activation
        own_activation = _ACTIVATIONS.get(activation, activation) == family.activation
        may_have_bias = family.mlx_module == "llama" or not (
            (fields.attention_bias and not family.biases) or fields.mlp_bias
        )
        features = {
            f"hidden_act {activation!r}": not own_activation,
            "a bias": not may_have_bias,
            "soft-capping": bool(fields.attn_logit_softcapping or fields.final_logit_softcapping),
            f"rope type {self._rope.kind!r}": self._rope.kind not in _ROPE_TYPES,
            "scaled local RoPE": self._local_rope is not None
            and self._local_rope.kind != "default",
        }
        for feature, present in features.items():
            if present:
                raise UnsupportedModel(
                    f"{self._file}: {feature} is not supported in a {family.name} drafter; "
                    f"supported: its usual form, rope types {', '.join(_ROPE_TYPES)}"
                )

    def _kinds(self) -> tuple[LayerKind, ...]:
        """() when all layers are global; as mlx-lm reads the configuration."""
        fields, count = self._fields, self._fields.num_hidden_layers
        kinds: tuple[LayerKind, ...] = tuple(_rotated_kind(1) for _ in range(count))
        if self._family.mlx_module == "smollm3":
            rotated = fields.no_rope_layers or [
                int((layer + 1) % fields.no_rope_layer_interval != 0) for layer in range(count)
            ]
            kinds = tuple(_rotated_kind(turns) for turns in rotated)
        elif self._family.mlx_module == "gemma3_text":
            pattern = fields.sliding_window_pattern or _GEMMA_PATTERN
            kinds = tuple(_gemma_kind(layer, pattern) for layer in range(count))
            self._check_types(kinds)
        elif self._family.mlx_module == "llama" and fields.sliding_window and fields.layer_types:
            kinds = tuple(_KINDS.get(name, "global") for name in fields.layer_types)
        if len(kinds) != count:
            raise BadCheckpoint(
                f"{self._file}: expected a type for each of {count} layers, got {len(kinds)}; "
                "download the model again"
            )
        return () if set(kinds) == {"global"} else kinds

    def _check_types(self, kinds: tuple[LayerKind, ...]) -> None:
        stated = self._fields.layer_types
        if stated is not None and [_KINDS.get(name) for name in stated] != list(kinds):
            raise UnsupportedModel(
                f"{self._file}: layer_types that are no regular pattern are not supported; mlx-lm "
                "would run other layers than the model has"
            )

    def _window(self) -> int:
        if self._fields.sliding_window is None:
            raise BadCheckpoint(
                f"{self._file}: expected sliding_window beside local layers, got none; "
                "download the model again"
            )
        return self._fields.sliding_window

    def _local_theta(self) -> float:
        nested = None if self._local_rope is None else self._local_rope.rope_theta
        return nested or self._fields.rope_local_base_freq or self._fields.rope_theta

    def _rotary_dim(self, head_dim: int) -> int | None:
        stated = self._rope.partial_rotary_factor
        factor = self._fields.partial_rotary_factor if stated is None else stated
        if factor != 1.0 and self._family.mlx_module != "phi3":
            raise UnsupportedModel(
                f"{self._file}: partial_rotary_factor {factor:g} is not supported in a "
                f"{self._family.name} drafter; supported: rotary embedding over whole heads"
            )
        return None if factor == 1.0 else int(head_dim * factor)

    def _scaling(self) -> RopeScaling | None:
        rope = self._rope
        if rope.kind == "default":
            return None
        factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
        original = rope.original_max_position_embeddings
        if rope.kind == "linear":
            if factor is None:
                raise BadCheckpoint(
                    f"{self._file}: linear rope needs a factor, got none; download the model again"
                )
            return LinearScaling(factor)
        if factor is None or low is None or high is None or original is None or low >= high:
            raise BadCheckpoint(
                f"{self._file}: llama3 rope needs factor, low_freq_factor < high_freq_factor and "
                f"original_max_position_embeddings, got {factor}, {low}, {high}, {original}; "
                "download the model again"
            )
        return Llama3Scaling(factor, low, high, original)


def _gemma_kind(layer: int, pattern: int) -> LayerKind:
    return "local" if (layer + 1) % pattern else "global"


def _rotated_kind(rotated: int) -> LayerKind:
    return "global" if rotated else "unrotated"


def read_eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """generation_config.json's list, which instruct models keep complete, else config.json's."""
    stated: Any = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        stated = read_json(generation).get("eos_token_id", stated)
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    limit = raw.get("vocab_size", 0)
    if not all(isinstance(token, int) and 0 <= token < limit for token in ids):
        raise BadCheckpoint(
            f"{folder}: expected eos_token_id below {limit}, got {stated}; "
            "correct generation_config.json"
        )
    return tuple(dict.fromkeys(ids))
