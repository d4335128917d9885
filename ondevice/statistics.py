"""All statistics of an answer, derived from its step records; the names are a contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ondevice.coordinator import Turn
from ondevice.records import DraftRecord, RoundRecord


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an answer cost. A figure that was not measured is None.

    ttft_ms: from the prompt's arrival at the coordinator to the first token. decode_tok_s: tokens
    after the first verdict, over the time since then. num_spec_steps: verdicts over at least one
    draft token. num_draft_tokens: draft tokens put before the verifier, those beyond the answer's
    end not counted. mean_acceptance_length: 1 + accepted / steps. *_busy: share of the time from
    the first verification's start to the answer's end. drafter_window: first position that the
    drafter still saw, 0 for all.
    """

    strategy: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    decode_tok_s: float | None
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    drafter_busy: float | None
    verifier_busy: float | None
    drafter_window: int
    seed: int
    energy_mj: dict[str, float] | None
    energy_reason: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain values under the contract's names."""
        return asdict(self)


NO_ENERGY = "this version reads no energy counter"


def summarise(turn: Turn, reason: str, seed: int) -> Statistics:
    """The statistics of a finished turn."""
    speculated = [r for r in turn.rounds if r.drafted]
    drafted = sum(r.drafted for r in speculated)
    accepted = sum(r.accepted for r in speculated)
    since_ns = turn.rounds[0].start_ns if turn.rounds else 0
    until_ns = turn.ended_ns or 0
    return Statistics(
        strategy=turn.schedule.strategy,
        reason=reason,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.count,
        ttft_ms=_ttft_ms(turn),
        decode_tok_s=_decode_tok_s(turn.rounds),
        num_spec_steps=len(speculated),
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        mean_acceptance_length=1 + accepted / len(speculated) if speculated else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        drafter_busy=_busy(turn.drafts, since_ns, until_ns),
        verifier_busy=_busy(turn.rounds, since_ns, until_ns),
        drafter_window=max((d.window for d in turn.drafts), default=0),
        seed=seed,
        energy_mj=None,
        energy_reason=NO_ENERGY,
    )


def _ttft_ms(turn: Turn) -> float | None:
    if turn.first_token_ns is None:
        return None
    return (turn.first_token_ns - turn.started_ns) / 1e6


def _decode_tok_s(rounds: list[RoundRecord]) -> float | None:
    if len(rounds) < 2:
        return None
    elapsed_ns = rounds[-1].end_ns - rounds[0].end_ns
    tokens = sum(r.committed for r in rounds[1:])
    return tokens / (elapsed_ns / 1e9) if elapsed_ns > 0 else None


def _busy(
    records: Sequence[RoundRecord] | Sequence[DraftRecord], since_ns: int, until_ns: int
) -> float | None:
    if not since_ns < until_ns:
        return None
    spans = (min(r.end_ns, until_ns) - max(r.start_ns, since_ns) for r in records)
    return sum(span for span in spans if span > 0) / (until_ns - since_ns)
