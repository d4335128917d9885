"""Palettes are as good as the best there are, and a package holds what was made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.compression import (
    FORMATS,
    Compression,
    Format,
    group_rows,
    packer,
    palette_of,
    stored_bytes,
)
from ondevice.converters.drafter import convert_drafter
from ondevice.converters.mlpackage import write_mlpackage
from ondevice.coreml.package import Package, weights_file
from ondevice.coreml.weights import StoredWeights
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import folded
from ondevice.models.packed import Palettised, Scaled, dense


def least_error(values: np.ndarray, size: int) -> float:
    """Of any palette: dynamic programming over the sorted values (Bellman 1973)."""
    ordered = np.sort(values.astype(np.float64))
    total = np.concatenate([[0], np.cumsum(ordered)])
    square = np.concatenate([[0], np.cumsum(ordered**2)])
    count = len(ordered)
    ends, starts = np.arange(1, count + 1)[:, None], np.arange(count)[None]
    width = np.maximum(ends - starts, 1)
    cost = square[ends] - square[starts] - (total[ends] - total[starts]) ** 2 / width
    cost = np.where(ends > starts, cost, np.inf)
    best = cost[:, 0]
    for _ in range(size - 1):
        best = (np.concatenate([[0], best[:-1]])[None] + cost).min(axis=1)
    return float(best[-1])


@pytest.mark.parametrize("spread", ["normal", "laplace", "outliers"])
def test_a_palette_s_error_is_near_the_least_possible(spread: str) -> None:
    rng = np.random.default_rng(5)
    values = {
        "normal": rng.standard_normal(400),
        "laplace": rng.laplace(size=400),
        "outliers": np.concatenate([rng.standard_normal(390), rng.standard_normal(10) * 20]),
    }[spread].astype(np.float16)
    palette, indices = palette_of(values, 16)
    error = ((palette[indices].astype(np.float64) - values) ** 2).sum()
    assert error <= 1.25 * least_error(values, 16)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), size=st.sampled_from([16, 64]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_every_value_gets_the_nearest_entry_of_an_ascending_palette(
    seed: int, count: int, size: int
) -> None:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float16)
    palette, indices = palette_of(values, size)
    assert len(palette) <= size
    assert (np.diff(palette) > 0).all()
    distance = np.abs(values[:, None].astype(np.float64) - palette[None].astype(np.float64))
    chosen = distance[np.arange(count), indices]
    assert (chosen <= distance.min(axis=1)).all()


def test_few_values_are_stored_exactly() -> None:
    values = np.array([-1.5, 0.0, 2.0, -0.0, 2.0], np.float16)
    palette, indices = palette_of(values, 16)
    assert (palette[indices] == values).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_package_holds_the_compressed_weights_once_and_no_more(
    form: Format, tmp_path: Path
) -> None:
    model = tiny.tiny_model(tied_embeddings=False)
    pack = packer(form)
    weights = folded(model.tensors.__getitem__, model.config, [0, 1], pack, pack)
    functions = [DrafterFunction(model.config, rows, 64) for rows in (1, 8)]
    write_mlpackage([function.source(weights) for function in functions], tmp_path / "d.mlpackage")
    package = Package.open(tmp_path / "d.mlpackage")
    for function in package.functions.values():
        read = StoredWeights(function)
        for index, layer in enumerate(weights.layers):
            stored = read(f"layer{index}_mlp_down_weight")[:, :, 0, 0]
            np.testing.assert_array_equal(stored.astype(np.float16), dense(layer.down))
    blobs = 2 * 7 * 2 + 4  # at most 128 bytes of metadata and alignment each
    size = weights_file(package.path).stat().st_size
    assert weights.nbytes <= size <= weights.nbytes + 128 * (blobs + 6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(128, 96), (24, 40), (7, 5)])
def test_the_size_is_the_one_that_was_computed(form: Format, shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    assert packer(form)(matrix).nbytes == stored_bytes(*shape, form)
    assert shape[0] % group_rows(shape[0]) == 0


def test_errors_fall_in_the_order_of_sizes() -> None:
    matrix = (np.random.default_rng(1).standard_normal((64, 512)) * 0.02).astype(np.float16)
    errors = []
    for form in ("lut4", "lut6", "int8", "fp16"):
        wide = dense(packer(form)(matrix)).astype(np.float32)
        errors.append(float(np.abs(wide - matrix).mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_each_row_of_int8_reaches_its_largest_weight() -> None:
    matrix = np.random.default_rng(1).standard_normal((9, 50)).astype(np.float16)
    matrix[4] = 0
    packed = packer("int8")(matrix)
    assert isinstance(packed, Scaled)
    largest = np.abs(packed.integers.astype(int)).max(axis=1)
    assert sorted(largest)[0] == 0
    assert (np.delete(largest, 4) == 127).all()


def test_a_compressed_drafter_states_what_its_compression_costs(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_folder(tiny.tiny_model(), tmp_path / "source"))
    manifest = convert_drafter(
        checkpoint,
        None,
        tmp_path / "drafter",
        layers=[0, 1],
        row_counts=(1, 8),
        context_sizes=(64,),
        compression=Compression("lut6", "int8"),
    )
    assert manifest.compression == "lut6, head int8"
    assert manifest.embedding_in == "drafter"
    parity = manifest.parity
    assert parity is not None
    assert parity.max_error_rounded < 1e-3
    assert parity.first_choice_agreement is not None
    assert set(parity.functions) == {"t1_s64", "t8_s64"}
    assert isinstance(packer("lut6")(np.ones((16, 4), np.float16)), Palettised)
