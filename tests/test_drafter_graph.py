"""Laws of the drafter functions, proved on the package that is written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.converters.mlpackage import folder_bytes, write_mlpackage
from ondevice.converters.parity import (
    Replay,
    TokenTree,
    join_logits,
    path_logits,
    selected_model,
    stored_model,
)
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package, ops_digest, weights_digest, weights_file
from ondevice.errors import UnsupportedModel
from ondevice.models.ane import ANE_MAX_AXIS, ANE_MAX_RANK
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import DrafterWeights, folded, head_partition

ROWS = (1, 8, 64)
CONTEXTS = (64, 128)
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "llama3": {"rope_scaling": tiny.LLAMA3, "rope_theta": 500000.0},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "vocab_size": 301},
    "ungrouped": {"num_kv_heads": 4},
    "two_parts": {"vocab_size": 16_500, "tied_embeddings": False, "num_layers": 1},
}


@dataclass(frozen=True)
class Built:
    """A tiny drafter on disk and what it was made from."""

    model: tiny.TinyModel
    weights: DrafterWeights
    package: Package
    embedding: np.ndarray[Any, np.dtype[np.float16]]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def replay(self, precision: Any = "fp32", context: int = 128, seed: int = 0) -> Replay:
        runtime = Emulator(self.package, precision)
        return Replay(runtime, self.config, context, self.embedding, seed)


def build(model: tiny.TinyModel, path: Path) -> Built:
    config = model.config
    weights = folded(model.tensors.__getitem__, config, range(config.num_layers))
    functions = [DrafterFunction(config, rows, size) for rows in ROWS for size in CONTEXTS]
    write_mlpackage([function.source(weights) for function in functions], path)
    embedding = model.tensors["model.embed_tokens.weight"].astype(np.float16)
    return Built(model, weights, Package.open(path), embedding)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Built]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        name: build(tiny.tiny_model(seed=number, **changes), folder / f"{name}.mlpackage")
        for number, (name, changes) in enumerate(VARIANTS.items())
    }


def trees(vocab_size: int) -> list[TokenTree]:
    """505 nodes through t64, t8 and t1, full and partly filled steps."""
    steps = (50, 8, 8, 7, 8, 5, 3, 8, 1, 1, 1, 1)
    return [TokenTree.random(vocab_size, steps, seed) for seed in range(5)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_of_a_tree_gets_the_logits_of_its_path_in_mlx_lm(
    built: Mapping[str, Built], variant: str
) -> None:
    drafter = built[variant]
    config = drafter.config
    rounded = stored_model(drafter.package, config, drafter.embedding)
    layers = range(config.num_layers)
    unrounded = selected_model(drafter.model.tensors.__getitem__, config, layers)
    same_choice = []
    for number, tree in enumerate(trees(config.vocab_size)):
        expected = path_logits(rounded, tree)
        logits = drafter.replay(seed=number).logits(tree, ROWS)
        assert np.abs(logits - expected).max() < 1e-3
        assert np.abs(logits - path_logits(unrounded, tree)).max() < 5e-2
        half = drafter.replay("fp16", seed=number).logits(tree, ROWS)
        same_choice.append(half.argmax(1) == expected.argmax(1))
    choices = np.concatenate(same_choice)
    assert choices.size >= 500
    assert choices.mean() >= 0.98


def test_the_slots_that_hold_a_context_do_not_matter(built: Mapping[str, Built]) -> None:
    drafter = built["grouped"]
    tree = trees(drafter.config.vocab_size)[0]
    one, other = (drafter.replay(seed=seed).logits(tree, ROWS) for seed in (1, 2))
    assert np.abs(one - other).max() < 1e-4


def test_both_context_sizes_compute_the_same(built: Mapping[str, Built]) -> None:
    drafter = built["llama3"]
    tree = TokenTree.random(drafter.config.vocab_size, (40, 8, 6, 1, 1), seed=3)
    small, large = (drafter.replay(context=size).logits(tree, ROWS) for size in CONTEXTS)
    assert np.abs(small - large).max() < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("variant", ["grouped", "two_parts"])
def test_chunk_maxima_and_sums_are_those_of_the_real_logits(
    built: Mapping[str, Built], variant: str, precision: str
) -> None:
    drafter = built[variant]
    config = drafter.config
    tree = TokenTree.random(config.vocab_size, (8,), seed=0)
    outputs = drafter.replay(precision).step(tree, range(8), 8)
    sums = []
    for part, rows in enumerate(head_partition(config.vocab_size)):
        logits = outputs[f"logits_{part}"][0, :, 0].astype(np.float64)
        chunks = logits.reshape(rows // 128, 128, 8)
        maximum = outputs[f"chunk_max_{part}"][0, :, 0].astype(np.float64)
        assert np.array_equal(maximum, chunks.max(1))
        total = outputs[f"chunk_sum_{part}"][0, :, 0].astype(np.float64)
        exact = np.exp(chunks - maximum[:, None]).sum(1)
        assert np.abs(total / exact - 1).max() < (1e-5 if precision == "fp32" else 5e-3)
        sums.append(total * np.exp(maximum))
    normaliser = np.log(np.concatenate(sums).sum(0))
    real = join_logits(outputs, config).astype(np.float64)
    truth = np.log(np.exp(real).sum(1))
    assert np.abs(normaliser - truth).max() < (1e-5 if precision == "fp32" else 5e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("planted", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_itself_and_reaches_no_other(
    built: Mapping[str, Built], planted: float, precision: str
) -> None:
    drafter = built["grouped"]
    tree = TokenTree.random(drafter.config.vocab_size, (20, 8), seed=5)
    replay = drafter.replay(precision)
    replay.step(tree, range(20), 64)
    inputs = replay.inputs(tree, range(20, 28), 8)
    bad = 3
    alone = np.full_like(inputs["mask_new"], -1e4)
    alone[0, 0, range(8), range(8)] = 0  # no row sees another
    inputs["mask_new"] = alone
    clean = replay.runtime.predict("t8_s128", inputs)
    poisoned_x = inputs["x"].copy()
    poisoned_x[0, 5, 0, bad] = planted
    dirty = replay.runtime.predict("t8_s128", inputs | {"x": poisoned_x})
    others = [row for row in range(8) if row != bad]
    for name in clean:
        axis = 2 if name in ("k_new", "v_new") else 3
        assert np.array_equal(
            np.take(clean[name], others, axis), np.take(dirty[name], others, axis)
        )
        assert np.isfinite(clean[name]).all()
    for name in ("chunk_max_0", "logits_0"):
        assert not np.isfinite(dirty[name][..., bad]).any()
    assert not np.isfinite(dirty["v_new"][:, :, bad]).all()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_unused_rows_and_stale_slots_change_nothing(
    built: Mapping[str, Built], precision: str
) -> None:
    drafter = built["tied"]
    tree = TokenTree.random(drafter.config.vocab_size, (30, 3), seed=6)
    replay = drafter.replay(precision)
    replay.step(tree, range(30), 64)
    inputs = replay.inputs(tree, range(30, 33), 8)
    clean = replay.runtime.predict("t8_s128", inputs)
    rng = np.random.default_rng(0)
    changed = {name: array.copy() for name, array in inputs.items()}
    changed["x"][..., 3:] = rng.standard_normal(changed["x"][..., 3:].shape)
    free = sorted(set(range(128)) - set(replay.slots.values()))
    for name in replay.cache:
        changed[name][0, :, free] = 20 * rng.standard_normal(changed[name][0, :, free].shape)
    dirty = replay.runtime.predict("t8_s128", changed)
    for name in clean:
        axis = 2 if name in ("k_new", "v_new") else 3
        used = [0, 1, 2]
        assert np.array_equal(np.take(clean[name], used, axis), np.take(dirty[name], used, axis))


def test_attention_over_many_equal_slots_does_not_overflow_half_precision(
    built: Mapping[str, Built],
) -> None:
    drafter = built["ungrouped"]
    replay = drafter.replay("fp16")
    tree = TokenTree.random(drafter.config.vocab_size, (1,), seed=0)
    inputs = replay.inputs(tree, [0], 1)
    inputs["mask"] = np.zeros_like(inputs["mask"])
    for name in replay.cache:
        inputs[name] = np.full_like(inputs[name], 1000 if name.startswith("v") else 0)
    outputs = replay.runtime.predict("t1_s128", inputs)  # the sum over slots would be 128,000
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_a_cache_input_is_read_by_products_only(built: Mapping[str, Built]) -> None:
    for function in built["grouped"].package.functions.values():
        readers = {
            argument: op.type
            for op in function.ops
            for arguments in op.inputs.values()
            for argument in arguments
            if isinstance(argument, str) and argument[:2] in ("k_", "v_")
        }
        assert len(readers) == 2 * 2  # keys and values of two layers
        assert set(readers.values()) == {"matmul"}


def test_every_value_is_static_half_precision_within_the_engines_limits(
    built: Mapping[str, Built],
) -> None:
    for function in built["two_parts"].package.functions.values():
        for op in function.ops:
            if op.type == "const":
                continue
            for value in op.outputs:
                comparison = op.type == "less_equal"
                assert value.type.dtype == ("bool" if comparison else "fp16"), op
                assert len(value.type.shape) <= ANE_MAX_RANK
                assert all(0 < size <= ANE_MAX_AXIS for size in value.type.shape)


def test_six_functions_store_each_weight_once(built: Mapping[str, Built]) -> None:
    for drafter in built.values():
        places: dict[str, set[int]] = {}
        for function in drafter.package.functions.values():
            for name, constant in function.constants.items():
                if constant.blob is not None:
                    places.setdefault(name, set()).add(constant.blob.offset)
        assert len(drafter.package.functions) == 6
        assert all(len(offsets) == 1 for offsets in places.values())
        # 64 bytes of header, 64 of metadata a blob, at most 63 of alignment; the sign of RoPE.
        most = drafter.weights.nbytes + 64 + 128 * len(places) + 64 * 2
        assert weights_file(drafter.package.path).stat().st_size <= most


def test_the_graph_costs_under_two_percent_of_a_model_of_smollm2s_layers(
    built: Mapping[str, Built],
) -> None:
    drafter = built["grouped"]
    overhead = folder_bytes(drafter.package.path) - drafter.weights.nbytes
    layer_bytes = 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    assert overhead / drafter.config.num_layers < 0.02 * layer_bytes


def test_identical_builds_have_identical_ops_and_weights(
    built: Mapping[str, Built], tmp_path: Path
) -> None:
    first = built["llama3"]
    second = build(first.model, tmp_path / "again.mlpackage")
    assert ops_digest(first.package) == ops_digest(second.package)
    assert weights_digest(first.package.path) == weights_digest(second.package.path)
    for name, function in first.package.functions.items():
        again = second.package.functions[name]
        assert [op.name for op in function.ops] == [op.name for op in again.ops]


def test_another_weight_or_another_op_changes_its_digest(
    built: Mapping[str, Built], tmp_path: Path
) -> None:
    first = built["tied"]
    tensors = {name: array.copy() for name, array in first.model.tensors.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][7, 7] += 0.01
    other = build(tiny.TinyModel(first.config, tensors), tmp_path / "other.mlpackage")
    assert weights_digest(other.package.path) != weights_digest(first.package.path)
    assert ops_digest(other.package) == ops_digest(first.package)
    assert ops_digest(built["llama3"].package) == ops_digest(first.package)  # RoPE is an input
    assert ops_digest(built["grouped"].package) != ops_digest(first.package)


@given(vocab_size=st.integers(1, 400_000))
@settings(deadline=None, max_examples=200)
def test_the_head_is_cut_into_whole_chunks_that_fit_the_engine(vocab_size: int) -> None:
    parts = head_partition(vocab_size)
    assert 0 <= sum(parts) - vocab_size < 128
    assert all(0 < rows <= ANE_MAX_AXIS and rows % 128 == 0 for rows in parts)
    assert max(parts) - min(parts) <= 128
    assert len(parts) == 1 or sum(parts) > (len(parts) - 1) * ANE_MAX_AXIS


def test_a_weight_beyond_half_precision_is_refused() -> None:
    model = tiny.tiny_model()
    model.tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 3e5
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.down_proj.*65504"):
        folded(model.tensors.__getitem__, model.config, [0, 1])
