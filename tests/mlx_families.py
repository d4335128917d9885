"""A small random model of every module of mlx_lm.models that can be built from one table of sizes.

The table knows field names, not families: whatever a module's ModelArgs asks for is looked up, so a
module that mlx-lm gains is tried without a word about it here.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

VOCAB = 97
WINDOW = 10
LAYERS = 4
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "dim": 64, "n_embd": 64, "d_model": 64, "model_dim": 64,
    "num_hidden_layers": LAYERS, "n_layers": LAYERS, "n_layer": LAYERS, "num_layers": LAYERS,
    "intermediate_size": 96, "ffn_hidden_size": 96, "moe_intermediate_size": 48, "hidden_dim": 96,
    "num_attention_heads": 4, "n_heads": 4, "n_head": 4, "num_heads": 4, "attn_heads": 4,
    "num_key_value_heads": 2, "n_kv_heads": 2, "num_kv_heads": 2, "kv_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "vocab_size": VOCAB, "rope_theta": 1e4, "rope_base": 1e4, "max_position_embeddings": 256,
    "max_sequence_length": 256, "max_seq_len": 256, "n_positions": 256, "n_ctx": 256,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "sliding_window_pattern": 2,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_bias": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rotary_dim": 8, "rope_pct": 0.5,
    "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5, "logit_scale": 0.5, "clip_qkv": 8.0, "qkv_bias": True,
    "rope_local_base_freq": 1e4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_intermediate_dim": 48, "rope_parameters": {
        "rope_theta": 1e4, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16,
        "rope_type": "default"},
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "bias": False, "no_bias": True, "qk_norm": True, "use_qk_norm": True,
    "num_kv_reuse_layers": 1, "post_norm": True,
    "moe_num_experts": 4, "moe_k": 2, "rope_scaling": None, "is_moe_layer": [False, True] * 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "hidden_act": "silu",
    "activation": "silu", "embd_scale": 2.0, "dim_model_base": 32, "scale_depth": 1.4,
    "scale_emb": 2.0, "norm_type": "rmsnorm", "max_window_layers": LAYERS,
}  # fmt: skip
_WRAPPED = {"gemma3": "gemma3_text", "mistral3": "ministral3", "qwen3_vl": "qwen3"}


def arguments_of(name: str) -> dict[str, Any]:
    """config.json of a small model of module `name`."""
    if name in _WRAPPED:
        inner = arguments_of(_WRAPPED[name])
        return {"model_type": name, "text_config": inner, "vocab_size": VOCAB}
    args = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    fields = {field.name for field in dataclasses.fields(args)}
    known = {key: value for key, value in _SIZES.items() if key in fields}
    return {**known, "model_type": name}


def small_model(name: str, seed: int = 0) -> Any:
    """The model, its random weights in float32; raises whatever its module raises."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(arguments_of(name)))
    weights = []
    for path, value in tree_flatten(model.parameters()):
        if value.ndim > 1:
            value = 1.5 * mx.random.normal(value.shape) / value.shape[-1] ** 0.5
        weights.append((path, value.astype(mx.float32)))
    model.load_weights(weights, strict=False)
    mx.eval(model.parameters())
    return model


def module_names() -> list[str]:
    """Every module of mlx_lm.models that holds a model."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in names if name not in ("base", "cache")]


def keeps_rows_only(model: Any) -> bool:
    """Whether all that the model remembers is keys and values."""
    return {type(cache) for cache in make_prompt_cache(model)} <= {KVCache, RotatingKVCache}
