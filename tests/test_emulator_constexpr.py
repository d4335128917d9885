"""Compressed constants against coremltools' own decompression, through saved packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlpackages import ct, function, half, mb, save, types

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.ops import CONSTEXPR

rng = np.random.default_rng(7)
Build = Callable[[], Any]


def noise(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def palette(bits: int, indices: tuple[int, ...], blocks: tuple[int, ...], vector: int = 1) -> Build:
    dtype = np.uint8 if bits == 8 else getattr(types, f"np_uint{bits}_dtype")
    picks = rng.integers(0, 2**bits, indices).astype(np.uint8)
    lut = noise(*blocks, 2**bits, vector)
    axis = {} if vector == 1 else {"vector_axis": np.int32(len(indices) - 2)}
    return lambda: mb.constexpr_lut_to_dense(indices=picks.astype(dtype), lut=lut, **axis)


def blockwise(kind: str, data: tuple[int, ...], blocks: tuple[int, ...], offset: Any) -> Build:
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[kind]
    dtype = getattr(types, f"np_{kind}_dtype") if "4" in kind else np.dtype(kind)
    stored = rng.integers(low, high, data).astype(dtype)
    scale = noise(*blocks)
    shift = {
        None: None,
        "same": rng.integers(low, high, blocks).astype(dtype),
        "fp16": noise(*blocks),
    }[offset]
    given = {} if shift is None else {"offset": shift}
    return lambda: mb.constexpr_blockwise_shift_scale(data=stored, scale=scale, **given)


def sparse_bits() -> Build:
    mask = rng.integers(0, 2, (6, 5)).astype(np.uint8)
    values = noise(int(mask.sum()))
    return lambda: mb.constexpr_sparse_to_dense(
        nonzero_data=values, mask=mask.astype(types.np_uint1_dtype)
    )


IOS18: dict[str, Build] = {
    **{f"constexpr_lut_to_dense_{b}": palette(b, (8, 12), (1, 1)) for b in (1, 2, 3, 4, 6, 8)},
    "constexpr_lut_to_dense_few": palette(4, (2, 3), (1, 1)),
    "constexpr_lut_to_dense_groups": palette(4, (8, 12, 1, 1), (4, 1, 1, 1)),
    "constexpr_lut_to_dense_blocks": palette(2, (8, 12), (2, 3)),
    "constexpr_lut_to_dense_vector": palette(2, (4, 6), (2, 1), vector=3),
    "constexpr_lut_to_dense_vector_middle": palette(3, (4, 3, 5), (2, 1, 1), vector=2),
    "constexpr_blockwise_shift_scale": blockwise("int8", (8, 12), (8, 1), None),
    "constexpr_blockwise_shift_scale_4": blockwise("int4", (8, 12), (8, 3), "same"),
    "constexpr_blockwise_shift_scale_u4": blockwise("uint4", (8, 12), (2, 1), "same"),
    "constexpr_blockwise_shift_scale_u8": blockwise("uint8", (8, 12), (1, 1), "same"),
    "constexpr_blockwise_shift_scale_fp": blockwise("int8", (8, 12), (8, 4), "fp16"),
    "constexpr_sparse_to_dense": sparse_bits(),
}


def flat_palette(bits: int) -> Build:
    shape = np.array([5, 7], np.uint32)
    packed = rng.integers(0, 256, -(-35 * bits // 8)).astype(np.uint8)
    lut = noise(2**bits)
    return lambda: mb.constexpr_lut_to_dense(indices=packed, lut=lut, shape=shape)


def affine(axis: int, vector: bool) -> Build:
    data = rng.integers(-128, 128, (5, 7)).astype(np.int8)
    size = data.shape[axis]
    scale = noise(size) if vector else np.float16(0.037)
    zero = rng.integers(-9, 9, size).astype(np.int8) if vector else np.int8(3)
    return lambda: mb.constexpr_affine_dequantize(
        quantized_data=data, zero_point=zero, scale=scale, axis=np.int32(axis)
    )


def flat_sparse() -> Build:
    bits = rng.integers(0, 2, 35).astype(np.uint8)
    values, shape = noise(int(bits.sum())), np.array([5, 7], np.uint32)
    packed = np.packbits(bits, bitorder="little")
    return lambda: mb.constexpr_sparse_to_dense(nonzero_data=values, mask=packed, shape=shape)


def widened() -> Build:
    values = noise(5, 7)
    return lambda: mb.constexpr_cast(source_val=values, output_dtype="fp32")


IOS16: dict[str, Build] = {
    **{f"constexpr_lut_to_dense_{bits}": flat_palette(bits) for bits in (1, 2, 4, 6, 8)},
    "constexpr_affine_dequantize": affine(0, vector=False),
    "constexpr_affine_dequantize_rows": affine(0, vector=True),
    "constexpr_affine_dequantize_columns": affine(1, vector=True),
    "constexpr_sparse_to_dense": flat_sparse(),
    "constexpr_cast": widened(),
}


def weighed(build: Build, seen: dict[str, np.ndarray], name: str) -> Any:
    """The decompressed constant times an input of ones; `seen` gets coremltools' own value."""
    constant = build()
    seen[name] = constant.op.materialized_val_inference()
    if constant.dtype == types.fp32:
        constant = mb.cast(x=constant, dtype="fp16")
    return constant


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_decompressed_weights_are_coremltools_own(tmp_path: Path, precision: Any) -> None:
    seen: dict[str, np.ndarray] = {}
    functions = {
        name: function(
            {"one": half(1)},
            lambda one, name=name, build=build: mb.mul(x=one, y=weighed(build, seen, name)),
        )
        for name, build in IOS18.items()
    }
    emulator = Emulator.open(save(functions, tmp_path / "new.mlpackage"), precision)
    for name in IOS18:
        dtype = emulator.functions[name].inputs["one"].dtype
        (got,) = emulator.predict(name, {"one": np.ones(1, dtype)}).values()
        np.testing.assert_array_equal(got, seen[name].astype(got.dtype), err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_flat_forms_of_ios16_are_coremltools_own(tmp_path: Path, precision: Any) -> None:
    seen: dict[str, np.ndarray] = {}

    def body(one: Any) -> list[Any]:
        return [
            mb.mul(x=one, y=weighed(build, seen, name), name=f"dense_{name}")
            for name, build in IOS16.items()
        ]

    built = function({"one": half(1)}, body, ct.target.iOS16)
    path = save({"main": built}, tmp_path / "old.mlpackage", ct.target.iOS16)
    emulator = Emulator.open(path, precision)
    dtype = emulator.functions["main"].inputs["one"].dtype
    got = emulator.predict("main", {"one": np.ones(1, dtype)})
    assert len(got) == len(IOS16)
    for name in IOS16:
        value = got[f"dense_{name}"]
        np.testing.assert_array_equal(value, seen[name].astype(value.dtype), err_msg=name)


def test_every_constexpr_op_that_the_emulator_knows_is_compared() -> None:
    names = [*IOS18, *IOS16]
    assert {op for op in CONSTEXPR if any(name.startswith(op) for name in names)} == set(CONSTEXPR)


def test_values_of_the_documented_example(tmp_path: Path) -> None:
    """The two-group example of coremltools' constexpr_lut_to_dense, worked by its authors."""
    indices = np.array([2, 3, 3, 0, 1, 0, 3, 0, 2, 1, 0, 3], np.uint8).reshape(6, 2)
    lut = np.float16([1, 5, 9, 13, 2, 10, 18, 26]).reshape(2, 1, 4, 1)

    def body(one: Any) -> Any:
        picks = indices.astype(types.np_uint2_dtype)
        return mb.mul(x=one, y=mb.constexpr_lut_to_dense(indices=picks, lut=lut), name="w")

    emulator = Emulator.open(
        save({"f": function({"one": half(1)}, body)}, tmp_path / "p.mlpackage")
    )
    got = emulator.predict("f", {"one": np.ones(1, np.float32)})["w"]
    assert got.tolist() == [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]
