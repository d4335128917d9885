"""Tiny random Llamas on disk: real files in real formats, made in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.converters.checkpoint import tensor_shapes
from ondevice.models.config import ModelConfig
from ondevice.models.rope import Llama3Scaling

SPECIALS = ("<|end|>", "<|begin|>", "<|user|>", "<|assistant|>")
MERGES = ("t h", "i n", "Ġ t", "th e")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] if m['role'] == 'assistant' else 'user' }}|>"
    "{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)

Tensors = dict[str, npt.NDArray[np.float32]]


def tiny_config(**changes: Any) -> ModelConfig:
    """2 layers, hidden 64, 4 query and 2 key/value heads of 32, one row per token."""
    config = ModelConfig(
        family="llama",
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        context=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied_embeddings=True,
    )
    return replace(config, **changes)


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """Seeded weights with which logits spread by a few units and attention is not flat."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            values = 1 + 0.1 * rng.standard_normal(shape)
        elif "embed_tokens" in name:
            values = 0.4 * rng.standard_normal(shape)
        else:
            values = 1.5 * rng.standard_normal(shape) / np.sqrt(shape[1])
        tensors[name] = values.astype(np.float32)
    return tensors


def vocabulary() -> list[str]:
    """Specials, the 256 byte symbols of byte-level BPE in their usual order, merged tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = sorted(ByteLevel.alphabet())
    return [*SPECIALS, *symbols, *(merge.replace(" ", "") for merge in MERGES)]


@dataclass(frozen=True)
class TinyModel:
    """What a tiny checkpoint was written from: the truth that readers are compared with."""

    config: ModelConfig
    tensors: Tensors


def tiny_model(seed: int = 0, **changes: Any) -> TinyModel:
    """A random model; `changes` are fields of its ModelConfig."""
    config = tiny_config(**changes)
    return TinyModel(config, random_tensors(config, seed))


def write_folder(
    model: TinyModel, folder: Path, dtype: str = "float32", shards: int = 1, new_rope: bool = False
) -> Path:
    """Write a Hugging Face folder. `new_rope`: rope_parameters as transformers 5 writes them."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", huggingface_config(model.config, new_rope))
    write_json(folder / "generation_config.json", {"eos_token_id": [0]})
    write_tokenizer(folder)
    parts = [
        f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        for i in range(shards)
    ]
    where = {name: parts[i % shards] for i, name in enumerate(model.tensors)}
    for part in parts:
        arrays = {
            name: mx.array(tensor).astype(getattr(mx, dtype))
            for name, tensor in model.tensors.items()
            if where[name] == part
        }
        mx.save_safetensors(str(folder / part), arrays)
    if shards > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return folder


def huggingface_config(config: ModelConfig, new_rope: bool = False) -> dict[str, Any]:
    """config.json of a Llama, in the old or the new way of writing RoPE."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    content = {
        "architectures": ["LlamaForCausalLM"],
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
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": 0,
    }
    if new_rope:
        content["rope_parameters"] = {"rope_theta": config.rope_theta, **rope}
    else:
        content["rope_theta"] = config.rope_theta
        content["rope_scaling"] = rope if scaling is not None else None
    return content


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with four specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(vocabulary())}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON."""
    file.write_text(json.dumps(content), encoding="utf-8")


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes it for a model of this configuration."""
    import mlx.core as mx

    tokens = vocabulary()
    kinds = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))

    def number(value: int) -> Any:
        return mx.array(value, dtype=mx.uint32)

    return {
        "general.architecture": "llama",
        "llama.embedding_length": number(config.hidden_size),
        "llama.feed_forward_length": number(config.intermediate_size),
        "llama.block_count": number(config.num_layers),
        "llama.attention.head_count": number(config.num_heads),
        "llama.attention.head_count_kv": number(config.num_kv_heads),
        "llama.attention.key_length": number(config.head_dim),
        "llama.attention.value_length": number(config.head_dim),
        "llama.rope.dimension_count": number(config.head_dim),
        "llama.context_length": number(config.context),
        "llama.attention.layer_norm_rms_epsilon": mx.array(config.rms_norm_eps),
        "llama.rope.freq_base": mx.array(config.rope_theta),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array(kinds, dtype=mx.int32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(0),
        "tokenizer.ggml.add_bos_token": mx.array(False),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    model: TinyModel,
    file: Path,
    metadata: dict[str, Any] | None = None,
    extra: Tensors | None = None,
) -> Path:
    """Write an F32 GGUF as llama.cpp's converter would: its names, its row order of q and k."""
    import mlx.core as mx

    arrays = {}
    for name, tensor in model.tensors.items():
        heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
        count = next((heads[key] for key in heads if key in name), None)
        rows = tensor if count is None else interleaved(tensor, count)
        arrays[gguf_name(name)] = mx.array(np.ascontiguousarray(rows))
    arrays |= {name: mx.array(tensor) for name, tensor in (extra or {}).items()}
    mx.save_gguf(str(file), arrays, metadata or gguf_metadata(model.config))
    return file


