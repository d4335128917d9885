"""Examples of the ops that other people's packages use; see mil_cases.py.

Each carries its expected value, by another library or written out from the op's definition.
"""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
from mil_cases import Array, Case, integers, normal, positive

i32, f32 = np.int32, np.float32


def _trigonometry() -> list[Case]:
    inside = np.clip(normal(3, 5) * f32(0.3), -0.9, 0.9).astype(f32)
    functions = {
        "acos": mx.arccos, "asin": mx.arcsin, "atan": mx.arctan, "atanh": mx.arctanh,
        "cosh": mx.cosh, "sinh": mx.sinh, "tan": mx.tan,
    }  # fmt: skip
    return [
        Case(op, {"x": inside}, expected=lambda x, f=f: f(mx.array(x)))
        for op, f in functions.items()
    ]


def _channels() -> list[Case]:
    x = normal(2, 3, 4, 5)
    mean, variance, gamma, beta = normal(3), positive(3), normal(3), normal(3)
    along = (slice(None), None, None)
    eps = {"epsilon": f32(0.125)}

    def batch_norm(x: Array) -> Array:
        scale = gamma[along] / np.sqrt(variance[along] + f32(0.125))
        return (x - mean[along]) * scale + beta[along]

    def instance_norm(x: Array) -> Array:
        rows = np.stack([(c - c.mean()) / np.sqrt(c.var() + 0.125) for c in x.reshape(-1, 20)])
        return rows.reshape(x.shape).astype(f32) * gamma[along] + beta[along]

    def response_norm(x: Array) -> Array:
        squares = np.stack(
            [(x[:, max(0, c - 1) : c + 2] ** 2).sum(1) for c in range(x.shape[1])], axis=1
        )
        return x / (f32(1) + f32(0.5) / 3 * squares) ** f32(0.75)

    return [
        Case("batch_norm", {"x": x}, {"mean": mean, "variance": variance, "gamma": gamma,
             "beta": beta, **eps}, batch_norm),
        Case("instance_norm", {"x": x}, {"gamma": gamma, "beta": beta, **eps}, instance_norm),
        Case("local_response_norm", {"x": x}, {"size": i32(3), "alpha": f32(0.5),
             "beta": f32(0.75), "k": f32(1)}, response_norm),
        Case("prelu", {"x": x}, {"alpha": gamma}, lambda x: np.where(x < 0, x * gamma[along], x)),
        Case("softplus_parametric", {"x": x}, {"alpha": gamma, "beta": variance},
             lambda x: gamma[along] * np.log1p(np.exp(variance[along] * x))),
        Case("clamped_relu", {"x": x}, {"alpha": f32(0.25), "beta": f32(0.5)},
             lambda x: np.minimum(np.where(x < 0, x / 4, x), 0.5)),
        Case("thresholded_relu", {"x": x}, {"alpha": f32(0.25)},
             lambda x: np.where(x < 0.25, 0, x)),
    ]  # fmt: skip


