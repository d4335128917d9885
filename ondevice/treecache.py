"""The verifier's key/value cache: mlx-lm's own, plus tree rows and exact rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ondevice.rows import RowLayout


class TreeCache(KVCache):
    """One layer's keys and values: (1, kv_heads, capacity, head_dim), filled up to `offset`.

    Growth and chains are mlx-lm's. While the layout has a tree, `make_mask` is the tree's; after
    it `commit` keeps one path. A sliding-window layer uses it too, with the window in the mask: a
    rotating buffer could not be rolled back.
    """

    def __init__(self, layout: RowLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        self.layout = layout
        self._new_rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows, (1, kv_heads, rows, head_dim) each; returns all keys and values so far."""
        if self.layout.positions is not None:
            self._new_rows = keys, values
        both: tuple[mx.array, mx.array]
        both = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return both

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Mask for `N` new rows: the tree's, bool (N, offset + N), or what mlx-lm would return."""
        if self.layout.positions is not None:
            return self.layout.mask(self.offset, window_size)
        mask: mx.array | str | None = super().make_mask(  # type: ignore[no-untyped-call]
            N, return_array=return_array, window_size=window_size
        )
        return mask

    def commit(self, prefix: int, path: Sequence[int]) -> None:
        """Keep `prefix` tokens and, of the tree's rows after them, `path` in ascending order.

        Rows that are where they belong already are not touched: for a path 0, 1, 2, ... this sets
        one number. Others are written again from the step's own arrays: reading them from the
        buffer would keep it from being updated in place, a copy of the whole cache.
        """
        settled = 0
        while settled < len(path) and path[settled] == settled:
            settled += 1
        self.offset = prefix + len(path)
        moved, self._new_rows = self._new_rows, None
        if settled == len(path):
            return
        assert moved is not None, "only a tree's rows can be out of place"
        source = mx.array(list(path[settled:]))
        buffers: tuple[Any, Any] = (self.keys, self.values)
        for buffer, new in zip(buffers, moved, strict=True):
            buffer[..., prefix + settled : self.offset, :] = mx.take(new, source, axis=2)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; costs nothing."""
        if length > self.offset:
            raise ValueError(f"cannot keep {length} of {self.offset} cached tokens")
        self.offset = length

    def to_kv_cache(self) -> KVCache:
        """The same content as mlx-lm's class, whose prompt-cache loader knows no other."""
        plain = KVCache()  # type: ignore[no-untyped-call]
        plain.keys, plain.values, plain.offset = self.keys, self.values, self.offset
        return plain
