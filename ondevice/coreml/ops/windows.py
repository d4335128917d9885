"""Ops over windows of an image or signal: pooling, transposed convolution, blocks to depth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import Lowered, Operands, rule

Sizes = tuple[int, ...]


def _pool_padding(op: Operands, kernel: Sizes, strides: Sizes, extent: Sizes) -> list[int]:
    mode = op.text("pad_type", "valid")
    pads = [0] * (2 * len(kernel))
    if mode == "custom":
        pads = list(op.integers("pad", tuple(pads)))
    elif mode in ("same", "same_lower"):
        for axis, (size, stride, length) in enumerate(zip(kernel, strides, extent, strict=True)):
            total = max((-(-length // stride) - 1) * stride + size - length, 0)
            small, large = total // 2, total - total // 2
            pads[2 * axis : 2 * axis + 2] = [small, large] if mode == "same" else [large, small]
    if op.flag("ceil_mode", False):
        for axis, (size, stride, length) in enumerate(zip(kernel, strides, extent, strict=True)):
            rest = (length + pads[2 * axis] + pads[2 * axis + 1] - size) % stride
            pads[2 * axis + 1] += (stride - rest) % stride
    return pads


def _windows(x: Array, kernel: Sizes, strides: Sizes, pads: Sequence[int], fill: float) -> Array:
    """Every window of x (n, C, ...): (n, C, windows..., kernel...)."""
    spatial = len(kernel)
    widths = [(0, 0), (0, 0), *zip(pads[::2], pads[1::2], strict=True)]
    padded = np.pad(x, widths, constant_values=fill)
    view = sliding_window_view(padded, kernel, axis=tuple(range(2, 2 + spatial)))
    return view[(slice(None), slice(None), *(slice(None, None, step) for step in strides))]


def _pool(op: Operands, fill: float, reduce: Callable[[Array, Sizes, Array], Array]) -> Lowered:
    kernel = op.integers("kernel_sizes", ())
    strides = op.integers("strides", (1,) * len(kernel))
    extent = op.type("x").shape[2:]
    pads = _pool_padding(op, kernel, strides, extent)
    axes = tuple(range(-len(kernel), 0))
    whole = np.ones((1, 1, *extent), np.float32)
    counts = _windows(whole, kernel, strides, pads, 0).sum(axes)
    if not op.flag("exclude_padding_from_average", False):
        counts = np.full_like(counts, math.prod(kernel))
    return Lowered(lambda x: reduce(_windows(x, kernel, strides, pads, fill), axes, counts), ("x",))


@rule("max_pool", moves=True)
def _max_pool(op: Operands) -> Lowered:
    return _pool(op, -math.inf, lambda windows, axes, _: windows.max(axes))


@rule("avg_pool")
def _avg_pool(op: Operands) -> Lowered:
    return _pool(op, 0.0, lambda windows, axes, counts: windows.sum(axes) / counts)


@rule("l2_pool")
def _l2_pool(op: Operands) -> Lowered:
    return _pool(op, 0.0, lambda windows, axes, _: np.sqrt(np.square(windows).sum(axes)))


@rule("conv_transpose")
def _conv_transpose(op: Operands) -> Lowered:
    weight = op.array("weight")
    kernel = weight.shape[2:]
    ones = (1,) * len(kernel)
    strides, dilations = op.integers("strides", ones), op.integers("dilations", ones)
    groups = op.integer("groups", 1)
    bias = op.array("bias").reshape(-1, *ones) if op.has("bias") else np.float32(0)
    out, extent = op.result.shape, op.type("x").shape[2:]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    whole = [(n - 1) * s + k for n, s, k in zip(extent, strides, spans, strict=True)]
    begin = _cut(op, whole, out[2:])

    size = [max(w, b + n) for w, b, n in zip(whole, begin, out[2:], strict=True)]
    cut = tuple(slice(b, b + n) for b, n in zip(begin, out[2:], strict=True))
    weights = weight.reshape(groups, -1, *weight.shape[1:])

    def run(x: Array) -> Array:
        grid = np.zeros((x.shape[0], out[1], *size), np.float32)
        parts = x.reshape(x.shape[0], groups, -1, *extent)
        for tap in itertools.product(*map(range, kernel)):
            of_tap: Any = (slice(None), slice(None), slice(None), *tap)
            factor = weights[of_tap]
            product = np.einsum("ngc...,gco->ngo...", parts, factor)
            at = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, extent, strides, strict=True)
            )
            grid[(slice(None), slice(None), *at)] += product.reshape(x.shape[0], out[1], *extent)
        result: Array = grid[(slice(None), slice(None), *cut)] + bias
        return result

    return Lowered(run, ("x",))  # fmt: skip


def _cut(op: Operands, whole: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Elements to leave out at the start of each axis."""
    mode = op.text("pad_type", "valid")
    if mode == "custom":
        return list(op.integers("pad", (0,) * (2 * len(whole)))[::2])
    if mode in ("same", "same_lower"):
        lost = [max(a - b, 0) for a, b in zip(whole, wanted, strict=True)]
        return [n // 2 if mode == "same" else n - n // 2 for n in lost]
    return [0] * len(whole)


@rule("depth_to_space", "pixel_shuffle", moves=True)
def _to_space(op: Operands) -> Lowered:
    n, channels, height, width = op.type("x").shape
    shuffles = op.op.type == "pixel_shuffle"
    size = op.integer("upscale_factor" if shuffles else "block_size", 1)
    rest = channels // size**2
    split = (
        (n, rest, size, size, height, width) if shuffles else (n, size, size, rest, height, width)
    )
    order = (0, 1, 4, 2, 5, 3) if shuffles else (0, 3, 4, 1, 5, 2)
    shape = op.result.shape
    return Lowered(lambda x: x.reshape(split).transpose(order).reshape(shape), ("x",))


@rule("space_to_depth", "pixel_unshuffle", moves=True)
def _to_depth(op: Operands) -> Lowered:
    n, channels, height, width = op.type("x").shape
    shuffles = op.op.type == "pixel_unshuffle"
    size = op.integer("downscale_factor" if shuffles else "block_size", 1)
    split = (n, channels, height // size, size, width // size, size)
    order = (0, 1, 3, 5, 2, 4) if shuffles else (0, 3, 5, 1, 2, 4)
    shape = op.result.shape
    return Lowered(lambda x: x.reshape(split).transpose(order).reshape(shape), ("x",))


@rule("sliding_windows", moves=True)
def _sliding_windows(op: Operands) -> Lowered:
    axis = op.integer("axis", 0) % len(op.type("x").shape)
    size, stride = op.integer("size", 1), op.integer("stride", 1)
    step = (*(slice(None),) * axis, slice(None, None, stride))

    def kernel(x: Array) -> Array:
        windows = sliding_window_view(x, size, axis)[step]
        return np.moveaxis(windows, -1, axis + 1)

    return Lowered(kernel, ("x",))


@rule("crop", moves=True)
def _crop(op: Operands) -> Lowered:
    (top, bottom), (left, right) = (
        op.integers("crop_height", (0, 0)),
        op.integers("crop_width", (0, 0)),
    )
    height, width = op.type("x").shape[-2:]
    index = (..., slice(top, height - bottom), slice(left, width - right))
    return Lowered(lambda x: x[index], ("x",))


@rule("upsample_nearest_neighbor", moves=True)
def _upsample(op: Operands) -> Lowered:
    height, width = op.type("x").shape[-2:]
    tall, wide = op.result.shape[-2:]
    rows, columns = np.arange(tall) * height // tall, np.arange(wide) * width // wide
    return Lowered(lambda x: x[..., rows[:, None], columns], ("x",))
