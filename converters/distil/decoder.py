"""The verifier as a batch decoder in MLX: each row of the cache writes at its own position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.converters.distil.decoding import TOP, Floats, Ints, Step, draw
from ondevice.converters.distil.workers import Workers

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

_SLOT_STEP = 64  # attention reads slots up to the longest row, rounded up to so many
_CHUNK = 128  # the TOP best of a row lie in its TOP best chunks


class RowCache:
    """One layer's keys and values, (rows, heads, slots, head size), as mlx-lm's attention asks.

    `offset` (rows,) is each row's position, set before every forward; slots from it on are unseen.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self.offset = mx.zeros((1,), mx.int32)
        self.seen = slots

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token's keys and values in every row; the slots that any row may see."""
        rows, heads, _, size = keys.shape
        if self._keys is None or self._values is None:
            self._keys = mx.zeros((rows, heads, self._slots, size), keys.dtype)
            self._values = mx.zeros((rows, heads, self._slots, size), values.dtype)
        every = mx.arange(rows)
        self._keys[every, :, self.offset] = keys[:, :, 0]
        self._values[every, :, self.offset] = values[:, :, 0]
        return self._keys[:, :, : self.seen], self._values[:, :, : self.seen]

    def make_mask(self, *_: Any, **__: Any) -> mx.array:
        """What each row sees: its own slots up to `offset`, (rows, 1, 1, slots)."""
        return (mx.arange(self.seen)[None] <= self.offset[:, None])[:, None, None]


class RowDecoder:
    """`rows` texts of up to `slots` tokens decoded side by side; see `decoding.Decoder`.

    prefix: tokens that every row begins with; run once.
    """

    def __init__(self, model: Module, rows: int, slots: int, prefix: tuple[int, ...]) -> None:
        self.rows, self.slots = rows, slots
        self._model = model
        self._layers = [RowCache(slots) for _ in model.layers]
        for position, token in enumerate(prefix):
            tokens = np.full(rows, token, np.int64)
            mx.eval(self._logits(tokens, np.full(rows, position, np.int64)))

    def step(self, tokens: Ints, positions: Ints, temperatures: Floats, chances: Floats) -> Step:
        """Append `tokens[i]` at `positions[i]` of row i and draw the next; all (rows,)."""
        logits = self._logits(tokens, positions).astype(mx.float32)
        top_tokens, top_logits = _top(logits)
        mx.eval(logits, top_tokens, top_logits)
        host, best, values = np.array(logits), np.array(top_tokens, np.int64), np.array(top_logits)
        drawn = draw(
            best,
            values,
            _log_sums(host, values[:, :1], temperatures),
            temperatures,
            chances,
            lambda row: host[row],
        )
        return Step(drawn, best, values - _log_sums(host, values[:, :1])[:, None])

    def _logits(self, tokens: Ints, positions: Ints) -> mx.array:
        offset = mx.array(positions.astype(np.int32))
        longest = int(positions.max()) + 1
        for layer in self._layers:
            layer.offset = offset
            layer.seen = min(-(-longest // _SLOT_STEP) * _SLOT_STEP, self.slots)
        logits: mx.array = self._model(mx.array(tokens)[:, None], cache=self._layers)
        return logits[:, 0]


class SplitDecoder:
    """Rows shared out among `workers`, each with a decoder of its own that `make` builds."""

    def __init__(self, make: Callable[[], RowDecoder], workers: Workers) -> None:
        self._workers = workers
        self._parts = workers.map([make] * workers.count)
        self.rows = sum(part.rows for part in self._parts)
        self.slots = self._parts[0].slots

    def step(self, tokens: Ints, positions: Ints, temperatures: Floats, chances: Floats) -> Step:
        """See `Decoder.step`."""
        columns = (tokens, positions, temperatures, chances)
        shares = zip(*(np.split(column, len(self._parts)) for column in columns), strict=True)
        pairs = zip(self._parts, shares, strict=True)
        steps = self._workers.map([partial(part.step, *share) for part, share in pairs])
        return Step(
            np.concatenate([step.tokens for step in steps]),
            np.concatenate([step.top_tokens for step in steps]),
            np.concatenate([step.top_logprobs for step in steps]),
        )


def _log_sums(logits: Floats, peak: Floats, temperatures: Floats | None = None) -> Floats:
    """log of the sum of exp(logit / temperature) of each row; 1 in place of 0.

    logits (rows, vocab), peak (rows, 1). On the host: a power takes numpy 1 ns on an x86 core and
    MLX 13 ns.
    """
    heat = np.ones(len(logits), np.float32)
    if temperatures is not None:
        heat = np.where(temperatures > 0, temperatures, heat).astype(np.float32)
    powers = np.exp((logits - peak) / heat[:, None])
    sums: Floats = np.log(powers.sum(axis=1)) + peak[:, 0] / heat
    return sums


def _top(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens and logits of the TOP best of each row, falling; logits (rows, vocab)."""
    rows, vocab = logits.shape
    padded = mx.pad(logits, [(0, 0), (0, -vocab % _CHUNK)], constant_values=-mx.inf)
    chunks = padded.reshape(rows, -1, _CHUNK)
    count = min(TOP, chunks.shape[1])
    best = mx.argpartition(-chunks.max(axis=2), count - 1, axis=1)[:, :count]
    few = mx.take_along_axis(chunks, best[:, :, None], axis=1).reshape(rows, -1)
    order = mx.argsort(-few, axis=1)[:, :TOP]
    tokens = mx.take_along_axis(best, order // _CHUNK, axis=1) * _CHUNK + order % _CHUNK
    return tokens, mx.take_along_axis(few, order, axis=1)
