"""Step records as they come about, and what the costs learn from them."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.costs import CostModel
from ondevice.records import (
    AnswerLimits,
    DraftRecord,
    DraftResult,
    EmittedToken,
    FinishReason,
    StartVerify,
    StepRecord,
    Verdict,
    VerifyRow,
)
from ondevice.tree import Rerooted


class Ledger:
    """Books one answer's rounds. It keeps the drafter steps of the round under way, no more."""

    def __init__(self, costs: CostModel, now_ns: int = 0) -> None:
        """now_ns: when the first round could have begun."""
        self._costs = costs
        self._drafts: list[DraftRecord] = []
        self._round_began_ns = now_ns

    def begin(self, now_ns: int) -> None:
        """The verifier is free for the first round."""
        self._round_began_ns = now_ns

    def drafted(self, result: DraftResult, rows: int, kept: int) -> None:
        """A drafter step ended that had `rows` nodes to expand and gave the tree `kept`."""
        self._drafts.append(
            DraftRecord(
                rows=rows,
                function_rows=result.function_rows,
                kept=kept,
                start_ns=result.start_ns,
                end_ns=result.end_ns,
                window=result.window,
            )
        )

    def left_over(self) -> tuple[DraftRecord, ...]:
        """Drafter steps that ended since the last round."""
        return tuple(self._drafts)

    def close_round(
        self,
        strategy: str,
        verdict: Verdict,
        command: StartVerify | None,
        rerooted: Rerooted,
        context: int,
        waited_ns: int,
        proposers: Sequence[str],
        row_proposers: Sequence[str],
    ) -> StepRecord:
        """The record of a round that is committed. command: None for a token of a run.

        proposers: of the accepted nodes; row_proposers: of all rows of the command, root included.
        strategy: the one in force; a run is `plain` in any case, as when the drafter is lost.
        """
        rows = command.rows if command else ()
        tokens = len(rerooted.committed)
        drafts, self._drafts = tuple(self._drafts), []
        depths = _depths(rows)
        # Below the token that ended the answer nothing was drafted; elsewhere every row counts.
        deepest = tokens if tokens < len(verdict.tokens) else len(rows)
        drafted = [row for row, depth in enumerate(depths) if 1 <= depth <= deepest]
        return StepRecord(
            strategy=strategy if command else "plain",
            context=context,
            rows=len(rows) + len(command.riders) if command else 1,
            drafted=len(drafted),
            accepted=len(proposers),
            committed=tokens,
            start_ns=verdict.start_ns,
            end_ns=verdict.end_ns,
            waited_ns=waited_ns,
            root_was_known=rerooted.known == tokens,
            accepted_by=tuple(proposers),
            outcomes=rerooted.outcomes,
            drafts=drafts,
            drafted_by=tuple(row_proposers[row] for row in drafted),
            offered_by=rerooted.offered,
            window=command.window if command else None,
            drafted_at=tuple(depths[row] for row in drafted),
            refused=_refused(rows, set(drafted), verdict.accepted),
            lived_on=rerooted.lived_on,
            dropped=len(rerooted.dropped),
        )

    def learn(self, record: StepRecord, running_since_ns: int | None, now_ns: int) -> float:
        """Let the costs learn; returns the milliseconds since the round before.

        running_since_ns: when the drafter step still under way began.
        """
        elapsed_ms = (now_ns - self._round_began_ns) / 1e6
        self._round_began_ns = now_ns
        start_ns, end_ns = record.start_ns, record.end_ns
        if end_ns > start_ns:
            busy_ns = sum(_overlap_ns(d.start_ns, d.end_ns, record) for d in record.drafts)
            if running_since_ns is not None:
                busy_ns += _overlap_ns(running_since_ns, end_ns, record)
            share = min(1.0, busy_ns / (end_ns - start_ns))
            costs = self._costs.plain if record.strategy == "plain" else self._costs.verifier
            costs.observe(record.rows, record.context, share, (end_ns - start_ns) / 1e6)
        for draft in record.drafts:
            if draft.function_rows:
                took_ns = draft.end_ns - draft.start_ns
                beside = _overlap_ns(draft.start_ns, draft.end_ns, record) / max(1, took_ns)
                self._costs.drafter.observe(draft.function_rows, 0, beside, took_ns / 1e6)
        return elapsed_ms


def _overlap_ns(start_ns: int, end_ns: int, record: StepRecord) -> int:
    return max(0, min(end_ns, record.end_ns) - max(start_ns, record.start_ns))


def _depths(rows: Sequence[VerifyRow]) -> list[int]:
    """Of each row, how many levels it lies below row 0."""
    depths = [0] if rows else []
    for row in rows[1:]:
        depths.append(depths[row.parent] + 1)
    return depths


def _refused(
    rows: Sequence[VerifyRow], drafted: set[int], accepted: Sequence[int]
) -> tuple[int, ...]:
    """Tokens of the path below the last accepted row that takes the likeliest child each time.

    Rows are in the order of falling reach, so that is the first one. Empty where a drafted row
    beside the accepted path is all that was refused.
    """
    last = accepted[-1] if accepted else (rows[0].node if rows else None)
    at = next((index for index, row in enumerate(rows) if row.node == last), 0)
    tokens = []
    for index, row in enumerate(rows):
        if index in drafted and row.parent == at:
            tokens.append(row.token)
            at = index
    return tuple(tokens)


def within(
    limits: AnswerLimits, tokens: Sequence[int], left: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to the answer's end, and why it ends there, if it does.

    left: how many the answer may have yet.
    """
    for count, token in enumerate(tokens, start=1):
        if limits.ends_at(token):
            return tuple(tokens[:count]), "stop"
        if count >= left:
            return tuple(tokens[:count]), "length"
    return tuple(tokens), None


def emitted_tokens(
    tokens: Sequence[int], verdict: Verdict, proposers: Sequence[str]
) -> tuple[EmittedToken, ...]:
    """The committed `tokens` of a verdict; proposers: of those that were accepted."""
    return tuple(
        EmittedToken(
            token,
            verdict.logprobs[i],
            verdict.top_logprobs[i] if verdict.top_logprobs else (),
            proposers[i] if i < len(proposers) else None,
        )
        for i, token in enumerate(tokens)
    )
