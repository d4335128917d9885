"""Ops that move elements: reshape, transpose, slices, concat, gather, pad."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import Lowered, Operands, rule

Indices = Sequence[int] | Array


@rule("reshape", "expand_dims", "squeeze", "flatten2d", moves=True)
def _reshape(op: Operands) -> Lowered:
    shape = op.result.shape
    if -1 in shape:
        raise op.refuse("a shape that is computed at run time")
    if math.prod(shape) != math.prod(op.type("x").shape):
        raise op.refuse(f"{op.type('x').shape} as {shape}")
    return Lowered(lambda x: x.reshape(shape), ("x",))


@rule("transpose", moves=True)
def _transpose(op: Operands) -> Lowered:
    order = op.integers("perm", ())
    return Lowered(lambda x: x.transpose(order), ("x",))


@rule("concat", moves=True)
def _concat(op: Operands) -> Lowered:
    axis = op.integer("axis", 0)
    if not op.type("values").shape:
        return Lowered(lambda *values: np.stack(values, axis), ("values",))
    if not op.flag("interleave", False):
        return Lowered(lambda *values: np.concatenate(values, axis), ("values",))
    shape = op.result.shape
    inner = axis % len(shape) + 1
    return Lowered(lambda *values: np.stack(values, inner).reshape(shape), ("values",))


@rule("stack", moves=True)
def _stack(op: Operands) -> Lowered:
    axis = op.integer("axis", 0)
    return Lowered(lambda *values: np.stack(values, axis), ("values",))


@rule("split", moves=True)
def _split(op: Operands) -> Lowered:
    axis = op.integer("axis", 0) % len(op.type("x").shape)
    ends = list(itertools.accumulate(output.type.shape[axis] for output in op.op.outputs))
    if ends[-1] != op.type("x").shape[axis]:
        raise op.refuse(f"parts of {ends[-1]} for an axis of {op.type('x').shape[axis]}")
    prefix = (slice(None),) * axis
    parts = [(*prefix, slice(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
    return Lowered(lambda x: tuple(x[part] for part in parts), ("x",))


@rule("tile", moves=True)
def _tile(op: Operands) -> Lowered:
    repeats = op.integers("reps", ())
    return Lowered(lambda x: np.tile(x, repeats), ("x",))


@rule("reverse", moves=True)
def _reverse(op: Operands) -> Lowered:
    axes = op.integers("axes", tuple(range(len(op.type("x").shape))))
    return Lowered(lambda x: np.flip(x, axes), ("x",))


@rule("pad", moves=True)
def _pad(op: Operands) -> Lowered:
    widths = op.integers("pad", ())
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    pairs = [(0, 0)] * (len(op.type("x").shape) - len(pairs)) + pairs
    mode = op.text("mode", "constant")
    if mode == "constant":
        fill = op.number("constant_val", 0.0)
        return Lowered(lambda x: np.pad(x, pairs, constant_values=fill), ("x",))
    if mode == "reflect":
        return Lowered(lambda x: np.pad(x, pairs, mode="reflect"), ("x",))
    if mode == "replicate":
        return Lowered(lambda x: np.pad(x, pairs, mode="edge"), ("x",))
    raise op.refuse(f"mode {mode}")


@rule("fill", moves=True)
def _fill(op: Operands) -> Lowered:
    shape, dtype = op.integers("shape", ()), op.result_dtype()
    value = op.array("value").item() if op.has("value") else 0
    return Lowered(lambda: np.full(shape, value, dtype), ())


@rule("gather", moves=True)
def _gather(op: Operands) -> Lowered:
    axis = op.integer("axis", 0) % len(op.type("x").shape)
    batch = op.integer("batch_dims", 0)
    if batch == 0:
        return Lowered(lambda x, indices: np.take(x, indices, axis), ("x", "indices"))
    if axis < batch:
        raise op.refuse(f"axis {axis} among {batch} batch_dims")

    def kernel(x: Array, indices: Array) -> Array:
        lead = x.shape[:batch]
        rows = x.reshape(-1, *x.shape[batch:])
        picks = indices.reshape(-1, *indices.shape[batch:])
        taken = [np.take(r, p, axis - batch) for r, p in zip(rows, picks, strict=True)]
        return np.stack(taken).reshape(*lead, *taken[0].shape)

    return Lowered(kernel, ("x", "indices"))


@rule("gather_along_axis", moves=True)
def _gather_along_axis(op: Operands) -> Lowered:
    axis = op.integer("axis", 0)
    return Lowered(lambda x, indices: np.take_along_axis(x, indices, axis), ("x", "indices"))


class _Slicer:
    """begin, end and masks of a slice_by_index or slice_update -> numpy slices."""

    def __init__(self, op: Operands) -> None:
        rank = len(op.type("x").shape)
        self._strides = op.integers("stride", (1,) * rank)
        self._skip_begin = op.integers("begin_mask", (0,) * rank)
        self._skip_end = op.integers("end_mask", (0,) * rank)
        self._single = op.integers("squeeze_mask", (0,) * rank)

    def __call__(self, begin: Indices, end: Indices) -> tuple[slice | int, ...]:
        index: list[slice | int] = []
        for axis, stride in enumerate(self._strides):
            start = None if self._skip_begin[axis] else int(begin[axis])
            if self._single[axis]:
                index.append(start or 0)
            else:
                stop = None if self._skip_end[axis] else int(end[axis])
                index.append(slice(start, stop, stride))
        return tuple(index)


@rule("slice_by_index", moves=True)
def _slice_by_index(op: Operands) -> Lowered:
    slicer = _Slicer(op)
    if op.is_constant("begin", "end"):
        index = slicer(op.integers("begin", ()), op.integers("end", ()))
        return Lowered(lambda x: x[index], ("x",))
    return Lowered(lambda x, begin, end: x[slicer(begin, end)], ("x", "begin", "end"))


@rule("slice_by_size", moves=True)
def _slice_by_size(op: Operands) -> Lowered:
    extent = op.type("x").shape
    sizes = op.integers("size", ())

    def window(begin: Indices) -> tuple[slice, ...]:
        starts = [int(b) % n if b < 0 else int(b) for b, n in zip(begin, extent, strict=True)]
        return tuple(
            slice(start, None if size < 0 else start + size)
            for start, size in zip(starts, sizes, strict=True)
        )

    if op.is_constant("begin"):
        index = window(op.integers("begin", ()))
        return Lowered(lambda x: x[index], ("x",))
    return Lowered(lambda x, begin: x[window(begin)], ("x", "begin"))


@rule("slice_update", moves=True)
def _slice_update(op: Operands) -> Lowered:
    slicer = _Slicer(op)

    def kernel(x: Array, update: Array, begin: Array, end: Array) -> Array:
        result = x.copy()
        result[slicer(begin, end)] = update
        return result

    return Lowered(kernel, ("x", "update", "begin", "end"))