def _indices() -> list[Case]:
    data, updates = normal(5, 4), normal(3, 4)
    rows = np.array([3, 0, 1], i32)
    along = integers(0, 5, 2, 4)
    along_updates = normal(2, 4)
    pairs = np.array([[0, 1], [4, 2], [2, 3]], i32)

    def scattered(data: Array, indices: Array, updates: Array) -> Array:
        result = data.copy()
        for place, update in zip(indices, updates, strict=True):
            result[place] = update
        return result

    def along_axis(data: Array, indices: Array, updates: Array) -> Array:
        result = data.copy()
        for i, j in itertools.product(range(2), range(4)):
            result[indices[i, j], j] += updates[i, j]
        return result

    def by_pairs(data: Array, indices: Array, updates: Array) -> Array:
        result = data.copy()
        for (i, j), update in zip(indices, updates, strict=True):
            result[i, j] *= update
        return result

    return [
        Case("scatter", {"data": data, "indices": rows, "updates": updates},
             {"axis": i32(0), "mode": "update"}, scattered),
        Case("scatter_along_axis", {"data": data, "indices": along, "updates": along_updates},
             {"axis": i32(0), "mode": "add"}, along_axis),
        Case("scatter_nd", {"data": data, "indices": pairs, "updates": normal(3)},
             {"mode": "mul"}, by_pairs),
        Case("gather_nd", {"x": data, "indices": pairs}, {},
             lambda x, indices: np.stack([x[i, j] for i, j in indices])),
        Case("one_hot", {"indices": rows}, {"one_hot_vector_size": i32(5), "on_value": f32(2),
             "off_value": f32(0)},
             lambda indices: np.stack([2 * np.eye(5, dtype=f32)[i] for i in indices])),
        Case("range_1d", {}, {"start": i32(1), "end": i32(6), "step": i32(2)},
             lambda *_: i32([1, 3, 5])),
        Case("fill_like", {"ref_tensor": data}, {"value": f32(1.5)},
             lambda x: np.full(x.shape, 1.5, f32)),
        Case("shape", {"x": data}, {}, lambda x: i32(x.shape)),
        Case("band_part", {"x": data}, {"lower": i32(1), "upper": i32(0)},
             lambda x: np.tril(x) - np.tril(x, -2)),
        Case("flatten2d", {"x": normal(2, 3, 4)}, {"axis": i32(2)}, lambda x: x.reshape(6, 4)),
    ]  # fmt: skip


def _to_space(x: Array, shuffle: bool) -> Array:
    """Two by two blocks from eight channels, element by element."""
    _, _, height, width = x.shape
    result = np.zeros((1, 2, 2 * height, 2 * width), x.dtype)
    for c, i, j in itertools.product(range(2), range(2), range(2)):
        channel = 4 * c + 2 * i + j if shuffle else 2 * (2 * i + j) + c
        result[0, c, i::2, j::2] = x[0, channel]
    return result


def _blocks(x: Array) -> Array:
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2)


def _mlx_transposed(weight: Array, x: Array) -> Any:
    moved = mx.conv_transpose2d(
        mx.array(np.moveaxis(x, 1, -1)), mx.array(weight.transpose(1, 2, 3, 0)), stride=(2, 1)
    )
    return np.moveaxis(np.array(moved), -1, 1)


def _windows() -> list[Case]:
    x, eight = normal(2, 3, 4, 6), normal(1, 8, 2, 3)
    two = {"kernel_sizes": i32([2, 2]), "strides": i32([2, 2]), "pad_type": "valid"}
    weight = normal(3, 2, 3, 2)
    rows = np.arange(4).repeat(2)
    return [
        Case("max_pool", {"x": x}, two, lambda x: _blocks(x).max((3, 5))),
        Case("avg_pool", {"x": x}, two, lambda x: _blocks(x).mean((3, 5))),
        Case("l2_pool", {"x": x}, two, lambda x: np.sqrt((_blocks(x) ** 2).sum((3, 5)))),
        Case("conv_transpose", {"x": x}, {"weight": weight, "strides": i32([2, 1])},
             lambda x: _mlx_transposed(weight, x)),
        Case("depth_to_space", {"x": eight}, {"block_size": i32(2)}, lambda x: _to_space(x, False)),
        Case("pixel_shuffle", {"x": eight}, {"upscale_factor": i32(2)},
             lambda x: _to_space(x, True)),
        Case("space_to_depth", {"x": _to_space(eight, False)}, {"block_size": i32(2)},
             lambda _: eight),
        Case("pixel_unshuffle", {"x": _to_space(eight, True)}, {"downscale_factor": np.uint32(2)},
             lambda _: eight),
        Case("sliding_windows", {"x": normal(2, 7)}, {"axis": i32(1), "size": i32(3),
             "stride": i32(2)}, lambda x: np.stack([x[:, i : i + 3] for i in (0, 2, 4)], 1)),
        Case("crop", {"x": x}, {"crop_height": i32([1, 2]), "crop_width": i32([0, 3])},
             lambda x: x[:, :, 1:2, :3]),
        Case("upsample_nearest_neighbor", {"x": x}, {"scale_factor_height": i32(2),
             "scale_factor_width": i32(1)}, lambda x: x[:, :, rows]),
    ]  # fmt: skip


MORE_CASES = [*_trigonometry(), *_channels(), *_indices(), *_windows()]
