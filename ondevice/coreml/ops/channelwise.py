"""Ops with a parameter for each channel: norms, parametric activations, quantisation."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import Lowered, Operands, rule


def _per_channel(op: Operands, parameter: str, axis: int = 1) -> Array:
    """A vector along `axis` of x, or a scalar."""
    values, rank = op.array(parameter), len(op.type("x").shape)
    if values.size == 1:
        return values.reshape(())
    shape = [1] * rank
    shape[axis % rank] = -1
    return values.reshape(shape)


@rule("batch_norm")
def _batch_norm(op: Operands) -> Lowered:
    mean, variance = _per_channel(op, "mean"), _per_channel(op, "variance")
    scale = np.float32(1) / np.sqrt(variance + op.number("epsilon", 1e-5))
    if op.has("gamma"):
        scale = scale * _per_channel(op, "gamma")
    shift = _per_channel(op, "beta") if op.has("beta") else np.float32(0)
    return Lowered(lambda x: (x - mean) * scale + shift, ("x",))


@rule("instance_norm")
def _instance_norm(op: Operands) -> Lowered:
    axes = tuple(range(2, len(op.type("x").shape)))
    epsilon = op.number("epsilon", 1e-5)
    gamma = _per_channel(op, "gamma") if op.has("gamma") else np.float32(1)
    beta = _per_channel(op, "beta") if op.has("beta") else np.float32(0)

    def kernel(x: Array) -> Array:
        centred = x - x.mean(axes, keepdims=True)
        variance = np.square(centred).mean(axes, keepdims=True)
        result: Array = centred / np.sqrt(variance + epsilon) * gamma + beta
        return result

    return Lowered(kernel, ("x",))


@rule("local_response_norm")
def _local_response_norm(op: Operands) -> Lowered:
    size = op.integer("size", 1)
    alpha, beta, k = op.number("alpha", 1e-4), op.number("beta", 0.75), op.number("k", 1.0)

    def kernel(x: Array) -> Array:
        before = (size - 1) // 2
        widths = [(0, 0)] * x.ndim
        widths[1] = (before, size - 1 - before)
        squares = sliding_window_view(np.pad(np.square(x), widths), size, 1).sum(-1)
        result: Array = x / (k + alpha / np.float32(size) * squares) ** beta
        return result

    return Lowered(kernel, ("x",))


@rule("prelu")
def _prelu(op: Operands) -> Lowered:
    alpha = _per_channel(op, "alpha")
    return Lowered(lambda x: np.where(x >= 0, x, alpha * x), ("x",))


@rule("softplus_parametric")
def _softplus_parametric(op: Operands) -> Lowered:
    alpha, beta = _per_channel(op, "alpha"), _per_channel(op, "beta")
    return Lowered(lambda x: alpha * np.logaddexp(np.float32(0), beta * x), ("x",))


@rule("clamped_relu")
def _clamped_relu(op: Operands) -> Lowered:
    alpha, beta = op.number("alpha", 1.0), op.number("beta", 1.0)
    return Lowered(lambda x: np.minimum(np.where(x >= 0, x, alpha * x), beta), ("x",))


@rule("thresholded_relu")
def _thresholded_relu(op: Operands) -> Lowered:
    alpha = op.number("alpha", 1.0)
    return Lowered(lambda x: np.where(x >= alpha, x, np.float32(0)), ("x",))


def _along(op: Operands, parameter: str) -> Array:
    values = op.array(parameter).astype(np.float32)
    if values.ndim == 0:
        return values
    shape = [1] * len(op.type("input").shape)
    shape[op.integer("axis", 0)] = -1
    return values.reshape(shape)


@rule("quantize")
def _quantize(op: Operands) -> Lowered:
    scale, dtype = _along(op, "scale"), op.result_dtype()
    zero = _along(op, "zero_point") if op.has("zero_point") else np.float32(0)
    limits = np.iinfo(dtype)
    return Lowered(
        lambda x: np.clip(np.rint(x / scale) + zero, limits.min, limits.max).astype(dtype),
        ("input",),
    )


@rule("dequantize")
def _dequantize(op: Operands) -> Lowered:
    scale = _along(op, "scale")
    zero = _along(op, "zero_point") if op.has("zero_point") else np.float32(0)
    return Lowered(lambda x: (x.astype(np.float32) - zero) * scale, ("input",))