def interleaved(tensor: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row i and row i + head_dim / 2 of each head become neighbours."""
    head_dim = tensor.shape[0] // heads
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()
    return tensor.reshape(heads, head_dim, -1)[:, order].reshape(tensor.shape)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    renames = (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    )
    for old, new in renames:
        name = name.replace(old, new)
    return name


def logits_by_hand(model: TinyModel, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Logits of every position, shape (T, vocab), straight from the paper's formulas in float64.

    Shares nothing with the product: rotation, scaling and masking are written out again.
    """
    config = model.config
    weights = {name: tensor.astype(np.float64) for name, tensor in model.tensors.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(config.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        x = x + _attention(_norm(x, layer["input_layernorm.weight"], config), layer, config)
        x = x + _mlp(_norm(x, layer["post_attention_layernorm.weight"], config), layer)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits: npt.NDArray[np.float64] = _norm(x, weights["model.norm.weight"], config) @ head.T
    return logits


def _norm(x: Any, weight: Any, config: ModelConfig) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def _mlp(x: Any, layer: dict[str, Any]) -> Any:
    gate = x @ layer["mlp.gate_proj.weight"].T
    up = x @ layer["mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T


def _attention(x: Any, layer: dict[str, Any], config: ModelConfig) -> Any:
    length, half = len(x), config.head_dim // 2
    out = np.zeros((length, config.num_heads * config.head_dim))
    for head in range(config.num_heads):
        kv = head * config.num_kv_heads // config.num_heads
        mine = slice(head * config.head_dim, (head + 1) * config.head_dim)
        shared = slice(kv * config.head_dim, (kv + 1) * config.head_dim)
        q = x @ layer["self_attn.q_proj.weight"][mine].T
        k = x @ layer["self_attn.k_proj.weight"][shared].T
        v = x @ layer["self_attn.v_proj.weight"][shared].T
        q, k = _rotated(q, half, config), _rotated(k, half, config)
        scores = q @ k.T / np.sqrt(config.head_dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, mine] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out @ layer["self_attn.o_proj.weight"].T


def _rotated(x: Any, half: int, config: ModelConfig) -> Any:
    turned = x.copy()
    for i in range(half):
        frequency = config.rope_theta ** (-i / half)
        scaling = config.rope_scaling
        if scaling is not None:
            turns = scaling.original_context * frequency / (2 * np.pi)
            blend = (turns - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            blend = min(max(blend, 0.0), 1.0)
            frequency *= blend + (1 - blend) / scaling.factor
        angle = np.arange(len(x)) * frequency
        a, b = x[:, i], x[:, i + half]
        turned[:, i] = a * np.cos(angle) - b * np.sin(angle)
        turned[:, i + half] = a * np.sin(angle) + b * np.cos(angle)
    return turned
