"""The texts to learn from, in memory, and the order in which they are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ondevice.converters.distil.shards import Text
from ondevice.converters.distil.vocabulary import SEEN_WEIGHT

POOL_TEXTS = 256  # sorted by length among so many, so that little is padding


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded at the end.

    tokens (texts, length): inputs. places (targets,): flat positions in them whose outputs are
    learned. rows (targets, K): output rows of the likeliest tokens; weights (targets, K): the
    loss's target distribution over them (padding entries weigh nothing). first (targets,): the row
    of the verifier's first choice, -1 when the student has none for it. seen: input tokens without
    padding.
    """

    tokens: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    first: npt.NDArray[np.int64]
    seen: int


def token_weights(texts: Sequence[Text], vocab_size: int) -> npt.NDArray[np.float64]:
    """How much each token is wanted, (vocab,): its probabilities in all targets, and its uses."""
    found = np.zeros(vocab_size)
    for text in texts:
        probabilities = np.exp(text.top_logprobs.astype(np.float64))
        np.add.at(found, text.top_tokens.ravel(), probabilities.ravel())
        np.add.at(found, text.tokens[text.start :], SEEN_WEIGHT)
    return found


class Batcher:
    """Batches of `texts` for a student with the output rows `row_to_token`.

    first_choice_weight: share of the loss that is cross-entropy on the verifier's first choice; the
    rest is its distribution over the rows (whose cross-entropy is the KL divergence and a
    constant).
    """

    def __init__(
        self,
        texts: Sequence[Text],
        row_to_token: Sequence[int],
        vocab_size: int,
        first_choice_weight: float,
    ) -> None:
        self._texts = texts
        self._row_of = np.full(vocab_size, -1, np.int64)
        self._row_of[list(row_to_token)] = np.arange(len(row_to_token))
        self._first_choice_weight = first_choice_weight

    def __len__(self) -> int:
        return len(self._texts)

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[int]]:
        """Places of the texts of each batch of epoch `number`: each text once, in random order.

        batch_tokens: most input tokens of a batch, padding included.
        """
        source = np.random.Generator(np.random.Philox(key=[seed, number]))
        order = source.permutation(len(self._texts)).tolist()
        batches: list[list[int]] = []
        for first in range(0, len(order), POOL_TEXTS):
            pool = sorted(order[first : first + POOL_TEXTS], key=self._length)
            batches += self._cut(pool, batch_tokens)
        return [batches[place] for place in source.permutation(len(batches))]

    def _length(self, place: int) -> int:
        return len(self._texts[place].tokens) - 1

    def _cut(self, pool: list[int], batch_tokens: int) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for place in pool:
            if batches[-1] and (len(batches[-1]) + 1) * self._length(place) > batch_tokens:
                batches.append([])
            batches[-1].append(place)
        return batches

    def batch(self, places: Sequence[int]) -> Batch:
        """The batch of the texts at `places`."""
        texts = [self._texts[place] for place in places]
        length = max(len(text.tokens) for text in texts) - 1
        tokens = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens) - 1] = text.tokens[:-1]
        starts = [
            row * length + np.arange(text.start - 1, len(text.tokens) - 1)
            for row, text in enumerate(texts)
        ]
        rows, weights, first = self._targets(
            np.concatenate([text.top_tokens for text in texts]),
            np.concatenate([text.top_logprobs for text in texts]),
        )
        seen = sum(len(text.tokens) - 1 for text in texts)
        return Batch(tokens, np.concatenate(starts), rows, weights, first, seen)

    def _targets(
        self, top_tokens: npt.NDArray[np.unsignedinteger], top_logprobs: npt.NDArray[np.float16]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        rows = self._row_of[top_tokens]
        weights = np.where(rows >= 0, np.exp(top_logprobs.astype(np.float32)), 0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.maximum(total, 1e-9)
        first = rows[:, 0]
        share = np.where(first >= 0, self._first_choice_weight, 0).astype(np.float32)
        weights *= 1 - share[:, None]
        weights[:, 0] += share
        return np.maximum(rows, 0), weights.astype(np.float32), first
