"""Compressed constants: every constexpr op, decompressed once when a program is opened.

These work on values as they are stored and give the declared type, so that the weights are exactly
those of the package: half-precision results are rounded to half precision in either mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ondevice.coreml.blob import Array, unpack

Stored = Mapping[str, Array]


def _round_like(values: Array, dtype: np.dtype[Any]) -> Array:
    """float32 `values` rounded to `dtype` and widened again."""
    return values.astype(dtype).astype(np.float32)


def _lut_to_dense(stored: Stored) -> Array:
    """Palettised weights; iOS16: packed flat indices with `shape`, iOS18: a LUT per block."""
    lut = stored["lut"]
    if "shape" in stored:
        shape = tuple(int(n) for n in stored["shape"])
        bits = int(lut.size).bit_length() - 1
        result: Array = lut[unpack(stored["indices"], f"uint{bits}", shape)]
        return result
    indices = stored["indices"]
    blocks, palette, vector = lut.shape[:-2], lut.shape[-2], lut.shape[-1]
    if vector == 1 and math.prod(blocks) == blocks[0]:
        return _rows_looked_up(indices, lut.reshape(blocks[0], palette))
    table = lut.reshape(-1, vector)
    split = [n for size, b in zip(indices.shape, blocks, strict=True) for n in (b, size // b)]
    base: Array = np.arange(math.prod(blocks), dtype=np.int32) * palette
    starts = base.reshape([n for b in blocks for n in (b, 1)])
    picks: Array = (indices.reshape(split) + starts).reshape(indices.shape)
    dense: Array = table[picks]
    if vector == 1:
        return dense[..., 0]
    axis = int(stored["vector_axis"].item()) % indices.ndim
    shape = tuple(n * vector if i == axis else n for i, n in enumerate(indices.shape))
    return np.moveaxis(dense, -1, axis + 1).reshape(shape)


def _rows_looked_up(indices: Array, palettes: Array) -> Array:
    """Groups of consecutive rows, each with a palette: one group at a time stays in the cache."""
    dense = np.empty((len(palettes), indices.size // len(palettes)), palettes.dtype)
    for row, group, palette in zip(dense, indices.reshape(dense.shape), palettes, strict=True):
        palette.take(group, out=row, mode="clip")
    return dense.reshape(indices.shape)


def _blockwise_shift_scale(stored: Stored) -> Array:
    """scale * (data - offset), with one scale and offset per block."""
    data, scale = stored["data"], stored["scale"]
    blocks = [n // m for n, m in zip(data.shape, scale.shape, strict=True)]
    values = _round_like(data, scale.dtype)
    if "offset" in stored:
        values -= _spread(stored["offset"], blocks).astype(np.float32)
        values = _round_like(values, scale.dtype)
    values *= _spread(scale, blocks)
    return values.astype(scale.dtype)


def _spread(values: Array, blocks: list[int]) -> Array:
    for axis, size in enumerate(blocks):
        if size > 1:
            values = np.repeat(values, size, axis)
    return values


def _affine_dequantize(stored: Stored) -> Array:
    """scale * (quantized_data - zero_point), scalars or vectors along `axis`."""
    data, scale = stored["quantized_data"], stored["scale"]
    along = [1] * data.ndim
    along[int(stored["axis"].item())] = -1

    def broadcast(values: Array) -> Array:
        return values.astype(np.float32).reshape(along if values.ndim else ())

    values = data.astype(np.float32) - broadcast(stored["zero_point"])
    values *= broadcast(scale)
    return values.astype(scale.dtype)


def _sparse_to_dense(stored: Stored) -> Array:
    """Non-zero elements at the set bits of a mask; iOS16 packs the mask and names the shape."""
    mask = stored["mask"]
    if "shape" in stored:
        mask = unpack(mask, "uint1", tuple(int(n) for n in stored["shape"]))
    dense = np.zeros(mask.shape, stored["nonzero_data"].dtype)
    dense[mask != 0] = stored["nonzero_data"]
    return dense


def _cast(stored: Stored) -> Array:
    """fp16 as fp32, the only cast that the format knows."""
    return stored["source_val"].astype(np.float32)


CONSTEXPR: dict[str, Callable[[Stored], Array]] = {
    "constexpr_affine_dequantize": _affine_dequantize,
    "constexpr_blockwise_shift_scale": _blockwise_shift_scale,
    "constexpr_cast": _cast,
    "constexpr_lut_to_dense": _lut_to_dense,
    "constexpr_sparse_to_dense": _sparse_to_dense,
}
