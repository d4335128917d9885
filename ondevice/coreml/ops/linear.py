"""Ops that multiply matrices: conv, linear, matmul, einsum, attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import FLOAT_TYPES, Kernel, Lowered, Operands, rule


@rule("matmul")
def _matmul(op: Operands) -> Lowered:
    flip_x, flip_y = op.flag("transpose_x", False), op.flag("transpose_y", False)
    if _is_mixed(op, "x", "y"):
        return _mixed_matmul(op, flip_x, flip_y)
    if not flip_x and not flip_y:
        return Lowered(np.matmul, ("x", "y"))
    if flip_y and not flip_x:
        return Lowered(lambda x, y: np.matmul(x, y.swapaxes(-1, -2)), ("x", "y"))
    if flip_x and not flip_y:
        return Lowered(lambda x, y: np.matmul(x.swapaxes(-1, -2), y), ("x", "y"))
    return Lowered(lambda x, y: np.matmul(x.swapaxes(-1, -2), y.swapaxes(-1, -2)), ("x", "y"))


def _is_mixed(op: Operands, *parameters: str) -> bool:
    """Whether floats meet integers, which numpy would widen to double precision."""
    return len({op.type(name).dtype in FLOAT_TYPES for name in parameters if op.has(name)}) > 1


def _mixed_matmul(op: Operands, flip_x: bool, flip_y: bool) -> Lowered:
    dtype = op.result_dtype()

    def kernel(x: Array, y: Array) -> Array:
        wide = [array.astype(np.float32) for array in (x, y)]
        flipped = [
            array.swapaxes(-1, -2) if flip else array
            for array, flip in zip(wide, (flip_x, flip_y), strict=True)
        ]
        product: Array = np.matmul(flipped[0], flipped[1])
        return product.astype(dtype)

    return Lowered(kernel, ("x", "y"))


@rule("linear")
def _linear(op: Operands) -> Lowered:
    weight = op.at_use("weight")
    if _is_mixed(op, "x", "weight", "bias"):
        matrix = op.array("weight").T.astype(np.float32)
        shift = op.array("bias").astype(np.float32) if op.has("bias") else np.float32(0)
        return Lowered(lambda x: np.matmul(x.astype(np.float32), matrix) + shift, ("x",))
    if not op.has("bias"):
        return Lowered(lambda x: np.matmul(x, weight().T), ("x",))
    bias = op.array("bias")
    return Lowered(lambda x: np.matmul(x, weight().T) + bias, ("x",))


@rule("einsum")
def _einsum(op: Operands) -> Lowered:
    equation = op.text("equation", "").replace(" ", "")
    terms, _, result = equation.partition("->")
    first, _, second = terms.partition(",")
    rank = len(first)
    lead = first[:-3]
    fits = (
        rank in (3, 4)
        and len(second) == rank
        and second == f"{lead}{first[-1]}{first[-2]}{second[-1]}"
        and result == f"{lead}{first[-3]}{first[-2]}{second[-1]}"
        and len(set(first + second[-1])) == rank + 1
    )
    if not fits:
        raise op.refuse(f"equation {equation!r}")

    def kernel(x: Array, y: Array) -> Array:
        # (..., c, h, w) x (..., w, h, u): h becomes a batch axis of one matrix product.
        product: Array = np.matmul(x.swapaxes(-3, -2), y.swapaxes(-3, -2))
        return product.swapaxes(-3, -2)

    return Lowered(kernel, ("values",))


@rule("scaled_dot_product_attention")
def _attention(op: Operands) -> Lowered:
    scale = np.float32(1 / math.sqrt(op.type("query").shape[-1]))
    masked = op.has("attn_mask")
    boolean = masked and op.type("attn_mask").dtype == "bool"

    def kernel(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
        scores = np.matmul(query * scale, key.swapaxes(-1, -2))
        if mask is not None:
            scores = np.where(mask, scores, np.float32(-np.inf)) if boolean else scores + mask
        scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= np.add.reduce(scores, axis=-1, keepdims=True)
        result: Array = np.matmul(scores, value)
        return result

    reads = ("query", "key", "value", "attn_mask")
    return Lowered(kernel, reads if masked else reads[:3])


@rule("conv")
def _conv(op: Operands) -> Lowered:
    shape = op.type("weight").shape
    spatial = len(shape) - 2
    ones = (1,) * spatial
    strides, dilations = op.integers("strides", ones), op.integers("dilations", ones)
    groups = op.integer("groups", 1)
    padding = _padding(op, shape[2:], strides, dilations)
    bias = op.array("bias").reshape(-1, *ones) if op.has("bias") else None
    pointwise = shape[2:] == strides == ones and not any(padding)
    if not op.is_constant("weight"):
        raise op.refuse("a weight that is computed at run time")
    if pointwise and groups == 1:
        kernel = _pointwise(op.at_use("weight"), shape, op.type("x").shape)
    else:
        kernel = _windowed(op.array("weight"), strides, dilations, groups, padding)
    if bias is None:
        return Lowered(kernel, ("x",))
    return Lowered(lambda x: kernel(x) + bias, ("x",))


def _pointwise(
    weight: Callable[[], Array], weight_shape: tuple[int, ...], shape: tuple[int, ...]
) -> Kernel:
    """A kernel of size 1: one matrix product per batch entry.

    `W @ x` beat `x.T @ W.T` and copies of W.T for (576..16384) x (576..1536) weights: equal for one
    column, up to twice as fast for 8, 1.0 to 1.5 times for 64 (OpenBLAS, one thread).
    """
    sizes = weight_shape[:2]
    batch, channels, *extent = shape
    result = (batch, sizes[0], *extent)
    columns = math.prod(extent)
    if batch == 1:
        return lambda x: np.dot(weight().reshape(sizes), x.reshape(channels, columns)).reshape(
            result
        )
    return lambda x: np.matmul(
        weight().reshape(sizes), x.reshape(batch, channels, columns)
    ).reshape(result)


def _windowed(
    weight: Array,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int,
    padding: tuple[int, ...],
) -> Kernel:
    """The general convolution: every window as a row of one matrix, group by group."""
    spatial = weight.ndim - 2
    axes = tuple(range(2, 2 + spatial))
    spans = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True))
    widths = [(0, 0), (0, 0), *zip(padding[::2], padding[1::2], strict=True)]
    steps = tuple(slice(None, None, stride) for stride in strides)
    taps = tuple(slice(None, None, dilation) for dilation in dilations)
    matrices = weight.reshape(groups, weight.shape[0] // groups, -1)

    def kernel(x: Array) -> Array:
        windows = sliding_window_view(np.pad(x, widths), spans, axis=axes)
        windows = windows[(slice(None), slice(None), *steps, *taps)]
        batch, _channels, *extent = windows.shape[: 2 + spatial]
        rows = np.moveaxis(windows, 1, 1 + spatial).reshape(batch, -1, groups, matrices.shape[2])
        product: Array = np.einsum("bpgk,gok->bgop", rows, matrices, optimize=True)
        return product.reshape(batch, weight.shape[0], *extent)

    return kernel


def _padding(
    op: Operands, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> tuple[int, ...]:
    """Elements to add before and after each spatial axis: (before_0, after_0, before_1, ...)."""
    mode = op.text("pad_type", "valid")
    if mode == "valid":
        return (0,) * (2 * len(kernel))
    if mode == "custom":
        return op.integers("pad", (0,) * (2 * len(kernel)))
    spans = [(size - 1) * step for size, step in zip(kernel, dilations, strict=True)]
    # The documentation contradicts itself where `same` is not symmetric.
    if mode in ("same", "same_lower") and not any(s % 2 for s in spans) and set(strides) == {1}:
        return tuple(span // 2 for span in spans for _ in range(2))
    raise op.refuse(f"pad_type {mode} with kernel {kernel} and strides {strides}")
