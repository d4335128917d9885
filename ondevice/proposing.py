"""From a drafter's logits to ranked children: what is read, how it is scored.

A drafter function gives, beside the logits, the maximum and the sum of exp(logit - maximum) of each
128 of them. So the log-normaliser needs no logit, and only chunks whose maximum is among the
largest can hold one of the best candidates: for 49,152 rows 64 of 384 chunks are read (58 do hold
one, in the median, for a drafter made of SmolLM2's layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.models.drafter_weights import CHUNK_ROWS
from ondevice.records import FloatArray, Proposal
from ondevice.sampling import DRAFT_STREAM, Law, SamplingParams, log_probabilities
from ondevice.slots import check_finite

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

CANDIDATES = 64
"""How many of the likeliest tokens are ranked with noise."""


class RowTokens:
    """Which token a logit row stands for; padding rows after the last stand for none."""

    def __init__(self, vocab_size: int, row_to_token: Sequence[int] | None) -> None:
        """row_to_token: token of each row; None when row i is token i."""
        self.vocab_size = vocab_size
        self._tokens = None if row_to_token is None else np.asarray(row_to_token, np.int64)
        self.rows = vocab_size if row_to_token is None else len(row_to_token)
        if self._tokens is not None:
            self._row_of = np.full(vocab_size, -1, np.int64)
            self._row_of[self._tokens] = np.arange(self.rows)

    def tokens(self, rows: Indices) -> Indices:
        """Tokens of `rows`."""
        return rows if self._tokens is None else self._tokens[rows]

    def find(self, tokens: Indices) -> Indices:
        """Rows of `tokens`; those that cannot be proposed are left out."""
        if self._tokens is None:
            return tokens
        rows = self._row_of[tokens]
        return rows[rows >= 0]

    def spread(self, logits: FloatArray) -> FloatArray:
        """Logits by row as logits by token, shape (vocab,); -inf where a token has no row."""
        if self._tokens is None:
            return logits[: self.rows]
        full = np.full(self.vocab_size, -np.inf, np.float32)
        full[self._tokens] = logits[: self.rows]
        return full


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens, best first: tokens (n,), log_q (n,) float32, n <= CANDIDATES."""

    tokens: Indices
    log_q: FloatArray


