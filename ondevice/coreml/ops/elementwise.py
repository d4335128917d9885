"""Ops that work element by element: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import FLOAT_TYPES, Kernel, Lowered, Operands, rule

_BINARY: dict[str, Kernel] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floor_div": np.floor_divide,
    "mod": np.mod,
}
_SELECTING: dict[str, Kernel] = {"maximum": np.maximum, "minimum": np.minimum}
_COMPARING: dict[str, Kernel] = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """Error function, element by element in double precision, as float32."""
    result: Array = np.asarray(_erf(x)).astype(np.float32)
    return result


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); an overflowing exponential gives exactly 0."""
    y = np.exp(-x)
    y += np.float32(1)
    result: Array = np.divide(np.float32(1), y)
    return result


def silu(x: Array) -> Array:
    """x / (1 + exp(-x))."""
    y = np.exp(-x)
    y += np.float32(1)
    result: Array = np.divide(x, y)
    return result


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow for large x."""
    result: Array = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)
    return result


_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": erf,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "logical_not": np.logical_not,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.minimum(np.maximum(x, 0), 6),
    "round": np.round,
    "sigmoid": sigmoid,
    "sign": np.sign,
    "silu": silu,
    "sin": np.sin,
    "sinh": np.sinh,
    "softplus": softplus,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
}


@rule(*_BINARY)
def _binary(op: Operands) -> Lowered:
    return Lowered(_BINARY[op.op.type], ("x", "y"))


@rule(*_SELECTING, moves=True)
def _selecting(op: Operands) -> Lowered:
    return Lowered(_SELECTING[op.op.type], ("x", "y"))


@rule(*_COMPARING)
def _comparing(op: Operands) -> Lowered:
    return Lowered(_COMPARING[op.op.type], ("x", "y"))


@rule("real_div")
def _real_div(op: Operands) -> Lowered:
    op.require_float("x")
    op.require_float("y")
    return Lowered(np.divide, ("x", "y"))


@rule("pow")
def _pow(op: Operands) -> Lowered:
    op.require_float("x")
    op.require_float("y")
    return Lowered(np.power, ("x", "y"))


@rule(*_UNARY)
def _unary(op: Operands) -> Lowered:
    return Lowered(_UNARY[op.op.type], ("x",))


@rule("gelu")
def _gelu(op: Operands) -> Lowered:
    mode = op.text("mode", "EXACT")
    half, one = np.float32(0.5), np.float32(1)
    if mode == "EXACT":
        root = np.float32(math.sqrt(0.5))
        return Lowered(lambda x: half * x * (one + erf(x * root)), ("x",))
    if mode == "TANH_APPROXIMATION":
        scale, cubic = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
        return Lowered(lambda x: half * x * (one + np.tanh(scale * (x + cubic * x**3))), ("x",))
    if mode == "SIGMOID_APPROXIMATION":
        return Lowered(lambda x: x * sigmoid(np.float32(1.702) * x), ("x",))
    raise op.refuse(f"mode {mode}")


@rule("log")
def _log(op: Operands) -> Lowered:
    epsilon = op.number("epsilon", 1e-45)
    return Lowered(lambda x: np.log(x + epsilon), ("x",))


@rule("rsqrt")
def _rsqrt(op: Operands) -> Lowered:
    epsilon = op.number("epsilon", 1e-12)
    return Lowered(lambda x: np.float32(1) / np.sqrt(x + epsilon), ("x",))


@rule("inverse")
def _inverse(op: Operands) -> Lowered:
    epsilon = op.number("epsilon", 1e-4)
    return Lowered(lambda x: np.float32(1) / (x + epsilon), ("x",))


@rule("clip")
def _clip(op: Operands) -> Lowered:
    low, high = op.number("alpha", -math.inf), op.number("beta", math.inf)
    return Lowered(lambda x: np.minimum(np.maximum(x, low), high), ("x",))


@rule("threshold")
def _threshold(op: Operands) -> Lowered:
    low = op.number("alpha", 0.0)
    return Lowered(lambda x: np.maximum(x, low), ("x",))


@rule("leaky_relu", "elu", "linear_activation", "scaled_tanh", "sigmoid_hard")
def _parametric(op: Operands) -> Lowered:
    a, b = op.number("alpha", 1.0), op.number("beta", 0.0)
    kernels: dict[str, Callable[[Array], Array]] = {
        "leaky_relu": lambda x: np.where(x < 0, a * x, x),
        "elu": lambda x: np.where(x < 0, a * np.expm1(x), x),
        "linear_activation": lambda x: a * x + b,
        "scaled_tanh": lambda x: a * np.tanh(b * x),
        "sigmoid_hard": lambda x: np.minimum(np.maximum(a * x + b, 0), 1),
    }
    return Lowered(kernels[op.op.type], ("x",))


@rule("cast")
def _cast(op: Operands) -> Lowered:
    source, target = op.type("x").dtype, op.result.dtype
    if source in FLOAT_TYPES and target in FLOAT_TYPES:
        return Lowered(lambda x: x, ("x",))
    dtype = op.result_dtype()
    return Lowered(lambda x: x.astype(dtype), ("x",))


@rule("select", moves=True)
def _select(op: Operands) -> Lowered:
    return Lowered(np.where, ("cond", "a", "b"))


@rule("identity", moves=True)
def _identity(op: Operands) -> Lowered:
    return Lowered(lambda x: x, ("x",))
