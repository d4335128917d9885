"""Tree rows for mlx-lm models whose code knows only chains.

A forward over a tree differs from one over a chain in two things: the position of a row is that of
the root plus its depth, and a row sees the prefix and its own ancestors only. `RowLayout` holds
both for the forward at hand; the caches (`ondevice.treecache`) take the mask from it, and a wrapper
around each attention's `rope` takes the positions. Without a tree, models run their usual path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module


class RowLayout:
    """Where the rows of the forward at hand stand. One per model, shared by all its wrappers.

    positions: absolute position of each row, int32 (rows,), or None for a plain chain.
    """

    def __init__(self) -> None:
        self.positions: mx.array | None = None
        self._depths = np.zeros(0, dtype=np.int32)
        self._ancestors = np.zeros((0, 0), dtype=np.bool_)
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}

    @contextmanager
    def tree(self, parents: Sequence[int], prefix: int) -> Iterator[None]:
        """Lay out rows with these `parents` (-1: none) after `prefix` cached tokens."""
        self._depths, self._ancestors = tree_of(parents)
        self.positions = mx.array(self._depths + np.int32(prefix))
        try:
            yield
        finally:
            self.positions = None
            self._masks.clear()

    def mask(self, start: int, prefix: int, window: int | None) -> mx.array:
        """What each row sees of the cache, which holds positions `start` to `prefix`, and of rows.

        bool (rows, prefix - start + rows).
        """
        key = (start, prefix, window)
        if key not in self._masks:
            self._masks[key] = mx.array(self._visible(*key))
        return self._masks[key]

    def _visible(self, start: int, prefix: int, window: int | None) -> npt.NDArray[np.bool_]:
        before = np.ones((len(self._depths), prefix - start), dtype=np.bool_)
        within = self._ancestors
        if window is not None:
            row_at = (prefix + self._depths)[:, None]
            before = row_at < np.arange(start, prefix) + window
            within = within & (row_at < row_at.T + window)
        return np.concatenate([before, within], axis=1)


def tree_of(parents: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Depth of each row, (n,), and who is whose ancestor or itself, (n, n); -1 is no parent."""
    count = len(parents)
    depths = np.zeros(count, dtype=np.int32)
    ancestors = np.eye(count, dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
            ancestors[row] |= ancestors[parent]
    return depths, ancestors


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every row follows the one before it."""
    return all(parent == row - 1 for row, parent in enumerate(parents))


class RowRope:
    """An attention's rope module, with one position per row when the layout has a tree.

    `mx.fast.rope` takes one offset per batch entry, so the rows become the batch. Not an
    `nn.Module`: no parameter path of the model changes.
    """

    def __init__(self, inner: Module, layout: RowLayout) -> None:
        self.inner = inner
        self.layout = layout

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        """x: (batch, heads, rows, head_dim); `offset` is ignored under a tree."""
        positions = self.layout.positions
        if positions is None:
            rotated: mx.array = self.inner(x, offset, *args, **kwargs)
            return rotated
        batch, heads, rows, width = x.shape
        flat = x.transpose(0, 2, 1, 3).reshape(batch * rows, heads, 1, width)
        offsets = positions if batch == 1 else mx.tile(positions, batch)
        rotated = self.inner(flat, offsets, *args, **kwargs)
        return rotated.reshape(batch, rows, heads, width).transpose(0, 2, 1, 3)


class RowScale:
    """A ministral3 attention, whose queries are scaled by their position, with rows' own positions.

    Its model computes one scale for the forward from the cache's length, as if rows were a chain:
    1 + beta log(1 + floor(position / original context)).
    """

    def __init__(self, inner: Module, layout: RowLayout) -> None:
        self.inner: Any = inner
        self.layout = layout

    def __call__(self, x: mx.array, scale: mx.array | None = None, *args: Any, **kw: Any) -> Any:
        """x: (1, rows, hidden_size); `scale` is the model's, right for chains."""
        positions = self.layout.positions
        if positions is not None:
            beta, original = self.inner.scaling_beta, self.inner.original_max_position_embeddings
            steps = mx.floor(positions / original)
            scale = (1 + beta * mx.log(1 + steps)).astype(x.dtype)[:, None]
        return self.inner(x, scale, *args, **kw)


class NormTap:
    """The model's final norm; keeps its output, the model's hidden states, when asked to."""

    def __init__(self, inner: Module) -> None:
        self.inner = inner
        self._wanted = False
        self._output: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """x: (batch, rows, hidden_size)."""
        normed: mx.array = self.inner(x)
        if self._wanted:
            self._output = normed
        return normed

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the output of the forward inside the block."""
        self._wanted = True
        try:
            yield
        finally:
            self._wanted = False

    def take(self) -> mx.array:
        """The captured output of the first batch entry, (rows, hidden_size); forgets it."""
        assert self._output is not None, "no forward was captured"
        output, self._output = self._output, None
        return output[0]

    @property
    def weight(self) -> mx.array:
        """The norm's own weight; some models read it."""
        weight: mx.array = self.inner.weight
        return weight


def modules_of(model: Module) -> list[Module]:
    """The model and every module in it."""
    pairs = model.named_modules()  # type: ignore[no-untyped-call]  # mlx has no annotation here
    return [module for _, module in pairs]


class Instrumented:
    """An mlx-lm model with wrapped ropes, and position scales where it has them, and a tapped norm.

    `undo` takes all of it off again.

    Wrap after the weights are loaded. The wrapped modules' own parameters are out of
    `model.parameters()` until `undo`, so undo before saving.
    """

    def __init__(self, model: Module) -> None:
        self.layout = RowLayout()
        self._ropes = [
            (module, module.rope)
            for module in modules_of(model)
            if isinstance(getattr(module, "rope", None), Module)
        ]
        for attention, rope in self._ropes:
            attention.rope = RowRope(rope, self.layout)
        self._scaled = [
            (layer, layer.self_attn)
            for layer in getattr(model, "layers", ())
            if hasattr(getattr(layer, "self_attn", None), "scaling_beta")
        ]
        for layer, attention in self._scaled:
            layer.self_attn = RowScale(attention, self.layout)
        text_model = getattr(model, "language_model", model)
        self._norm_owner = cast(Any, getattr(text_model, "model", text_model))
        norm = getattr(self._norm_owner, "norm", None)
        self.tap = NormTap(norm) if isinstance(norm, Module) else None
        if self.tap is not None:
            self._norm_owner.norm = self.tap

    def undo(self) -> None:
        """Put the model's own modules back."""
        for layer, scaled in self._scaled:
            layer.self_attn = scaled
        for attention, rope in self._ropes:
            attention.rope = rope
        if self.tap is not None:
            self._norm_owner.norm = self.tap.inner