@dataclass(frozen=True, slots=True)
class Head:
    """What a step left: logits (C, 128, T), maxima and sums (C, T), C chunks of 128 rows."""

    logits: Array
    maxima: Array
    sums: Array
    vocabulary: RowTokens

    def check(self, columns: Sequence[int]) -> None:
        """Raise UnitFailed when maxima or sums of `columns` are not finite."""
        check_finite("logits", self.maxima[:, columns])
        check_finite("logits", self.sums[:, columns])

    def all_logits(self, column: int) -> FloatArray:
        """Logits of every token after row `column`, shape (vocab,)."""
        logits: FloatArray = self.logits[:, :, column].astype(np.float32).ravel()
        check_finite("logits", logits)
        return self.vocabulary.spread(logits)

    def candidates(self, column: int, law: Law, history: Sequence[int]) -> Candidates:
        """The best tokens after row `column` under the law's penalty, biases and temperature.

        At temperature 0 log_q is that of temperature 1. Cuts see the candidates alone
        (`within_cuts`). The choice of tokens is exact, and so is log_q at temperature 0 or 1. At
        others a chunk that is not read enters the normaliser by the mean of two bounds of its sum.
        """
        beta = np.float32(1 / law.params.temperature) if not law.greedy else np.float32(1)
        maxima = self.maxima[:, column].astype(np.float32)
        touched = self._touched(law, history)
        chunks, threshold = _chunks_to_read(maxima, touched)
        logits = self.logits[chunks, :, column].astype(np.float32)
        check_finite("logits", logits)
        if touched.size:
            places = np.searchsorted(chunks, touched // CHUNK_ROWS), touched % CHUNK_ROWS
            tokens = self.vocabulary.tokens(touched)
            logits[places] = law.rewrite_some(logits[places], tokens, history)
        unread = np.ones(len(maxima), bool)
        unread[chunks] = False
        sums = self.sums[unread, column].astype(np.float32)
        log_norm = _log_normaliser(logits, maxima[unread], sums, beta)
        return self._best(chunks, logits, threshold, beta, log_norm)

    def _touched(self, law: Law, history: Sequence[int]) -> Indices:
        """Rows whose logits the penalty or a bias changes."""
        if not law.params.rewrites_logits:
            return np.empty(0, np.int64)
        return self.vocabulary.find(law.touched(history))

    def _best(
        self, chunks: Indices, logits: FloatArray, threshold: float, beta: Any, log_norm: float
    ) -> Candidates:
        flat = logits.ravel()
        places = np.flatnonzero(flat >= threshold)
        places = places[np.argsort(-flat[places], kind="stable")[:CANDIDATES]]
        rows = chunks[places // CHUNK_ROWS] * CHUNK_ROWS + places % CHUNK_ROWS
        real = rows < self.vocabulary.rows
        log_q = flat[places[real]] * beta - np.float32(log_norm)
        return Candidates(self.vocabulary.tokens(rows[real]), log_q)


def _chunks_to_read(maxima: FloatArray, touched: Indices) -> tuple[Indices, float]:
    """The chunks that can hold a candidate or a touched row, and the least logit of a candidate.

    With n = CANDIDATES + touched rows, the n-th largest maximum is a logit that at least n rows
    reach; whatever happens to the touched ones, CANDIDATES of the others still do.
    """
    count = CANDIDATES + touched.size
    if count >= maxima.size:
        return np.arange(maxima.size), -np.inf
    threshold = np.partition(maxima, -count)[-count]
    wanted = maxima >= threshold
    wanted[touched // CHUNK_ROWS] = True
    return np.flatnonzero(wanted), float(threshold)


def _log_normaliser(
    logits: FloatArray, maxima: FloatArray, sums: FloatArray, beta: np.float32
) -> float:
    """log of the sum of exp(beta * logit) over the read logits and the chunks that are not read.

    A chunk's sum s = sum(e_i), 0 < e_i <= 1, bounds t = sum(e_i^beta): t lies between s and
    n^(1-beta) s^beta (power means over n = 128), and is at least 1. The geometric mean of the two
    is taken; they are equal at beta = 1. SmolLM2's first layers: log q is off by less than 0.001 at
    temperature 0.8, by up to 0.02 at 1.2.
    """
    top = max(float(logits.max()), float(maxima.max(initial=-np.inf)))
    total = float(np.exp((logits - np.float32(top)) * beta).sum())
    if maxima.size:
        log_sums = np.log(sums)
        if beta != 1:
            bound = (1 - beta) * np.float32(np.log(CHUNK_ROWS)) + beta * log_sums
            log_sums = np.maximum((log_sums + bound) / 2, 0)
        total += float(np.exp((maxima - np.float32(top)) * beta + log_sums).sum())
    return top * float(beta) + float(np.log(total))


def within_cuts(log_q: FloatArray, params: SamplingParams) -> FloatArray:
    """The prefix of `log_q` (descending) that top-k, top-p and min-p keep, renormalised.

    A cut that would fall beyond the last candidate keeps them all. Then top-p divides by its own
    mass, which it exceeds by less than one token; top-k and min-p leave log_q as it is.
    """
    if params.temperature == 0:
        return log_q
    if 0 < params.top_k <= log_q.size:
        log_q = _kept(log_q, log_q[params.top_k - 1])
    if params.top_p < 1:
        q = np.exp(log_q)
        reached = np.count_nonzero(np.cumsum(q) - q < params.top_p)
        log_q = _kept(log_q, log_q[reached - 1], least_mass=params.top_p)
    if params.min_p > 0:
        threshold = log_q[0] + np.float32(np.log(params.min_p))
        if log_q[-1] < threshold:
            log_q = _kept(log_q, threshold)
    return log_q


def _kept(log_q: FloatArray, threshold: np.float32, least_mass: float = 0.0) -> FloatArray:
    kept = log_q[log_q >= threshold]
    mass = max(float(np.exp(kept).sum()), least_mass)
    return kept - np.float32(np.log(mass))


@dataclass(frozen=True, slots=True)
class Family:
    """Whose children are wanted: those of `parent`, at absolute `position`, under `law`.

    history: every token before `position`; may be empty when the law looks at none.
    """

    parent: int
    position: int
    law: Law
    history: Sequence[int]
    proposer: str


def ranked_children(head: Head, column: int, family: Family, count: int) -> list[Proposal]:
    """The `count` best candidates after row `column` by log q + g, the verifier's own noise g.

    At temperature 0 by log q. Tokens that the law cuts off or forbids are not proposed. Under a
    constraint all logits are read, because the normaliser of what it allows is in no chunk sum.
    """
    law = family.law
    if law.params.constraint is None:
        best = head.candidates(column, law, family.history)
        log_q = within_cuts(best.log_q, law.params)
        tokens = best.tokens[: log_q.size]
    else:
        whole = _whole_log_q(head, column, family)
        tokens = np.argsort(-whole, kind="stable")[:CANDIDATES]
        tokens = tokens[whole[tokens] > -np.inf]
        log_q = whole[tokens]
    scores = log_q if law.greedy else log_q + law.noise(family.position)[tokens]
    order = np.argsort(-scores, kind="stable")[: count + 1]
    gaps = [*(scores[order[:-1]] - scores[order[1:]]).tolist(), np.inf]
    return [
        Proposal(
            parent=family.parent,
            token=int(tokens[index]),
            log_q=min(0.0, float(log_q[index])),
            rank=rank,
            gap=gaps[rank],
            proposer=family.proposer,
        )
        for rank, index in enumerate(order[:count].tolist())
    ]


def sampled_child(head: Head, column: int, family: Family) -> list[Proposal]:
    """One child sampled from the drafter's whole distribution, for rejection; none if all is cut.

    `q` is that distribution after the law's edits, temperature and cuts, (vocab,) float32.
    """
    log_q = _whole_log_q(head, column, family)
    if not log_q.max() > -np.inf:
        return []
    scores = log_q + family.law.noise(family.position, DRAFT_STREAM)
    second, first = np.argpartition(scores, -2)[-2:]
    q: FloatArray = np.exp(log_q)
    return [
        Proposal(
            parent=family.parent,
            token=int(first),
            log_q=min(0.0, float(log_q[first])),
            rank=0,
            gap=float(scores[first] - scores[second]),
            proposer=family.proposer,
            q=q,
        )
    ]


def _whole_log_q(head: Head, column: int, family: Family) -> FloatArray:
    logits = family.law.rewrite(head.all_logits(column), family.history)
    if not logits.max() > -np.inf:
        return logits
    return log_probabilities(logits, family.law.params)
