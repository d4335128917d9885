"""The decoder families that a drafter can be made of: what each does otherwise than Llama 2.

One graph serves them all (`ondevice.models.drafter_graph`). A family is a row of facts, read from
its implementation in mlx-lm, which is what a verifier runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ondevice.errors import UnsupportedModel

Activation = Literal["silu", "gelu_tanh"]

MATRICES: Mapping[str, str] = MappingProxyType(
    {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
)
"""The matrices of a layer and their canonical names: Hugging Face's in a llama layer."""

_LLAMA_NORMS = MappingProxyType(
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
)
_SANDWICH_NORMS = MappingProxyType(
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)
_FUSED = MappingProxyType(
    {
        "self_attn.qkv_proj": ("query", "key", "value"),
        "mlp.gate_up_proj": ("gate", "up"),
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart.

    name: `model_type` of its config.json. mlx_module: the module of mlx_lm.models that runs it.
    architecture: its class in transformers. norms: where a layer normalises, by canonical name.
    norm_offset: added to a stored norm weight to give the gain. biases: matrices that always have
    one. fused: matrices that a checkpoint stores one below the other. residual_scale: factor on the
    residual stream, a power of two (see `ondevice.models.drafter_weights`). defaults: what
    transformers fills in where config.json is silent and Llama's own default differs.
    gguf_pairs: whether llama.cpp stores the two rows of a rotary pair as neighbours.
    """

    name: str
    architecture: str
    mlx_module: str
    norms: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NORMS)
    norm_offset: float = 0.0
    qk_norm: bool = False
    activation: Activation = "silu"
    scaled_embeddings: bool = False
    biases: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    residual_scale: float = 0.5
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_pairs: bool = False


# Residual streams: 1/2 is enough for the Llamas (their eps is 1e-5, and fp16 stores eps times the
# square of the scale: a smaller one would round it). Qwen reaches 1e4 and more, Gemma 1e5
# (swift-transformers issue 95); the engine's products end at 32,752.
_FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama", gguf_pairs=True),
    Family("mistral", "MistralForCausalLM", "llama", gguf_pairs=True),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        "smollm3",
        residual_scale=0.25,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "qwen2",
        biases=("query", "key", "value"),
        residual_scale=0.25,
        defaults={"max_position_embeddings": 32768},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm=True,
        residual_scale=0.25,
        defaults={"max_position_embeddings": 32768, "head_dim": 128},
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        qk_norm=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        residual_scale=0.0625,
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
        },
    ),
    Family("phi3", "Phi3ForCausalLM", "phi3", fused=_FUSED, defaults={"rms_norm_eps": 1e-5}),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _FAMILIES})


def family_named(name: object, where: object) -> Family:
    """The family of that name; UnsupportedModel, naming `where` it was asked for, if none has."""
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModel(
            f"{where}: a drafter of model family {name!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return family
