"""A ModelConfig in mlx-lm's hands: its config.json, and its own class with weights of ours.

mlx-lm is what a verifier runs and what a drafter is compared with, so its reading of a family
decides (it runs Mistral and Qwen without their sliding windows, for instance).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ondevice.models.config import ModelConfig
from ondevice.models.family import MATRICES
from ondevice.models.rope import LinearScaling, RopeScaling

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

Single = npt.NDArray[np.float32]

_GEMMA_PATTERN = 6


def mlx_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of the model: the keys that both mlx-lm and transformers read.

    Nothing is left to a default: for `tie_word_embeddings` the two disagree on it.
    """
    traits = config.traits
    content: dict[str, Any] = {
        "architectures": [traits.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": "query" in config.biases,
        "mlp_bias": "gate" in config.biases,
    }
    if traits.activation == "gelu_tanh":
        del content["hidden_act"]
        content["hidden_activation"] = "gelu_pytorch_tanh"
    if config.query_scale is not None:
        content["query_pre_attn_scalar"] = round(config.query_scale**-2, 6)
    if config.rotary_dim is not None:
        content["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    return content | _layer_keys(config)


def _layer_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys that say what each layer does."""
    kinds = [config.kind(layer) for layer in range(config.num_layers)]
    if config.family == "smollm3":
        return {"no_rope_layers": [int(kind != "unrotated") for kind in kinds]}
    if config.window is None:
        return {}
    keys: dict[str, Any] = {"sliding_window": config.window}
    if config.family == "gemma3_text":
        keys["sliding_window_pattern"] = _pattern(config)
        keys["rope_local_base_freq"] = config.local_rope_theta
    else:
        names = {"global": "full_attention", "local": "sliding_attention"}
        keys["layer_types"] = [names[kind] for kind in kinds]
    return keys


def _pattern(config: ModelConfig) -> int:
    """Every n-th layer is global: n of Gemma's layers."""
    kinds = [config.kind(layer) for layer in range(config.num_layers)]
    return kinds.index("global") + 1 if "global" in kinds else _GEMMA_PATTERN


def rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json as mlx-lm and transformers read it; None for plain RoPE."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def mlx_model(
    config: ModelConfig,
    tensors: Mapping[str, Single] | Iterable[tuple[str, Single]],
    narrow: bool = False,
) -> Any:
    """mlx-lm's own model class with these tensors, by canonical name; it computes in float32.

    narrow: hold a matrix in 16 bits where they have its values; mlx widens it in each product.
    Where mlx-lm derives what a layer does from its index (Gemma), layers stand at an index that
    gives what `config` says, and those between them pass their input on.
    """
    places = _places(config)
    content = mlx_config(config) | {"num_hidden_layers": _depth(config, places)}
    if config.family == "gemma3_text":
        content["sliding_window_pattern"] = _GEMMA_PATTERN
    module = importlib.import_module(f"mlx_lm.models.{config.traits.mlx_module}")
    model: Module = module.Model(module.ModelArgs.from_dict(content))
    hold = _narrow if narrow else _wide
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    moved = {_moved(name, places): hold(value) for name, value in named}
    moved = _fused(config, moved, places)
    if hasattr(model, "sanitize"):
        moved = model.sanitize(moved)
    for index in set(range(_depth(config, places))) - set(places):
        model.layers[index] = _pass_on()
    if narrow:
        inner: Any = model
        inner.model.embed_tokens = _rows(moved.pop("model.embed_tokens.weight"))
    model.load_weights(list(moved.items()))
    return model


def _wide(value: Single) -> mx.array:
    import mlx.core as mx

    return mx.array(value)


def _narrow(value: Single) -> mx.array:
    """In 16 bits where they have a matrix's values; a wide copy of a large one would show."""
    import mlx.core as mx

    if value.ndim < 2:
        return mx.array(value)
    wide = np.ascontiguousarray(value)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if all(map(np.array_equal, half, wide)):
        return mx.array(half)
    del half
    low, high = (wide.view(np.uint16)[..., place::2] for place in (0, 1))  # of a little-endian word
    if not any(map(np.any, low)):
        return mx.array(np.ascontiguousarray(high)).view(mx.bfloat16)
    return mx.array(value)


def _fused(
    config: ModelConfig, tensors: Mapping[str, mx.array], places: list[int]
) -> dict[str, mx.array]:
    """Tensors by the names that mlx-lm has for them: parts of a fused matrix are joined."""
    import mlx.core as mx

    result = dict(tensors)
    for module, parts in config.traits.fused.items():
        for place in places:
            names = [f"model.layers.{place}.{MATRICES[part]}.weight" for part in parts]
            joined = mx.concatenate([result.pop(name) for name in names])
            result[f"model.layers.{place}.{module}.weight"] = joined
    return result


def _rows(matrix: mx.array) -> Module:
    """An embedding that gives float32 whatever its rows are held in."""
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    class Rows(Module):
        def __call__(self, tokens: mx.array) -> mx.array:
            return matrix[tokens].astype(mx.float32)

        def as_linear(self, x: mx.array) -> mx.array:
            return x @ matrix.T

    return Rows()  # type: ignore[no-untyped-call]  # mlx has no annotation here


def _places(config: ModelConfig) -> list[int]:
    """Index in mlx-lm's model of each layer."""
    if config.family != "gemma3_text":
        return list(range(config.num_layers))
    places: list[int] = []
    at = 0
    for layer in range(config.num_layers):
        while (at % _GEMMA_PATTERN == _GEMMA_PATTERN - 1) != (config.kind(layer) == "global"):
            at += 1
        places.append(at)
        at += 1
    return places


def _depth(config: ModelConfig, places: list[int]) -> int:
    return max(places[-1] + 1, _GEMMA_PATTERN) if config.family == "gemma3_text" else len(places)


def _moved(name: str, places: list[int]) -> str:
    return re.sub(r"(?<=layers\.)\d+", lambda number: str(places[int(number[0])]), name)


def _pass_on() -> Module:
    """A layer that is not there: it gives its input."""
    from mlx.nn.layers.base import Module

    class PassOn(Module):
        def __call__(self, x: Any, *_: Any, **__: Any) -> Any:
            return x

    return PassOn()  # type: ignore[no-untyped-call]  # mlx has no annotation here
