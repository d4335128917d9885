"""Small random checkpoints of every family, made with mlx-lm's own classes and written to disk.

Real head sizes, and each family's quirks switched on. Weights are drawn so that logits spread by a
few units and attention is not flat; norm weights are not 1, biases not 0.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny
from mlx.utils import tree_flatten

_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama 2": {
        "model_type": "llama", "num_key_value_heads": 4, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama 3": {
        "model_type": "llama", "rope_scaling": _LLAMA3, "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "llama biased": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama windowed": {
        "model_type": "llama", "sliding_window": 9, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "mistral": {
        "model_type": "mistral", "head_dim": 128, "sliding_window": None, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 4,
        "head_dim": 128, "rope_theta": 5e6, "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 256, "head_dim": None, "rope_theta": 1e6,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4096,
    },
    "qwen3": {
        "model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "gemma 3": {
        "model_type": "gemma3_text", "head_dim": 256, "num_key_value_heads": 1,
        "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 2,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 200,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi 3": {
        "model_type": "phi3", "hidden_size": 384, "head_dim": None, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "tie_word_embeddings": False, "sliding_window": 2047,
    },
    "phi 3 partial": {
        "model_type": "phi3", "hidden_size": 512, "num_key_value_heads": 2, "head_dim": None,
        "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    },
}  # fmt: skip
_MODULES = {"mistral": "llama"}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of the checkpoint called `name`."""
    content = {**_SMALL, "vocab_size": len(tiny.vocabulary()), **CONFIGS[name], **changes}
    return {key: value for key, value in content.items() if key != "head_dim" or value is not None}


def random_model(config: dict[str, Any], seed: int = 0) -> Any:
    """mlx-lm's own model of that configuration with random weights, in float32."""
    family = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{_MODULES.get(family, family)}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if family == "gemma3_text":
        model.sanitize({})  # its head is the embedding
    key = mx.random.key(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=own)
        if "norm" in name:
            base = 0.0 if family == "gemma3_text" else 1.0
            noise = base + 0.2 * noise
        elif "embed_tokens" in name:
            noise = 0.4 * noise if family != "gemma3_text" else 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.3 * noise
        else:
            noise = 1.5 * noise / value.shape[-1] ** 0.5
        weights.append((name, noise))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def write_checkpoint(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write the checkpoint called `name` as a Hugging Face folder; returns mlx-lm's model of it."""
    config = config_of(name, **changes)
    model = random_model(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_json(folder / "config.json", config)
    tiny.write_tokenizer(folder)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    return model
