"""The proof of a drafter package is itself proved: true references, and it finds planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.gate import check_parity
from ondevice.converters.mlpackage import write_mlpackage
from ondevice.converters.mlxmodel import mlx_model
from ondevice.converters.network import Network
from ondevice.converters.parity import TokenTree, path_logits, selected_model
from ondevice.coreml.package import Package
from ondevice.errors import RuntimeFailure
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import folded, unfolded

Fault = Callable[[tiny.Tensors], None]


@pytest.mark.parametrize("scaling", [None, tiny.LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("layers", [[0, 1, 2], [0, 2]])
def test_the_reference_computes_the_papers_formulas(scaling: object, layers: list[int]) -> None:
    model = tiny.tiny_model(num_layers=3, rope_scaling=scaling, tied_embeddings=False)
    tree = TokenTree.random(model.config.vocab_size, (60,), seed=1)
    logits = path_logits(selected_model(model.tensors.__getitem__, model.config, layers), tree)
    kept = {
        name.replace(f"layers.{old}.", f"layers.{new}."): tensor
        for new, old in enumerate(layers)
        for name, tensor in model.tensors.items()
        if f"layers.{old}." in name or "layers" not in name
    }
    smaller = tiny.TinyModel(model.config.with_layers(len(layers)), kept)
    for leaf in tree.leaves():
        path = tree.path(leaf)
        truth = tiny.logits_by_hand(smaller, [tree.tokens[node] for node in path])
        assert np.abs(logits[path] - truth).max() < 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_unfolding_gives_the_same_model_up_to_half_precision(tied: bool) -> None:
    model = tiny.tiny_model(tied_embeddings=tied, vocab_size=301)
    weights = folded(model.tensors.__getitem__, model.config, [0, 1])
    stored = unfolded(weights, model.config)
    assert stored["lm_head.weight"].shape == (301, model.config.hidden_size)
    stored["model.embed_tokens.weight"] = model.tensors["model.embed_tokens.weight"]
    untied = tiny.TinyModel(tiny.tiny_config(tied_embeddings=False, vocab_size=301), stored)
    tokens = list(range(5, 45))
    difference = tiny.logits_by_hand(untied, tokens) - tiny.logits_by_hand(model, tokens)
    assert 0 < np.abs(difference).max() < 5e-2


def in_halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    ("rounded", "dtype"), [(in_halves, "float16"), (in_bfloat16, "bfloat16"), (None, "float32")]
)
def test_a_narrow_model_holds_16_bits_where_they_are_enough_and_computes_the_same(
    rounded: Callable[[np.ndarray], np.ndarray] | None, dtype: str
) -> None:
    model = tiny.tiny_model(tied_embeddings=False)
    tensors = {
        name: rounded(tensor) if rounded and tensor.ndim > 1 else tensor
        for name, tensor in model.tensors.items()
    }
    if dtype == "bfloat16":  # below the halves
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(2.0**-40)
    wide, narrow = (mlx_model(model.config, tensors, narrow) for narrow in (False, True))
    assert str(narrow.lm_head.weight.dtype) == f"mlx.core.{dtype}"
    tree = TokenTree.random(model.config.vocab_size, (20,), seed=1)
    np.testing.assert_array_equal(path_logits(narrow, tree), path_logits(wide, tree))


@given(steps=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_a_random_tree_is_one_tree_fed_parents_first(steps: list[int], seed: int) -> None:
    tree = TokenTree.random(50, steps, seed)
    assert len(tree.tokens) == len(tree.parents) == sum(steps)
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    covered = {node for leaf in tree.leaves() for node in tree.path(leaf)}
    assert covered == set(range(sum(steps)))


def swap_keys_and_values(tensors: tiny.Tensors) -> None:
    key, value = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[key], tensors[value] = tensors[value], tensors[key]


def drop_a_gain(tensors: tiny.Tensors) -> None:
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])


def transpose_a_square_matrix(tensors: tiny.Tensors) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:64].T.copy().repeat(2, axis=0)


@pytest.fixture(scope="module")
def untied_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[tiny.TinyModel, Checkpoint]:
    model = tiny.tiny_model(tied_embeddings=False)
    folder = tmp_path_factory.mktemp("untied") / "llama"
    return model, open_checkpoint(tiny.write_folder(model, folder))


@pytest.mark.parametrize("fault", [swap_keys_and_values, drop_a_gain, transpose_a_square_matrix])
def test_a_package_with_another_models_weights_is_refused(
    untied_checkpoint: tuple[tiny.TinyModel, Checkpoint], fault: Fault, tmp_path: Path
) -> None:
    model, checkpoint = untied_checkpoint
    wrong = dict(model.tensors)
    fault(wrong)
    functions = [DrafterFunction(model.config, rows, 64) for rows in (1, 8)]
    weights = folded(wrong.__getitem__, model.config, [0, 1])
    write_mlpackage([function.source(weights) for function in functions], tmp_path / "w.mlpackage")
    package = Package.open(tmp_path / "w.mlpackage")
    embedding = model.tensors["model.embed_tokens.weight"].astype(np.float16)
    with pytest.raises(RuntimeFailure, match="unrounded weights, got"):
        check_parity(package, Network.cut(checkpoint, [0, 1]), embedding, functions)


def test_a_graph_that_computes_something_else_is_refused(
    untied_checkpoint: tuple[tiny.TinyModel, Checkpoint], tmp_path: Path
) -> None:
    model, checkpoint = untied_checkpoint
    config = tiny.tiny_config(tied_embeddings=False, num_heads=4, num_kv_heads=2, rms_norm_eps=0.5)
    wrong = [DrafterFunction(config, rows, 64) for rows in (1, 8)]
    weights = folded(model.tensors.__getitem__, model.config, [0, 1])
    write_mlpackage([function.source(weights) for function in wrong], tmp_path / "w.mlpackage")
    package = Package.open(tmp_path / "w.mlpackage")
    embedding = model.tensors["model.embed_tokens.weight"].astype(np.float16)
    right = [DrafterFunction(model.config, rows, 64) for rows in (1, 8)]
    with pytest.raises(RuntimeFailure, match=r"0\.001 logits of mlx-lm with stored weights, got"):
        check_parity(package, Network.cut(checkpoint, [0, 1]), embedding, right)
