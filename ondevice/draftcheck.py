"""What a drafter returns is checked before the coordinator sees it: anybody may write a drafter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ondevice.errors import UnitFailed
from ondevice.records import DraftResult, Proposal
from ondevice.units import DraftRequest

Q_TOLERANCE = 1e-2
"""How far a distribution's sum may lie from 1: half precision over 150,000 tokens."""


def check_result(result: DraftResult, request: DraftRequest) -> None:
    """Raise UnitFailed unless `result` is an answer to `request`.

    Every proposal is a token of the vocabulary below a row that was asked for, with log q <= 0 and
    gap >= 0; the children of a row are as many as asked for at most, distinct, and ranked from 0.
    Under `rejection` with noise a proposal's `q` is the distribution it says it was drawn from.
    """
    if not isinstance(result, DraftResult):
        raise UnitFailed(f"the drafter returned a {type(result).__name__}, expected a DraftResult")
    if result.step != request.step:
        raise UnitFailed(f"the drafter answered step {result.step}, expected {request.step}")
    asked = {row.node for row in request.rows}
    families: dict[int, list[Proposal]] = defaultdict(list)
    for proposal in result.proposals:
        _check_proposal(proposal, request)
        if proposal.parent not in asked:
            raise UnitFailed(
                f"the drafter proposed a child of node {proposal.parent}, "
                f"expected of one of the {len(asked)} rows asked for"
            )
        families[proposal.parent].append(proposal)
    for parent, children in families.items():
        _check_family(parent, children, request.children)


def _check_proposal(proposal: Proposal, request: DraftRequest) -> None:
    vocab_size, token = request.law.vocab_size, proposal.token
    if not (type(token) is int and 0 <= token < vocab_size):
        raise UnitFailed(f"the drafter proposed token {token!r}, expected 0 to {vocab_size - 1}")
    # Both are written so that NaN fails.
    if not proposal.log_q <= 0:
        raise UnitFailed(f"the drafter gave token {token} log q {proposal.log_q}, expected <= 0")
    if not proposal.gap >= 0:
        raise UnitFailed(f"the drafter gave token {token} a gap of {proposal.gap}, expected >= 0")
    if proposal.q is not None:
        _check_distribution(proposal.q, token, vocab_size)


def _check_distribution(q: object, token: int, vocab_size: int) -> None:
    if not isinstance(q, np.ndarray) or q.shape != (vocab_size,):
        shape = getattr(q, "shape", type(q).__name__)
        raise UnitFailed(f"the drafter's q has shape {shape}, expected ({vocab_size},)")
    total, least = float(q.sum(dtype=np.float64)), float(q.min())
    if not (least >= 0 and abs(total - 1) <= Q_TOLERANCE and q[token] > 0):
        raise UnitFailed(
            f"the drafter's q sums to {total:.4g}, its least is {least:.3g} and token {token} has "
            f"{float(q[token]):.3g}; expected 1, >= 0 and > 0"
        )


def _check_family(parent: int, children: Sequence[Proposal], most: int) -> None:
    if len(children) > most:
        raise UnitFailed(
            f"the drafter proposed {len(children)} children of node {parent}, expected {most}"
        )
    if len({child.token for child in children}) < len(children):
        raise UnitFailed(f"the drafter proposed a token twice below node {parent}, expected once")
    ranks = sorted(child.rank for child in children)
    if ranks != list(range(len(children))):
        raise UnitFailed(f"the children of node {parent} are ranked {ranks}, expected from 0 on")
