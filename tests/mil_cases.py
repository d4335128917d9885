"""One or more examples of every op that the emulator runs.

Where coremltools can infer an op's value, that is what the emulator must give. Where it cannot (or
is wrong), the case carries the expected value: worked by hand, or by another library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Values = dict[str, Array | list[Array]]

_rng = np.random.default_rng(20261129)


def normal(*shape: int) -> Array:
    return _rng.standard_normal(shape).astype(np.float16).astype(np.float32)


def positive(*shape: int) -> Array:
    return np.abs(normal(*shape)) + np.float32(0.125)


def special(*shape: int) -> Array:
    """Random values with NaN, infinities, zeros and large numbers among them."""
    values = normal(*shape)
    flat = values.reshape(-1)
    flat[:7] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 60000.0, -60000.0]
    return values


def integers(low: int, high: int, *shape: int) -> Array:
    return _rng.integers(low, high, shape).astype(np.int32)


def booleans(*shape: int) -> Array:
    return _rng.integers(0, 2, shape).astype(np.bool_)


@dataclass(frozen=True)
class Case:
    """`values` are given at run time, `parameters` are constants of the program."""

    op: str
    values: Values
    parameters: dict[str, Any] = field(default_factory=dict)
    expected: Callable[..., Any] | None = None


def _binary() -> list[Case]:
    x, y = special(2, 3, 4), normal(2, 1, 4)
    floats = ["add", "sub", "mul", "real_div", "maximum", "minimum", "floor_div", "mod"]
    compared = ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"]
    cases = [Case(op, {"x": x, "y": y}) for op in [*floats, *compared]]
    cases += [Case(op, {"x": x, "y": np.full((1,), np.nan, np.float32)}) for op in compared[:3]]
    cases += [Case(op, {"x": y, "y": x}) for op in ("maximum", "minimum")]
    i, j = integers(-9, 9, 5), integers(1, 9, 5)
    whole = ["add", "sub", "mul", "floor_div", "mod", "maximum", "greater"]
    cases += [Case(op, {"x": i, "y": j}) for op in whole]
    a, b = booleans(2, 8), booleans(2, 8)
    cases += [Case(f"logical_{op}", {"x": a, "y": b}) for op in ("and", "or", "xor")]
    return [*cases, Case("pow", {"x": positive(2, 5), "y": normal(2, 5)})]


def _unary() -> list[Case]:
    anywhere = ["abs", "exp", "erf", "exp2", "relu", "relu6", "sigmoid", "sign", "softsign"]
    bounded = ["ceil", "cos", "floor", "round", "sin", "softplus", "square", "tanh"]
    cases = [Case(op, {"x": special(3, 5)}) for op in anywhere]
    cases += [Case(op, {"x": normal(3, 5)}) for op in bounded]
    cases += [
        Case("sqrt", {"x": positive(3, 5)}),
        Case("sqrt", {"x": normal(3, 5)}),
        Case("logical_not", {"x": booleans(9)}),
        Case("identity", {"x": special(2, 5)}),
        Case("log", {"x": positive(3, 5)}, {"epsilon": np.float32(0.25)}),
        Case("rsqrt", {"x": positive(3, 5)}, {"epsilon": np.float32(0.25)}),
        Case("inverse", {"x": positive(3, 5)}, {"epsilon": np.float32(0.25)}),
        Case("silu", {"x": normal(3, 5)}, expected=lambda x: mx.array(x) * mx.sigmoid(mx.array(x))),
        # silu(0) = 0; silu(20) = 20 (1 - 2.1e-9); silu(-20) = -20 / (1 + e^20) = -4.1223072e-08
        Case(
            "silu",
            {"x": np.array([0, 20, -20, 1], np.float32)},
            expected=lambda x: np.array([0, 20, -4.1223072e-08, 0.73105858], np.float32),
        ),
        Case("cast", {"x": normal(7) * 9}, {"dtype": "int32"}),
        Case("cast", {"x": normal(7) * 9}, {"dtype": "fp32"}),
        Case("cast", {"x": integers(-3, 3, 9)}, {"dtype": "fp32"}),
        Case("cast", {"x": integers(-3, 3, 9)}, {"dtype": "bool"}),
        Case("cast", {"x": booleans(9)}, {"dtype": "int32"}),
    ]
    modes = ["EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"]
    return cases + [Case("gelu", {"x": normal(4, 5)}, {"mode": mode}) for mode in modes]


def _activations() -> list[Case]:
    a, b = np.float32(0.25), np.float32(0.5)
    return [
        Case("leaky_relu", {"x": normal(3, 5)}, {"alpha": a}),
        Case("elu", {"x": normal(3, 5)}, {"alpha": a}),
        Case("linear_activation", {"x": normal(3, 5)}, {"alpha": a, "beta": b}),
        Case("scaled_tanh", {"x": normal(3, 5)}, {"alpha": a, "beta": b}),
        Case("sigmoid_hard", {"x": normal(3, 5)}, {"alpha": a, "beta": b}),
        Case("clip", {"x": special(3, 5)}, {"alpha": -a, "beta": b}),
        Case("threshold", {"x": special(3, 5)}, {"alpha": a}),
    ]


def _moves() -> list[Case]:
    x = special(2, 3, 4)
    i32 = np.int32
    index = {"begin": i32([0, -3, 1]), "end": i32([2, 3, -1])}
    return [
        Case("reshape", {"x": x}, {"shape": i32([4, -1, 3])}),
        Case("reshape", {"x": x}, {"shape": i32([0, 0, -1, 2])}),
        Case("transpose", {"x": x}, {"perm": i32([2, 0, 1])}),
        Case("transpose", {"x": x}, {"perm": i32([-1, 0, -2])}),
        Case("expand_dims", {"x": x}, {"axes": i32([0, -1])}),
        Case("squeeze", {"x": normal(1, 3, 1, 4)}, {"axes": i32([0, -2])}),
        Case("squeeze", {"x": normal(1, 3, 1, 4)}),
        Case("concat", {"values": [x, normal(2, 5, 4)]}, {"axis": 1}),
        Case("concat", {"values": [x, normal(2, 3, 1), x]}, {"axis": -1}),
        Case(
            "concat",
            {"values": [np.float32([[1, 2], [3, 4]]), np.float32([[7, 8], [9, 10]])]},
            {"axis": 0, "interleave": True},
            lambda *_: np.float32([[1, 2], [7, 8], [3, 4], [9, 10]]),
        ),
        Case(
            "concat",
            {"values": [np.float32([[1, 2], [3, 4]]), np.float32([[7, 8], [9, 10]])]},
            {"axis": -1, "interleave": True},
            lambda *_: np.float32([[1, 7, 2, 8], [3, 9, 4, 10]]),
        ),
        Case("stack", {"values": [x, -x]}, {"axis": 1}),
        Case("split", {"x": x}, {"num_splits": 2, "axis": -1}),
        Case("split", {"x": normal(2, 7)}, {"split_sizes": i32([1, 4, 2]), "axis": 1}),
        Case("tile", {"x": x}, {"reps": i32([1, 2, 3])}),
        Case("reverse", {"x": x}, {"axes": i32([0, -1])}),
        Case("reverse", {"x": x}),
        Case("pad", {"x": x}, {"pad": i32([1, 2, 0, 3]), "constant_val": np.float32(0.5)}),
        Case("pad", {"x": x}, {"pad": i32([1, 1, 0, 3]), "mode": "reflect"}),
        Case("pad", {"x": x}, {"pad": i32([1, 0, 2, 1]), "mode": "replicate"}),
        Case("select", {"cond": booleans(2, 3, 4), "a": x, "b": normal(2, 3, 4)}),
        Case("slice_by_index", {"x": x}, index),
        Case("slice_by_index", {"x": x}, {**index, "stride": i32([1, 2, 1])}),
        Case(
            "slice_by_index",
            {"x": x},
            {
                "begin": i32([1, 2, 3]),
                "end": i32([0, 0, 0]),
                "stride": i32([1, -1, -2]),
                "end_mask": [True, True, True],
                "squeeze_mask": [True, False, False],
            },
        ),
        Case("slice_by_index", {"x": x}, {**index, "begin_mask": [True] * 3}),
        Case("slice_by_size", {"x": x}, {"begin": i32([0, -2, 1]), "size": i32([-1, 2, 3])}),
        Case("slice_by_size", {"x": x, "begin": i32([1, -2, 0])}, {"size": i32([1, 2, 3])}),
        Case("slice_by_index", {"x": x, "begin": i32([1, 2, 0]), "end": i32([0, 0, 0])},
             {"squeeze_mask": [True, True, False], "begin_mask": [False, False, True],
              "end_mask": [False, False, True]}),
        Case("slice_update", {"x": x, "update": normal(1, 2, 4)}, {"begin": i32([1, 0, 0]),
             "end": i32([2, 3, 0]), "stride": i32([1, 2, 1]), "end_mask": [False, False, True]}),
        Case("slice_update", {"x": x, "update": normal(2, 1, 4), "begin": i32([0, 2, 0]),
             "end": i32([2, 3, 4])}),
    ]  # fmt: skip


def _gathers() -> list[Case]:
    x = special(4, 3, 5)
    along = integers(0, 3, 4, 2, 5)
    batched = integers(0, 3, 4, 2)
    return [
        Case("gather", {"x": x, "indices": integers(0, 4, 2, 3)}, {"axis": 0}),
        Case("gather", {"x": x, "indices": integers(0, 5, 6)}, {"axis": -1}),
        Case("gather", {"x": x, "indices": batched}, {"axis": 1, "batch_dims": 1}),
        Case("gather_along_axis", {"x": x, "indices": along}, {"axis": 1}),
        Case("argsort", {"x": normal(3, 9)}, {"axis": 1, "ascending": True}),
        Case("argsort", {"x": normal(3, 9)}, {"axis": -1}),
        Case("topk", {"x": normal(3, 9)}, {"k": 4, "axis": 1}),
        Case("topk", {"x": normal(3, 9)}, {"k": 2, "axis": 0, "ascending": True}),
        Case("topk", {"x": normal(3, 9)}, {"k": 2, "axis": 0, "return_indices": False},
             lambda x: -np.sort(-x, axis=0)[:2]),
        # of equals the first, in both directions
        Case("topk", {"x": np.float32([1, 3, 2, 3, 1])}, {"k": 3, "axis": 0},
             lambda x: (np.float32([3, 3, 2]), np.int32([1, 3, 2]))),
        Case("topk", {"x": np.float32([1, 3, 2, 3, 1])}, {"k": 3, "axis": 0, "ascending": True},
             lambda x: (np.float32([1, 1, 2]), np.int32([0, 4, 2]))),
        Case("fill", {}, {"shape": np.int32([2, 3]), "value": np.float32(1.5)}),
    ]  # fmt: skip


def _reductions() -> list[Case]:
    axes = {"axes": np.int32([0, -1]), "keep_dims": True}
    sums = ["reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_mean"]
    sums += ["reduce_prod", "reduce_sum", "reduce_sum_square"]
    cases = [Case(op, {"x": normal(3, 4, 5)}, axes) for op in sums]
    cases += [Case(op, {"x": normal(3, 4, 5)}, {"axes": np.int32([1])}) for op in sums]
    cases += [Case("reduce_log_sum", {"x": positive(3, 4, 5)}, axes)]
    extremes = ["reduce_max", "reduce_min"]
    cases += [Case(op, {"x": special(3, 4, 5)}, axes) for op in extremes]
    folded = {"axes": np.int32([1]), "keep_dims": True}
    cases += [Case(op, {"x": special(2, 16, 3)}, folded) for op in [*extremes, "reduce_sum"]]
    whole = [*extremes, "reduce_sum", "reduce_prod"]
    cases += [Case(op, {"x": integers(-9, 9, 3, 4)}, axes) for op in whole]
    arguments = ["reduce_argmax", "reduce_argmin"]
    cases += [Case(op, {"x": normal(3, 6)}, {"axis": 1}) for op in arguments]
    cases += [Case(op, {"x": normal(3, 6)}, {"axis": 0, "keep_dims": True}) for op in arguments]
    return [
        *cases,
        Case("cumsum", {"x": normal(3, 5)}, {"axis": 1}),
        Case("cumsum", {"x": normal(3, 5)}, {"axis": 0, "reverse": True}),
        Case("cumsum", {"x": np.float32([1, 2, 4])}, {"axis": 0, "exclusive": True},
             lambda x: np.float32([0, 1, 3])),
        Case("cumsum", {"x": np.float32([1, 2, 4])}, {"axis": 0, "exclusive": True,
             "reverse": True}, lambda x: np.float32([6, 4, 0])),
        Case("softmax", {"x": normal(3, 4, 5)}, {"axis": 1}),
        Case("softmax", {"x": normal(3, 5) * 60}, {"axis": -1}),
        Case("l2_norm", {"x": normal(2, 3, 4, 5)}, {"epsilon": np.float32(1e-3)}),
        Case("l2_norm", {"x": normal(3, 4, 5)}, {"epsilon": np.float32(1e-3)}),
    ]  # fmt: skip


def _norms() -> list[Case]:
    eps = {"epsilon": np.float32(1e-3)}
    both = {"gamma": normal(3, 5), "beta": normal(3, 5)}
    return [
        Case("layer_norm", {"x": normal(1, 24, 1, 3)}, {"axes": np.int32([1]), **eps}),
        Case("layer_norm", {"x": normal(1, 24, 1, 3)}, {"axes": np.int32([-3]), **eps,
             "gamma": normal(24), "beta": normal(24)}),
        Case("layer_norm", {"x": normal(2, 4, 3, 5)}, {"axes": np.int32([2, -1]), **eps, **both}),
        Case("layer_norm", {"x": normal(2, 6)}, {"axes": np.int32([1]), **eps}),
    ]  # fmt: skip


def _products() -> list[Case]:
    x, y = normal(2, 3, 4, 5), normal(1, 3, 5, 6)
    flips = {"transpose_x": True, "transpose_y": True}
    query, key, value = normal(2, 3, 4, 8), normal(2, 3, 6, 8), normal(2, 3, 6, 5)
    attended: Values = {"query": query, "key": key, "value": value}
    visible = booleans(2, 1, 4, 6)
    visible[..., 0] = True
    return [
        Case("matmul", {"x": x, "y": y}),
        Case("matmul", {"x": x.swapaxes(-1, -2).copy(), "y": y}, {"transpose_x": True}),
        Case("matmul", {"x": x, "y": y.swapaxes(-1, -2).copy()}, {"transpose_y": True}),
        Case("matmul", {"x": normal(5, 4), "y": normal(6, 5)}, flips),
        Case("matmul", {"x": normal(5), "y": normal(5, 2)}),
        Case("linear", {"x": normal(3, 5)}, {"weight": normal(4, 5), "bias": normal(4)}),
        Case("linear", {"x": normal(2, 3, 5)}, {"weight": normal(4, 5)}),
        Case("einsum", {"values": [normal(2, 3, 4, 5), normal(2, 5, 4, 6)]},
             {"equation": "nchw,nwhu->nchu"}),
        Case("einsum", {"values": [normal(2, 3, 1, 5), normal(1, 5, 4, 6)]},
             {"equation": "bqhk,bkhv->bqhv"}),
        Case("einsum", {"values": [normal(3, 4, 5), normal(5, 4, 6)]},
             {"equation": "chw,whr->chr"}),
        Case("scaled_dot_product_attention", attended),
        Case("scaled_dot_product_attention", {**attended, "attn_mask": normal(2, 1, 4, 6)}),
        Case("scaled_dot_product_attention", {**attended, "attn_mask": visible}),
    ]  # fmt: skip


def mlx_conv(
    weight: Array,
    bias: Array | None = None,
    strides: Sequence[int] = (1, 1),
    pad: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Callable[[Array], Array]:
    """The convolution by MLX, whose layout is (n, H, W, C)."""

    def run(x: Array) -> Array:
        result = mx.conv_general(
            mx.array(np.moveaxis(x, 1, -1)),
            mx.array(np.moveaxis(weight, 1, -1)),
            stride=list(strides),
            padding=([pad[0], pad[2]], [pad[1], pad[3]]),
            kernel_dilation=list(dilations),
            groups=groups,
        )
        dense = np.moveaxis(np.array(result), -1, 1)
        return dense if bias is None else dense + bias[:, None, None]

    return run


def _convolutions() -> list[Case]:
    i32 = np.int32
    point, bias = normal(7, 6, 1, 1), normal(7)
    wide, grouped = normal(4, 6, 3, 2), normal(4, 3, 3, 3)
    steps = {"strides": i32([2, 1]), "dilations": i32([1, 2]), "pad": i32([1, 0, 2, 1])}
    # Two channels, two filters: (1, 2) and (-1, 3) over the columns (1, 10), (2, 20), (3, 30).
    columns = np.float32([[1, 2, 3], [10, 20, 30]]).reshape(1, 2, 1, 3)
    filters = np.float32([[1, 2], [-1, 3]]).reshape(2, 2, 1, 1)
    return [
        Case("conv", {"x": columns}, {"weight": filters, "pad_type": "valid"},
             lambda x: np.float32([[21, 42, 63], [29, 58, 87]]).reshape(1, 2, 1, 3)),
        Case("conv", {"x": normal(1, 6, 1, 8)}, {"weight": point, "bias": bias},
             mlx_conv(point, bias)),
        Case("conv", {"x": normal(3, 6, 2, 4)}, {"weight": point}, mlx_conv(point)),
        Case("conv", {"x": normal(2, 6, 7, 8)}, {"weight": wide}, mlx_conv(wide)),
        Case("conv", {"x": normal(2, 6, 7, 8)}, {"weight": wide, "pad_type": "custom", **steps},
             mlx_conv(wide, strides=(2, 1), pad=(1, 0, 2, 1), dilations=(1, 2))),
        Case("conv", {"x": normal(1, 6, 5, 6)},
             {"weight": grouped, "groups": 2, "pad_type": "same"},
             mlx_conv(grouped, pad=(1, 1, 1, 1), groups=2)),
    ]  # fmt: skip


CASES = [
    *_binary(),
    *_unary(),
    *_activations(),
    *_moves(),
    *_gathers(),
    *_reductions(),
    *_norms(),
    *_products(),
    *_convolutions(),
]
