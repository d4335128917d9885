"""The layers of a drafter function: norms, attention over slots and new rows, MLP.

Everything is (1, channels, 1, T) between layers. What a family does otherwise than Llama is asked
of its configuration (`ondevice.models.family`) at the one place where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ondevice.models.ane import FP16_MAX, SMALLEST_HALF
from ondevice.models.config import LayerKind, ModelConfig
from ondevice.models.drafter_weights import (
    AFTER_ATTENTION,
    AFTER_MLP,
    KEY_NORM,
    QUERY_NORM,
    LayerWeights,
)
from ondevice.models.mil import Scope, Var
from ondevice.models.packed import Half


@dataclass(frozen=True, slots=True)
class View:
    """What layers of a kind share in a step: angles (1,1,hd,T), None without RoPE, and masks.

    signed_sin: sin with the minus sign of the rotation in its first half. mask, mask_new: repeated
    for each query head of a group.
    """

    cos: Var | None
    signed_sin: Var | None
    mask: Var
    mask_new: Var


def views(scope: Scope, config: ModelConfig, inputs: Mapping[str, Var]) -> dict[LayerKind, View]:
    """The views of every kind of layer that `config` has.

    Each query head of a group gets its row of the mask: the queries of a group are rows of one
    matrix, so their masks are `group_size` copies one below the other; made once for all layers, it
    saves them a reshape each way.
    """
    half = config.head_dim // 2
    sign = np.ones((1, 1, 2 * half, 1), np.float16)
    sign[:, :, :half] = -1
    flips = scope.weight("sign", sign)
    group = config.group_size

    def per_query(name: str) -> Var:
        mask = inputs[name]
        return mask if group == 1 else scope("concat", name, values=[mask] * group, axis=2)

    def view(suffix: str) -> View:
        sine = scope("mul", f"signed_sin{suffix}", x=inputs[f"sin{suffix}"], y=flips)
        masks = per_query(f"mask{suffix}"), per_query(f"mask_new{suffix}")
        return View(inputs[f"cos{suffix}"], sine, *masks)

    made: dict[LayerKind, View] = {"global": view("")}
    made["unrotated"] = View(None, None, made["global"].mask, made["global"].mask_new)
    if config.has_local_layers:
        made["local"] = view("_local")
    return made


def stored_epsilon(epsilon: float, scale: float = 1.0) -> np.float16:
    """The eps of a norm whose input is scaled, as MIL stores it: fp16, never 0.

    2.5e-6 (1e-5 at half scale) becomes 2.503e-6; at a sixteenth, 1e-6 becomes the smallest half,
    1.5e-5 for the unscaled input.
    """
    return max(np.float16(epsilon * scale**2), np.float16(SMALLEST_HALF))


def rms_norm(scope: Scope, x: Var, epsilon: np.float16, axis: int = 1) -> Var:
    """x / sqrt(mean(x^2) + eps) along `axis`, as a layer norm of [x, -x].

    That vector has mean 0 and variance mean(x^2), so eps keeps its meaning; mean(x^2) itself would
    overflow fp16 for |x| > 255 (ANEMLL; facts of the engine: its layer norm accumulates in fp32).
    """
    negative = scope("mul", "negative", x=x, y=np.float16(-1))
    both = scope("concat", "both", values=[x, negative], axis=axis)
    normed = scope("layer_norm", "layer_norm", x=both, axes=(axis,), epsilon=epsilon)
    return scope("slice_by_size", "first_half", x=normed, begin=(0, 0, 0, 0), size=x.shape)


def decoder_layer(
    scope: Scope,
    x: Var,
    config: ModelConfig,
    weights: LayerWeights,
    view: View,
    cache: tuple[Var, Var],
) -> tuple[Var, Var, Var]:
    """One decoder layer; returns x, and the new keys (after RoPE) and values, (1, KV, T, hd)."""
    block = _Block(scope, config, weights)
    eps = stored_epsilon(config.rms_norm_eps, config.traits.residual_scale)
    normed = rms_norm(scope.within("attention_norm"), x, eps)
    attended, key, value = _Attention(block, scope.within("attention"), view)(normed, cache)
    x = scope("add", "attention_residual", x=x, y=block.after(AFTER_ATTENTION, attended))
    normed = rms_norm(scope.within("mlp_norm"), x, eps)
    mlp = block.after(AFTER_MLP, _mlp(scope.within("mlp"), normed, config, weights))
    return scope("add", "mlp_residual", x=x, y=mlp), key, value


@dataclass(frozen=True, slots=True)
class _Block:
    scope: Scope
    config: ModelConfig
    weights: LayerWeights

    def after(self, role: str, x: Var) -> Var:
        """The norm of a sublayer's output, where the family has one; x (1, D, 1, T)."""
        gain = self.weights.vectors.get(role)
        if gain is None:
            return x
        scope = self.scope.within(role)
        normed = rms_norm(scope, x, stored_epsilon(self.config.rms_norm_eps))
        return _times(scope, "scaled", normed, gain)


def _times(scope: Scope, name: str, x: Var, gain: Half, axis: int = 1) -> Var:
    shape = [1, 1, 1, 1]
    shape[axis] = len(gain)
    return scope("mul", name, x=x, y=scope.weight("gain", gain.reshape(shape)))


def _rope(scope: Scope, x: Var, view: View) -> Var:
    """x (1, heads, hd, T) rotated: x * cos + swapped halves * (-sin, sin)."""
    if view.cos is None:
        return x
    low, high = scope("split", "halves", x=x, num_splits=2, axis=2)
    swapped = scope("concat", "swapped", values=[high, low], axis=2)
    straight = scope("mul", "straight", x=x, y=view.cos)
    crossed = scope("mul", "crossed", x=swapped, y=view.signed_sin)
    return scope("add", "rotated", x=straight, y=crossed)


