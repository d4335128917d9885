"""Sliding windows and positions that scale: trees and rollbacks equal mlx-lm decoding in order."""

from __future__ import annotations

from typing import Any

import families
import mlx.core as mx
import mlx_families
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ondevice import rows
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import Law, SamplingParams
from ondevice.units import RunRequest, VerifyRequest
from ondevice.verifier import MLXVerifier

WINDOW = 12
VOCAB = mlx_families.VOCAB


def never() -> bool:
    return False


def gemma(window: int = WINDOW) -> Any:
    config = families.config_of(
        "gemma 3", vocab_size=VOCAB, sliding_window=window, hidden_size=64, head_dim=32
    )
    return families.random_model(config)


def ministral() -> Any:
    """Its queries are scaled by their position from 16 on."""
    return mlx_families.small_model("ministral3")


def logits_in_order(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """After the last of `tokens`, each decoded by itself with mlx-lm's own caches."""
    cache = make_prompt_cache(model)
    for token in tokens:
        logits = model(mx.array([[token]]), cache=cache)
    return np.array(logits[0, -1])


def tree_of(seed: int, parents: tuple[int, ...]) -> tuple[VerifyRow, ...]:
    tokens = np.random.default_rng(seed).integers(VOCAB, size=len(parents)).tolist()
    return tuple(
        VerifyRow(i, token, parent if parent >= 0 else ROOT_ROW)
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))
    )


def path(tree: tuple[VerifyRow, ...], row: int) -> list[int]:
    found = []
    while row >= 0:
        found.append(tree[row].token)
        row = tree[row].parent
    return found[::-1]


PARENTS = (-1, 0, 0, 2, 1, 3, 3, 5, 7, 8)


@pytest.mark.parametrize("make", [gemma, ministral], ids=["gemma 3", "ministral 3"])
@pytest.mark.parametrize("length", [WINDOW - 5, WINDOW - 1, WINDOW, 3 * WINDOW, 3 * WINDOW + 5])
def test_tree_rows_across_the_edge_have_the_logits_of_their_paths(make: Any, length: int) -> None:
    verifier, model, tree = MLXVerifier(make(), VOCAB, 4096, far=16), make(), tree_of(1, PARENTS)
    assert verifier.shape == "tree", verifier.shape_reason
    prompt = np.random.default_rng(length).integers(VOCAB, size=length).tolist()
    session = verifier.open_session()
    verifier.prefill(session, prompt, never)
    found = verifier.row_logits(session, tree)
    for row in range(len(tree)):
        expected = logits_in_order(model, prompt + path(tree, row))
        np.testing.assert_allclose(found[row], expected, atol=1e-3, rtol=0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tree"), st.integers(0, 99)),
        st.tuples(st.just("run"), st.integers(1, 9)),
        st.tuples(st.just("back"), st.integers(1, 2 * WINDOW)),
        st.tuples(st.just("more"), st.integers(1, 2 * WINDOW)),
    ),
    min_size=4,
    max_size=10,
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_after_trees_runs_and_rollbacks_the_text_goes_on_as_in_order(
    steps: list[tuple[str, int]],
) -> None:
    verifier, model = MLXVerifier(gemma(), VOCAB, 4096), gemma()
    law, session = Law(SamplingParams(), VOCAB), verifier.open_session()
    text = np.random.default_rng(0).integers(VOCAB, size=2 * WINDOW).tolist()
    verifier.prefill(session, text, never)
    for number, (step, size) in enumerate(steps):
        root = (7 * number + size) % VOCAB
        if step == "tree":
            tree = (VerifyRow(0, root, ROOT_ROW), *tree_of(size, PARENTS)[1:])
            (verdict,) = verifier.verify([VerifyRequest(session, number, tree, "coupled", law)])
            text += [root, *verdict.tokens[:-1]]
        elif step == "run":
            run = verifier.run(RunRequest(session, number, root, size, law), never)
            made = [token for verdict in run for token in verdict.tokens]
            text += [root, *made[:-1]]
            verifier.truncate(session, len(text))
        elif step == "back":
            del text[max(1, len(text) - size) :]
            verifier.truncate(session, len(text))
        else:
            more = np.random.default_rng(size).integers(VOCAB, size=size).tolist()
            verifier.prefill(session, more, never)
            text += more
    (row,) = verifier.row_logits(session, (VerifyRow(0, 5, ROOT_ROW),))
    np.testing.assert_allclose(row, logits_in_order(model, [*text, 5]), atol=1e-3, rtol=0)


def test_after_ten_windows_a_windows_layer_holds_at_most_a_tenth_more_than_its_window() -> None:
    window = 64
    verifier = MLXVerifier(gemma(window), VOCAB, 4096)
    law, session = Law(SamplingParams(), VOCAB), verifier.open_session()
    verifier.prefill(session, np.random.default_rng(0).integers(VOCAB, size=700).tolist(), never)

    def rows_held() -> list[int]:
        layers = verifier._sessions[session].layers
        assert layers is not None
        return [layer.keys.shape[2] for layer in layers if layer.window is not None]

    assert max(rows_held()) <= 1.1 * window
    for number in range(90):
        tree = tree_of(number, PARENTS)
        verifier.verify([VerifyRequest(session, number, tree, "coupled", law)])
        assert max(rows_held()) <= 1.1 * window
    for _ in verifier.run(RunRequest(session, 100, 5, 80, law), never):
        assert max(rows_held()) <= 1.1 * window


def test_a_windows_layer_becomes_mlx_lms_own_cache_and_decodes_on() -> None:
    verifier, model = MLXVerifier(gemma(), VOCAB, 4096), gemma()
    prompt = np.random.default_rng(3).integers(VOCAB, size=31).tolist()
    session = verifier.open_session()
    verifier.prefill(session, prompt, never)
    cache = verifier.mlx_lm_cache(session)
    assert any(isinstance(layer, RotatingKVCache) for layer in cache)
    text = list(prompt)
    for token in (4, 8, 15, 16, 23, 42):
        text.append(token)
        found = np.array(model(mx.array([[token]]), cache=cache)[0, -1])
        np.testing.assert_allclose(found, logits_in_order(model, text), atol=1e-3, rtol=0)


class Unscaled:
    """An attention without its patch: the fault that the probe is there to find."""

    def __init__(self, inner: Any, layout: Any) -> None:
        self.inner = inner

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x, *args, **kwargs)


def test_the_probe_finds_a_ministral_whose_rows_scale_by_the_caches_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MLXVerifier(ministral(), VOCAB, 256, far=16).shape == "tree"
    monkeypatch.setattr(rows, "RowScale", Unscaled)
    verifier = MLXVerifier(ministral(), VOCAB, 256, far=16)
    assert verifier.shape == "chain"
    assert "in the probe tree rows differed" in verifier.shape_reason


def test_the_probe_passes_beyond_the_window() -> None:
    verifier = MLXVerifier(gemma(), VOCAB, 4096)
    assert verifier.probe_error is not None
    assert verifier.probe_error < 1e-4
