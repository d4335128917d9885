"""Ops that write by index, and that make tensors of numbers: scatter, gather_nd, one_hot, range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import Lowered, Operands, rule
from ondevice.errors import UnitFailed

_MODES: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _writer(op: Operands) -> Callable[[Array, Any, Array], None]:
    mode = op.text("mode", "add")
    if mode == "update":
        return np.ndarray.__setitem__
    if mode not in _MODES:
        raise op.refuse(f"mode {mode}")
    write: Callable[[Array, Any, Array], None] = _MODES[mode].at
    return write


def _checker(op: Operands, axes: Sequence[int]) -> Callable[[Sequence[Array]], None]:
    """Refuses indices outside `axes` of `data`, one array for each, where the op asks for it."""
    sizes = [op.type("data").shape[axis] for axis in axes]

    def check(indices: Sequence[Array]) -> None:
        for size, places in zip(sizes, indices, strict=True):
            if places.size and not 0 <= places.min() <= places.max() < size:
                raise UnitFailed(
                    f"{op.op.type} ({op.op.name}): expected indices from 0 to {size - 1}, got "
                    f"{places.min()} to {places.max()}; correct the model's input"
                )

    return check if op.flag("validate_indices", False) else lambda _: None


@rule("scatter")
def _scatter(op: Operands) -> Lowered:
    axis, write = op.integer("axis", 0) % len(op.type("data").shape), _writer(op)
    check = _checker(op, [axis])

    def kernel(data: Array, indices: Array, updates: Array) -> Array:
        check([indices])
        result = data.copy()
        write(result, (*(slice(None),) * axis, indices), updates)
        return result

    return Lowered(kernel, ("data", "indices", "updates"))


@rule("scatter_along_axis")
def _scatter_along_axis(op: Operands) -> Lowered:
    axis, write = op.integer("axis", 0) % len(op.type("data").shape), _writer(op)
    check = _checker(op, [axis])

    def kernel(data: Array, indices: Array, updates: Array) -> Array:
        check([indices])
        result = data.copy()
        places: list[Array] = list(np.indices(indices.shape, sparse=True))
        places[axis] = indices
        write(result, tuple(places), updates)
        return result

    return Lowered(kernel, ("data", "indices", "updates"))


@rule("scatter_nd")
def _scatter_nd(op: Operands) -> Lowered:
    write = _writer(op)
    check = _checker(op, range(op.type("indices").shape[-1]))

    def kernel(data: Array, indices: Array, updates: Array) -> Array:
        places = tuple(np.moveaxis(indices, -1, 0))
        check(places)
        result = data.copy()
        write(result, places, updates)
        return result

    return Lowered(kernel, ("data", "indices", "updates"))


@rule("gather_nd", moves=True)
def _gather_nd(op: Operands) -> Lowered:
    batch = op.integer("batch_dims", 0)

    def kernel(x: Array, indices: Array) -> Array:
        lead = np.indices(indices.shape[:batch], sparse=True)
        inner = indices.ndim - 1 - batch
        places = [axis.reshape(axis.shape + (1,) * inner) for axis in lead]
        picked: Array = x[(*places, *np.moveaxis(indices, -1, 0))]
        return picked

    return Lowered(kernel, ("x", "indices"))


@rule("one_hot")
def _one_hot(op: Operands) -> Lowered:
    size, axis = op.integer("one_hot_vector_size", 0), op.integer("axis", -1)
    dtype = op.result_dtype()
    on, off = (
        op.array(name).item() if op.has(name) else default
        for name, default in (("on_value", 1), ("off_value", 0))
    )

    def kernel(indices: Array) -> Array:
        hot = indices[..., None] == np.arange(size)
        return np.moveaxis(np.where(hot, on, off).astype(dtype), -1, axis)

    return Lowered(kernel, ("indices",))


@rule("range_1d")
def _range(op: Operands) -> Lowered:
    start, end, step = (op.array(name).item() for name in ("start", "end", "step"))
    values = np.arange(start, end, step).astype(op.result_dtype())
    return Lowered(lambda: values, ())


@rule("fill_like", moves=True)
def _fill_like(op: Operands) -> Lowered:
    value = op.array("value").item() if op.has("value") else 0
    filled = np.full(op.result.shape, value, op.result_dtype())
    return Lowered(lambda: filled, ())


@rule("shape", moves=True)
def _shape(op: Operands) -> Lowered:
    shape = np.array(op.type("x").shape, op.result_dtype())
    return Lowered(lambda: shape, ())


@rule("band_part", moves=True)
def _band_part(op: Operands) -> Lowered:
    rows, columns = op.type("x").shape[-2:]
    lower, upper = op.integer("lower", -1), op.integer("upper", -1)
    gap = np.arange(rows)[:, None] - np.arange(columns)
    kept = ((lower < 0) | (gap <= lower)) & ((upper < 0) | (-gap <= upper))
    return Lowered(lambda x: np.where(kept, x, x.dtype.type(0)), ("x",))