def _heads(scope: Scope, x: Var, heads: int) -> Var:
    """x (1, heads * hd, 1, T) as (1, heads, hd, T)."""
    rows = x.shape[3]
    return scope("reshape", "heads", x=x, shape=(1, heads, x.shape[1] // heads, rows))


_TO_ROWS = (0, 1, 3, 2)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention over the cache and this step's rows; x (1, D, 1, T).

    Calling it returns the output (1, D, 1, T), the new keys and the new values, (1, KV, T, hd).
    """

    block: _Block
    scope: Scope
    view: View

    def __call__(self, x: Var, cache: tuple[Var, Var]) -> tuple[Var, Var, Var]:
        scope, config, rows = self.scope, self.block.config, x.shape[3]
        query = self._turned("query", x, config.num_heads, QUERY_NORM)
        grouped = (1, config.num_kv_heads, config.group_size * rows, config.head_dim)
        query = scope("reshape", "query_groups", x=query, shape=grouped)
        key = self._turned("key", x, config.num_kv_heads, KEY_NORM)
        value = _heads(scope.within("value"), self._product("value", x), config.num_kv_heads)
        value = scope("transpose", "value_rows", x=value, perm=_TO_ROWS)
        new = (key, value)
        if rows > 1:
            new = _finite(scope.within("key"), key), _finite(scope.within("value"), value)
        mixed = _softmax_mix(scope, query, cache, new, (self.view.mask, self.view.mask_new))
        split = (1, config.num_heads, rows, config.head_dim)
        mixed = scope("reshape", "mixed_heads", x=mixed, shape=split)
        mixed = scope("transpose", "mixed_columns", x=mixed, perm=_TO_ROWS)
        channels = (1, config.num_heads * config.head_dim, 1, rows)
        mixed = scope("reshape", "mixed_channels", x=mixed, shape=channels)
        return self._product("output", mixed), key, value

    def _product(self, name: str, x: Var) -> Var:
        weights = self.block.weights
        return self.scope.linear(
            name, x, getattr(weights, name), weights.vectors.get(f"{name}_bias")
        )

    def _turned(self, name: str, x: Var, heads: int, norm: str) -> Var:
        """Queries or keys, normed where the family does, after RoPE: (1, heads, T, hd)."""
        scope = self.scope.within(name)
        turned = _heads(scope, self._product(name, x), heads)
        gain = self.block.weights.vectors.get(norm)
        if gain is not None:
            within = self.scope.within(norm)
            eps = stored_epsilon(self.block.config.rms_norm_eps)
            turned = _times(within, "scaled", rms_norm(within, turned, eps, axis=2), gain, axis=2)
        turned = _rope(scope, turned, self.view)
        return self.scope("transpose", f"{name}_rows", x=turned, perm=_TO_ROWS)


def _finite(scope: Scope, x: Var) -> Var:
    """x with 0 in place of NaN and infinity (comparisons with NaN are false).

    abs, less_equal and select run on the engine of M1 to M5 (ANEForge op-catalog).
    """
    size = scope("abs", "size", x=x)
    fits = scope("less_equal", "fits", x=size, y=np.float16(FP16_MAX))
    return scope("select", "finite", cond=fits, a=x, b=np.float16(0))


def _softmax_mix(
    scope: Scope, query: Var, cache: tuple[Var, Var], new: tuple[Var, Var], masks: tuple[Var, Var]
) -> Var:
    """One softmax over slots and new rows without joining them; query (1, KV, G*T, hd).

    Scores are two products with one common maximum and one common sum, so that a cache input is
    read by its products only (for Qwen3-0.6B at S = 2048 a concat would move four times as much).
    """
    parts = (scope.within("cache"), scope.within("new"))
    scores = [
        part("add", "scores", x=part("matmul", "dots", x=query, y=keys, transpose_y=True), y=mask)
        for part, (keys, _), mask in zip(parts, (cache, new), masks, strict=True)
    ]
    maxima = [
        part("reduce_max", "maximum", x=score, axes=(3,), keep_dims=True)
        for part, score in zip(parts, scores, strict=True)
    ]
    maximum = scope("maximum", "maximum", x=maxima[0], y=maxima[1])
    weights = [
        part("exp", "exp", x=part("sub", "shifted", x=score, y=maximum))
        for part, score in zip(parts, scores, strict=True)
    ]
    sums = [
        part("reduce_sum", "sum", x=weight, axes=(3,), keep_dims=True)
        for part, weight in zip(parts, weights, strict=True)
    ]
    total = scope("add", "sum", x=sums[0], y=sums[1])
    mixed = [
        part("matmul", "mixed", x=part("real_div", "weights", x=weight, y=total), y=values)
        for part, weight, (_, values) in zip(parts, weights, (cache, new), strict=True)
    ]
    return scope("add", "mixed", x=mixed[0], y=mixed[1])


def _mlp(scope: Scope, x: Var, config: ModelConfig, weights: LayerWeights) -> Var:
    """down(activation(gate(x)) * up(x)), all (1, D, 1, T)."""

    def product(name: str, x: Var) -> Var:
        return scope.linear(name, x, getattr(weights, name), weights.vectors.get(f"{name}_bias"))

    gate = product("gate", x)
    if config.traits.activation == "silu":
        gate = scope("silu", "silu", x=gate)
    else:
        gate = scope("gelu", "gelu", x=gate, mode="TANH_APPROXIMATION")
    return product("down", scope("mul", "gated", x=gate, y=product("up", x)))
