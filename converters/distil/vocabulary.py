"""The drafter's vocabulary: the frequent tokens of the texts, with specials and single bytes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ondevice.errors import BadRequest

ROW_MULTIPLE = 128  # the drafter graph reduces its logits by so many
SEEN_WEIGHT = 8.0
"""A token that was in a text counts so many times its probability: what stands there is sure."""


def check_row_count(rows: int, vocab_size: int) -> None:
    """BadRequest unless a drafter may have so many output rows of a vocabulary of `vocab_size`."""
    if rows > vocab_size:
        raise BadRequest(
            f"rows: expected at most the {vocab_size} tokens of the vocabulary, got {rows}"
        )
    if rows < ROW_MULTIPLE or rows % ROW_MULTIPLE:
        raise BadRequest(
            f"rows: expected a multiple of {ROW_MULTIPLE}, got {rows}; 16384 is a good choice"
        )


def choose_rows(weights: npt.NDArray[np.float64], always: Iterable[int], rows: int) -> list[int]:
    """Ascending ids of the `rows` tokens that a drafter can propose.

    weights (vocab,): how often a token is wanted. `always` are in whatever their weight is; ties go
    to the lower id, which a byte-pair tokenizer learned earlier. Raises BadRequest when `rows` is
    no possible count or too small for `always`.
    """
    check_row_count(rows, len(weights))
    fixed = sorted(set(always))
    if len(fixed) > rows:
        least = -(-len(fixed) // ROW_MULTIPLE) * ROW_MULTIPLE
        raise BadRequest(
            f"rows: expected at least {least} for the {len(fixed)} special and byte tokens, "
            f"got {rows}"
        )
    ranked = weights.astype(np.float64).copy()
    ranked[fixed] = np.inf
    return sorted(np.argsort(-ranked, kind="stable")[:rows].tolist())
