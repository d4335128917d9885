"""The reviewed list: tree rows of every family on it equal mlx-lm decoding in order."""

from __future__ import annotations

import mlx.core as mx
import mlx_families
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from ondevice.families import REFUSED, REVIEWED, shape_of
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.verifier import MLXVerifier

PARENTS = (-1, 0, 0, 2, 1, 3, 3, 5)
FAR = 32
QUICK = ("gemma2", "gpt_oss", "ministral3", "phi3", "qwen3", "smollm3")
"""Tried in every run; the others are slow together."""

CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(REVIEWED)
]


def test_the_reviewed_list_is_that_of_the_design_or_longer() -> None:
    assert len(REVIEWED) >= 40
    assert not REVIEWED & REFUSED.keys()
    assert set(mlx_families.module_names()) >= REVIEWED


@pytest.mark.parametrize("name", CASES)
def test_tree_rows_of_a_reviewed_family_equal_decoding_in_order(name: str) -> None:
    verifier = MLXVerifier(mlx_families.small_model(name), mlx_families.VOCAB, 256, far=FAR)
    assert verifier.shape == "tree", verifier.shape_reason
    model, rng = mlx_families.small_model(name), np.random.default_rng(1)
    prompt = rng.integers(mlx_families.VOCAB, size=3 * mlx_families.WINDOW + 1).tolist()
    tokens = rng.integers(mlx_families.VOCAB, size=len(PARENTS)).tolist()
    rows = tuple(
        VerifyRow(i, token, parent if parent >= 0 else ROOT_ROW)
        for i, (token, parent) in enumerate(zip(tokens, PARENTS, strict=True))
    )
    session = verifier.open_session()
    verifier.prefill(session, prompt, lambda: False)
    found = verifier.row_logits(session, rows)
    expected = np.stack([_in_order(model, prompt, _path(tokens, row)) for row in range(len(rows))])
    assert np.abs(found - expected).max() < 1e-3 * expected.std()
    elsewhere = _in_order(model, prompt[::-1], tokens[:1])
    assert np.abs(elsewhere - expected[0]).max() > 0.05 * expected.std()  # the text matters


def _path(tokens: list[int], row: int) -> list[int]:
    found = []
    while row >= 0:
        found.append(tokens[row])
        row = PARENTS[row]
    return found[::-1]


def _in_order(model, prompt, path):
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)
    for token in path:
        logits = model(mx.array([[token]]), cache=cache)
    return np.array(logits[0, -1])


@pytest.mark.parametrize("name", sorted({"gpt2"} & REFUSED.keys()))
def test_a_refused_family_runs_as_chains_and_says_why(name: str) -> None:
    shape, reason = shape_of(mlx_families.small_model(name))
    assert (shape, reason) == ("chain", f"{name}: {REFUSED[name]}")
