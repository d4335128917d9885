"""Many rows decoded at once: what a decoder is, and how a token is drawn from its best few.

A decoder holds a cache of `rows` x `slots`; each row writes at its own position. Slots below the
prefix hold the same tokens in every row and are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

TOP = 32
"""Likeliest tokens that are kept of each distribution: training targets, and enough to sample from
most of the time."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """After one token in every row: the tokens drawn (rows,), and the TOP best of each row.

    top_tokens (rows, TOP) by falling probability; top_logprobs (rows, TOP) of the whole vocabulary
    at temperature 1.
    """

    tokens: Ints
    top_tokens: Ints
    top_logprobs: Floats


class Decoder(Protocol):
    """A verifier that decodes `rows` texts of up to `slots` tokens side by side."""

    @property
    def rows(self) -> int:
        """Texts at a time."""
        ...

    @property
    def slots(self) -> int:
        """Longest text in tokens, prefix included."""
        ...

    def step(self, tokens: Ints, positions: Ints, temperatures: Floats, chances: Floats) -> Step:
        """Append `tokens[i]` at `positions[i]` of row i and draw the next; all (rows,).

        temperatures: 0 takes the likeliest. chances: uniform in [0, 1), what the draw is made
        from.
        """
        ...


def draw(
    top_tokens: Ints,
    top_logits: Floats,
    log_sums: Floats,
    temperatures: Floats,
    chances: Floats,
    row_logits: Callable[[int], Floats],
) -> Ints:
    """Inverse-CDF draws, (rows,), that look at the best TOP tokens first.

    top_logits (rows, TOP), falling; log_sums (rows,): log of the sum of exp(logit / temperature)
    over the whole vocabulary. Only a row whose chance lies beyond its best few asks `row_logits`
    for all of its logits, (vocab,).
    """
    safe = np.where(temperatures > 0, temperatures, 1).astype(np.float32)
    reach = np.exp(top_logits / safe[:, None] - log_sums[:, None]).cumsum(axis=1)
    greedy = temperatures == 0
    place = np.where(greedy, 0, (reach <= chances[:, None]).sum(axis=1))
    tokens = np.take_along_axis(top_tokens, np.minimum(place, reach.shape[1] - 1)[:, None], axis=1)[
        :, 0
    ]
    for row in np.flatnonzero(place == reach.shape[1]):
        rest = np.exp(row_logits(int(row)) / safe[row] - log_sums[row])
        rest[top_tokens[row]] = 0
        beyond = rest.cumsum()
        wanted = (chances[row] - reach[row, -1]) / max(1 - reach[row, -1], 1e-9) * beyond[-1]
        tokens[row] = min(int(np.searchsorted(beyond, wanted, side="right")), len(rest) - 1)
    return tokens
