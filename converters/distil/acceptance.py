"""How much of a verifier's text a drafter foretells: the figures of a card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHAINS = (4, 6, 8)
FEW = 4


@dataclass(frozen=True, slots=True)
class Judged:
    """One text, token by token, each array (n,).

    rank: place of the text's token among the drafter's choices, 0 the first; a token that it cannot
    propose has the largest int64. overlap: sum of min(p, q) at temperature 1. in_loop: the token
    only repeats what stands before it.
    """

    rank: npt.NDArray[np.int64]
    overlap: npt.NDArray[np.float32]
    in_loop: npt.NDArray[np.bool_]


def judge(
    verifier: npt.NDArray[np.float32],
    drafter: npt.NDArray[np.float32],
    row_to_token: Sequence[int],
    tokens: Sequence[int],
    loop_start: int | None,
) -> Judged:
    """Where the drafter's logits (n, rows) put each of `tokens`, before which they stand.

    verifier: its logits there, (n, vocab).
    """
    rows = np.full(verifier.shape[1], -1, np.int64)
    rows[list(row_to_token)] = np.arange(len(row_to_token))
    own = rows[list(tokens)]
    logit = np.take_along_axis(drafter, np.maximum(own, 0)[:, None], axis=1)
    rank = (drafter > logit).sum(axis=1)
    rank = np.where(own >= 0, rank, np.iinfo(np.int64).max)
    p = _softmax(verifier)[:, list(row_to_token)]
    overlap = np.minimum(p, _softmax(drafter)).sum(axis=1)
    start = len(tokens) if loop_start is None else loop_start
    return Judged(rank, overlap, np.arange(len(tokens)) >= start)


def _softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: npt.NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
    return share


def accepted_per_cycle(hits: npt.NDArray[np.bool_], chain: int) -> tuple[int, int]:
    """Tokens accepted and cycles when chains of `chain` first choices are verified along a text.

    hits (n,): the drafter's first choice is the text's token. A cycle commits what it accepts and
    one token more, which is the verifier's.
    """
    place = accepted = cycles = 0
    while place < len(hits):
        run = 0
        while run < chain and place + run < len(hits) and hits[place + run]:
            run += 1
        accepted += run
        cycles += 1
        place += run + 1
    return accepted, cycles


def figures(texts: Iterable[Judged], with_loops: bool = True) -> dict[str, float]:
    """Shares and means over `texts`; without loops only the tokens before them count."""
    kept = []
    for text in texts:
        use = slice(None) if with_loops else ~text.in_loop
        kept.append((text.rank[use], text.overlap[use]))
    ranks = np.concatenate([rank for rank, _ in kept])
    found: dict[str, float] = {
        "tokens": len(ranks),
        "first_choice": float((ranks == 0).mean()),
        "first_four": float((ranks < FEW).mean()),
        "overlap": float(np.concatenate([overlap for _, overlap in kept]).mean()),
    }
    for chain in CHAINS:
        counts = [accepted_per_cycle(rank == 0, chain) for rank, _ in kept]
        accepted, cycles = (sum(column) for column in zip(*counts, strict=True))
        found[f"accepted_chain_{chain}"] = accepted / cycles
    return found
