"""What the verifier's tests share: tiny verifiers, random trees, mlx-lm as the oracle."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import tiny
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_model

from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.verifier import write_verifier
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import Law
from ondevice.verifier import MLXVerifier

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa tied": {},
    "llama3 untied": {"rope_scaling": tiny.LLAMA3, "tied_embeddings": False, "num_layers": 3},
    "mqa": {"num_kv_heads": 1, "rope_theta": 1e5},
}
VOCAB = tiny.tiny_config().vocab_size


@cache
def folder_of(variant: str) -> Path:
    """An MLX folder of a tiny random Llama."""
    folder = Path(mkdtemp(prefix="ondevice-tiny-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    model = tiny.tiny_model(seed=len(variant), **VARIANTS[variant])
    write_verifier(open_checkpoint(tiny.write_folder(model, folder / "source")), folder / "mlx")
    return folder / "mlx"


@cache
def verifier_of(variant: str) -> MLXVerifier:
    return MLXVerifier.open(folder_of(variant))


@cache
def oracle_of(variant: str) -> Any:
    """The same weights in mlx-lm's hands: nothing wrapped, its own caches."""
    return load_model(folder_of(variant))[0]


def sliding_model(window: int) -> Any:
    """A Llama whose second layer sees `window` tokens only."""
    mx.random.seed(5)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=48,
            num_attention_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=window,
        )
    )
    mx.eval(model.parameters())
    return model


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=count).tolist()


@st.composite
def trees(draw: st.DrawFn, most: int = 32) -> tuple[VerifyRow, ...]:
    """A random tree: row 0 the root, every other row below an earlier one, siblings distinct."""
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    reach = draw(st.integers(1, 8))  # how far back a parent lies: chains to bushes
    rows = [VerifyRow(100, int(rng.integers(VOCAB)), ROOT_ROW)]
    for index in range(1, count):
        parent = int(rng.integers(max(0, index - reach), index))
        taken = {row.token for row in rows if row.parent == parent}
        token = int(rng.choice([t for t in range(VOCAB) if t not in taken]))
        rows.append(VerifyRow(100 + index, token, parent))
    return tuple(rows)


def in_order(model: Any, prompt: Sequence[int], rows: Sequence[VerifyRow]) -> npt.NDArray[Any]:
    """Logits after each row, its path decoded token by token by mlx-lm, (rows, vocab)."""
    prefix = make_prompt_cache(model)
    mx.eval(model(mx.array(list(prompt))[None], cache=prefix), [c.state for c in prefix])
    caches: list[list[Any]] = []
    logits = []
    for row in rows:
        cache = [copy_of(layer) for layer in (prefix if row.parent < 0 else caches[row.parent])]
        logits.append(np.array(model(mx.array([[row.token]]), cache=cache)[0, -1]))
        caches.append(cache)
    return np.stack(logits)


def copy_of(cache: Any) -> Any:
    """An independent mlx-lm cache with the same content."""
    twin = KVCache()
    twin.keys, twin.values, twin.offset = mx.array(cache.keys), mx.array(cache.values), cache.offset
    return twin


def next_logits(model: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after `tokens`, in one forward without a cache."""
    return np.array(model(mx.array(list(tokens))[None])[0, -1])


def assert_cache_equals_fresh_prefill(
    verifier: MLXVerifier, session: int, model: Any, tokens: Sequence[int], within: float = 1e-4
) -> None:
    fresh = make_prompt_cache(model)
    model(mx.array(list(tokens))[None], cache=fresh)
    kept = verifier.mlx_lm_cache(session)
    assert len(kept) == len(fresh)
    for ours, layer in zip(kept, fresh, strict=True):
        pairs = zip(ours.keys_and_values(), layer.keys_and_values(), strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=within, rtol=0)


def plain_text(model: Any, law: Law, tokens: Sequence[int], count: int) -> list[int]:
    """Plain decoding that shares only the law in numpy with the product: a forward from scratch."""
    text = list(tokens)
    for _ in range(count):
        text.append(law.choose(next_logits(model, text), text))
    return text[len(tokens) :]


def grafted(rows: Sequence[VerifyRow], path: Sequence[int]) -> tuple[VerifyRow, ...]:
    """The tree with the tokens of `path` put in below the root; what it lacked comes last."""
    mixed, at = list(rows), 0
    for number, token in enumerate(path):
        known = [i for i, row in enumerate(mixed) if row.parent == at and row.token == token]
        if not known:
            mixed.append(VerifyRow(500 + number, token, at))
        at = known[0] if known else len(mixed) - 1
    return tuple(mixed)
