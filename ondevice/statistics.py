"""All statistics of an answer, derived from its step records; the names are a contract."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ondevice.records import DraftRecord, Emit, StepRecord, Stop, Window


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an answer cost. A figure that was not measured is None.

    ttft_ms: from the prompt's arrival at the coordinator to the first token. decode_tok_s: tokens
    after the first verdict, over the time since then. num_spec_steps: verdicts over at least one
    draft token. num_draft_tokens: draft tokens put before the verifier, those beyond the answer's
    end not counted. mean_acceptance_length: 1 + accepted / steps. *_busy: share of the time from
    the first verification's start to the last one's end. drafter_window: first position that the
    drafter still saw, 0 for all. proposers: by name, how many nodes it offered to the tree, how
    many of the draft tokens put before the verifier were those, and how many of them accepted.
    lookahead: W, N and G of the window that rode along last, None if none ever did.
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
    proposers: dict[str, dict[str, int]]
    lookahead: dict[str, int] | None
    seed: int
    energy_mj: dict[str, float | None] | None = None
    energy_reason: str | None = None
    energy_idle_mw: dict[str, float] | None = None
    energy_per_token_mj: dict[str, float] | None = None
    energy_rejected_drafts_mj: float | None = None
    thermal_state: str | None = None
    low_power_mode: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values under the contract's names."""
        return asdict(self)


def letters(window: Window) -> dict[str, int]:
    """W, N and G."""
    return {"W": window.columns, "N": window.ngram, "G": window.guesses}


@dataclass(slots=True)
class Tally:
    """Adds up an answer's step records as they come; keeps none of them.

    asked_ns: when the prompt arrived at the coordinator.
    """

    strategy: str
    prompt_tokens: int
    asked_ns: int
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    window: int = 0
    first_token_ns: int | None = None
    first_start_ns: int | None = None
    first_end_ns: int = 0
    first_tokens: int = 0
    last_end_ns: int = 0
    verifier_ns: int = 0
    drafter_ns: int = 0
    offered_by: Counter[str] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    lookahead: Window | None = None

    def take(self, event: Emit | Stop, now_ns: int) -> None:
        """Add what the coordinator said at `now_ns`."""
        if isinstance(event, Stop):
            self._add_drafts(event.drafts)
            return
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        self.add(event.record)

    def add(self, record: StepRecord) -> None:
        """Add one round."""
        if self.first_start_ns is None:
            self.first_start_ns, self.first_end_ns = record.start_ns, record.end_ns
            self.first_tokens = record.committed
        self.tokens += record.committed
        self.last_end_ns = record.end_ns
        self.verifier_ns += record.end_ns - record.start_ns
        self.offered_by.update(dict(record.offered_by))
        if record.drafted:
            self.steps += 1
            self.drafted += record.drafted
            self.accepted += record.accepted
            self.drafted_by.update(record.drafted_by)
            self.accepted_by.update(record.accepted_by)
        self.lookahead = record.window or self.lookahead
        self._add_drafts(record.drafts)

    def _add_drafts(self, drafts: tuple[DraftRecord, ...]) -> None:
        since_ns = self.first_start_ns
        for draft in drafts:
            self.window = max(self.window, draft.window)
            if since_ns is not None:
                until_ns = min(draft.end_ns, self.last_end_ns)
                self.drafter_ns += max(0, until_ns - max(draft.start_ns, since_ns))

    def summary(self, reason: str, seed: int) -> Statistics:
        """The statistics so far."""
        return Statistics(
            strategy=self.strategy,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            ttft_ms=self._ttft_ms,
            decode_tok_s=self._decode_tok_s,
            num_spec_steps=self.steps,
            num_draft_tokens=self.drafted,
            num_accepted_draft_tokens=self.accepted,
            mean_acceptance_length=1 + self.accepted / self.steps if self.steps else None,
            draft_acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            drafter_busy=self._share(self.drafter_ns),
            verifier_busy=self._share(self.verifier_ns),
            drafter_window=self.window,
            proposers={
                name: {
                    "offered": self.offered_by[name],
                    "verified": self.drafted_by[name],
                    "accepted": self.accepted_by[name],
                }
                for name in sorted(self.offered_by | self.drafted_by)
            },
            lookahead=None if self.lookahead is None else letters(self.lookahead),
            seed=seed,
        )

    @property
    def _ttft_ms(self) -> float | None:
        if self.first_token_ns is None:
            return None
        return (self.first_token_ns - self.asked_ns) / 1e6

    @property
    def _decode_tok_s(self) -> float | None:
        elapsed_ns = self.last_end_ns - self.first_end_ns
        if elapsed_ns <= 0:
            return None
        return (self.tokens - self.first_tokens) / (elapsed_ns / 1e9)

    def _share(self, busy_ns: int) -> float | None:
        if self.first_start_ns is None or self.last_end_ns <= self.first_start_ns:
            return None
        return busy_ns / (self.last_end_ns - self.first_start_ns)
