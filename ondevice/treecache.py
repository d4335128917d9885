"""The verifier's key/value cache: mlx-lm's own interface, plus tree rows and exact rollback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, create_attention_mask

from ondevice.rows import RowLayout

MARGIN_SHARE = 10
"""A window's cache holds a tenth of the window more than the window: what it may cost in memory,
and what keeps it from being copied at every token."""


class TreeCache(KVCache):
    """One layer's keys and values, (1, kv_heads, capacity, head_dim): positions start to offset.

    Chains are mlx-lm's. While the layout has a tree, `make_mask` is the tree's; after it `commit`
    keeps one path. A sliding-window layer uses it too, with the window in the mask (a rotating
    buffer could not be rolled back): rows that no later row can see are dropped when room is
    needed, and `start` moves on.
    """

    def __init__(self, layout: RowLayout, window: int | None = None, start: int = 0) -> None:
        """window: tokens that a row sees, itself included; None for all. start: first position."""
        super().__init__()  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        self.layout = layout
        self.window = window
        self.start = self.offset = start
        self._new_rows: tuple[mx.array, mx.array] | None = None

    @property
    def held(self) -> int:
        """Rows in the cache: all of them, or the newest of a window's layer."""
        return self.offset - self.start

    @property
    def _most(self) -> int | None:
        """Rows that a window's layer may keep between forwards."""
        return None if self.window is None else self.window + self.window // MARGIN_SHARE

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows, (1, kv_heads, rows, head_dim) each; returns all that the cache holds."""
        if self.layout.positions is not None:
            self._new_rows = keys, values
        count = keys.shape[2]
        if self._is_full(count):
            self._move(keys, values, count)
        at, buffers = self.held, self._buffers
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[..., at : at + count, :] = new
        self.offset += count
        return self.keys_and_values()

    @property
    def _buffers(self) -> tuple[mx.array, mx.array]:
        both: Any = self.keys, self.values
        return both[0], both[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows in use."""
        keys, values = self._buffers
        return keys[..., : self.held, :], values[..., : self.held, :]

    def _is_full(self, count: int) -> bool:
        return self.keys is None or self.held + count > self.keys.shape[2]

    @property
    def _worth_keeping(self) -> int:
        """Rows that go along into new buffers."""
        if self.window is None:
            return self.held
        return min(self.held, self.window - 1 + self.window // MARGIN_SHARE // 2)

    def _move(self, keys: mx.array, values: mx.array, count: int) -> None:
        """New buffers with room for `count` rows more; keys and values give kind and size."""
        kept = self._worth_keeping
        capacity = kept + -(-count // self.step) * self.step
        if self._most is not None:
            capacity = max(kept + count, min(capacity, self._most))
        old = None if self.keys is None else self.keys_and_values()
        moved = []
        for index, like in enumerate((keys, values)):
            buffer = mx.zeros((*like.shape[:2], capacity, like.shape[3]), like.dtype)
            if old is not None and kept:
                buffer[..., :kept, :] = old[index][..., -kept:, :]
            moved.append(buffer)
        self.start = self.offset - kept
        self.keys, self.values = moved

    def settle(self) -> None:
        """Give back what a long forward made a window's layer hold for its own sake."""
        if self._most is not None and self.keys is not None and self.keys.shape[2] > self._most:
            self._move(*self._buffers, 0 if self.held else 1)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Mask for `N` new rows: the tree's, bool (N, held + N), or what mlx-lm would return.

        It is for what `update_and_fetch` will return, which may drop rows first.
        """
        kept = self._worth_keeping if self._is_full(N) else self.held
        if self.window is not None:
            window_size = self.window if window_size is None else min(window_size, self.window)
        if self.layout.positions is not None:
            return self.layout.mask(self.offset - kept, self.offset, window_size)
        mask: mx.array | str | None = create_attention_mask(
            N, offset=kept, return_array=return_array, window_size=window_size
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
        if settled < len(path):
            assert moved is not None, "only a tree's rows can be out of place"
            source = mx.array(list(path[settled:]))
            for buffer, new in zip(self._buffers, moved, strict=True):
                buffer[..., prefix - self.start + settled : self.held, :] = mx.take(
                    new, source, axis=2
                )
        self.settle()

    def can_keep(self, length: int) -> bool:
        """Whether the cache still has every row that a row at position `length` sees."""
        if self.window is None:
            return True
        return self.start <= max(0, length - self.window + 1)

    def truncate(self, length: int) -> None:
        """Keep the tokens before position `length`; costs nothing."""
        if not self.start <= length <= self.offset:
            raise ValueError(f"cannot keep {length} of {self.offset} cached tokens")
        self.offset = length

    def to_mlx_lm(self) -> KVCache | RotatingKVCache:
        """The same content as mlx-lm's own class, whose prompt-cache loader knows no other."""
        if self.window is None:
            plain = KVCache()  # type: ignore[no-untyped-call]
            plain.keys, plain.values, plain.offset = self.keys, self.values, self.offset
            return plain
        rotating = RotatingKVCache(max_size=self.window)  # type: ignore[no-untyped-call]
        rotating.offset = self.offset
        if self.keys is not None:
            rotating._idx = min(self.offset, self.window)
            rotating.keys, rotating.values = (
                self._newest(rows, rotating._idx) for rows in self.keys_and_values()
            )
        return rotating

    @staticmethod
    def _newest(rows: mx.array, count: int) -> mx.array:
        """The last `count` rows; one that is missing is zero: the next token's takes its place."""
        missing = max(0, count - rows.shape[2])
        kept = rows[..., max(0, rows.shape[2] - count) :, :]
        return mx.pad(kept, [(0, 0), (0, 0), (missing, 0), (0, 0)])


def window_of(cache: Any) -> int | None:
    """The window of the layer for which mlx-lm makes `cache`; None when it sees everything."""
    return int(cache.max_size) if isinstance(cache, RotatingKVCache) else None
