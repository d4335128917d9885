"""Which rows a model's forward may hold: the reviewed list, its reasons, and the proof at open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from ondevice.rows import modules_of
from ondevice.units import TreeShape

REVIEWED = frozenset(
    {
        "Klear",
        "afmoe",
        "apertus",
        "bailing_moe",
        "cohere",
        "cohere2",
        "dbrx",
        "deepseek",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone_moe",
        "gear",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "internlm2",
        "internlm3",
        "iquestloopcoder",
        "laguna",
        "llama",
        "mimo",
        "minicpm",
        "ministral3",
        "mistral3",
        "qwen2",
        "qwen3",
        "smollm3",
        "phi3",
    }
)
"""Modules of mlx_lm.models whose rows depend on their position and mask only: a small model of each
was decoded as a tree, beyond its window and its original context, and in order (the suite does so
for every one)."""

_OFFSET_SCALE = "its attention scale is computed from the cache's length, not from row positions"
_LEARNED = "its learned position embeddings are read in order"
REFUSED = {
    "mistral4": _OFFSET_SCALE,
    "llama4": _OFFSET_SCALE,
    "gpt2": _LEARNED,
    "gpt_bigcode": _LEARNED,
    "nanochat": "its rotary embedding has a form of its own",
}
"""Families known to be wrong with tree rows, and why."""

Forward = Callable[[Sequence[int], Sequence[int], list[Any]], mx.array]
"""(tokens, parents, layer caches) -> logits (rows, vocab), appended to the caches."""


def family_of(model: Module) -> str:
    """Name of the mlx_lm.models module that implements `model`."""
    return type(model).__module__.rpartition(".")[2]


def shape_of(model: Module) -> tuple[TreeShape, str]:
    """The rows that `model` may be given, and why not a tree ("" if it is one)."""
    family = family_of(model)
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in modules_of(model)):
        return "plain", "dynamic NTK RoPE turns a row's keys by the length of its forward"
    kinds = {type(cache) for cache in make_prompt_cache(model)}
    if family in REVIEWED and kinds <= {KVCache, RotatingKVCache}:
        return "tree", ""
    if kinds != {KVCache}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {KVCache}))
        return "plain", f"{family} keeps a state that cannot be rolled back ({names})"
    reason = REFUSED.get(family)
    if reason is not None:
        return "chain", f"{family}: {reason}"
    return "chain", f"{family} is not among the reviewed families ({', '.join(sorted(REVIEWED))})"


TREE = (-1, 0, 0, 2, 1)
"""Parents of the probe's rows: two branches whose rows are interleaved."""
PATHS = ((0, 1, 4), (0, 2, 3))
DEPTH = 2
PROBE_TOKENS = 1026
"""Longest text of the probe: beyond a window of 1,024 tokens, as Gemma 3 has."""
TOLERANCE = {mx.float32: 1e-3}
"""Largest error by dtype of the logits, in their standard deviations; 0.1 in half precision."""


def tree_error(
    forward: Forward,
    new_cache: Callable[[int], list[Any]],
    vocab_size: int,
    far: int = 0,
    windows: Sequence[int] = (),
) -> float:
    """Largest difference of tree rows from decoding their paths in order, in logit deviations.

    new_cache: caches that are empty and begin at a position. The rows lie around position `far`,
    so that what changes there changes among them, and behind a text that is longer than the
    smallest of `windows`, up to PROBE_TOKENS. inf when anything is not finite.
    """
    length = min(min(windows, default=0) + 2, PROBE_TOKENS)
    tokens = np.random.default_rng(0).integers(vocab_size, size=len(TREE) + length).tolist()
    prompt, rows = tokens[:length], tokens[length:]
    end = max(length, far - DEPTH)
    cache = new_cache(end - length)
    forward(prompt, range(-1, length - 1), cache)
    tree = np.array(forward(rows, TREE, cache).astype(mx.float32))
    worst = 0.0
    for path in PATHS:
        for layer in cache:
            layer.truncate(end)
        logits = forward([rows[row] for row in path], range(-1, len(path) - 1), cache)
        expected = np.array(logits.astype(mx.float32))
        worst = max(worst, float(np.abs(tree[list(path)] - expected).max() / expected.std()))
    return worst if np.isfinite(worst) else float("inf")


def tolerance(dtype: mx.Dtype) -> float:
    """What `tree_error` may be for logits of `dtype`."""
    return TOLERANCE.get(dtype, 0.1)
