"""What passes between the coordinator and the world: proposals, commands, events, step records.

Node ids are integers, never reused in a session. A *position* is the absolute index of a token in
the session's text, from 0. Times are `time.monotonic_ns` of the machine, or virtual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

UnitName = Literal["drafter", "verifier"]
AcceptanceRule = Literal["coupled", "rejection"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

ROOT_ROW = -1
"""`VerifyRow.parent` of row 0, the root."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token that may follow the node `parent`.

    log_q: log-probability under the proposer's own distribution, before noise (<= 0).
    rank: 0 for the proposer's first choice among the children of this parent, then 1, 2, ...
    gap: by how much log q + noise exceeds the proposer's next choice; inf when there is none.
    q: the whole distribution, shape (vocab,), under `rejection`; None is a point mass on `token`.
    """

    parent: int
    token: int
    log_q: float
    rank: int
    gap: float
    proposer: str
    q: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class NodeToken:
    """A node of the tree, or one that was, and its token."""

    node: int
    token: int


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A node that the drafter shall expand.

    path: the nodes from below the root down to this one; empty when `node` is the root. A drafter
    that has no slot for one of them computes it in the same step.
    """

    node: int
    path: tuple[NodeToken, ...]


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """A row of a verifier's forward. parent: index of the parent's row, ROOT_ROW for row 0.

    q: under `rejection`, the distribution that the token was sampled from, shape (vocab,).
    """

    node: int
    token: int
    parent: int
    q: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of lookahead decoding, in its paper's letters: W columns, N-grams, G of them a key.

    columns: W, of the Jacobi window, 2 to 64. ngram: N, 3 to 10; the window has N - 1 levels.
    guesses: G, n-grams kept and put before the verifier by their first token, 1 to 64.
    """

    columns: int
    ngram: int
    guesses: int

    @property
    def riders(self) -> int:
        """Rows that the window adds to a forward: its first place is the root's row."""
        return self.columns * (self.ngram - 1) - 1


# Commands


@dataclass(frozen=True, slots=True)
class Prefill:
    """Append `tokens` to the unit's cache. Answered by `on_prefill`."""

    step: int
    unit: UnitName
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Expand `rows`. Answered by `on_draft`.

    committed: the tokens committed since the drafter's last command, oldest first; the last of all
    committed tokens is the root. dropped: nodes that left the tree since then.
    """

    step: int
    rows: tuple[DraftRow, ...]
    committed: tuple[NodeToken, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Score `rows` (row 0 is the root, parents come first) and walk them. See `on_verdict`.

    riders: rows that ride along for lookahead; their parents index rows, then riders. The first of
    them are those of `window`, where there is one, the others fill. want_hidden: the verdict shall
    carry `hidden`.
    """

    step: int
    rows: tuple[VerifyRow, ...]
    rule: AcceptanceRule
    riders: tuple[VerifyRow, ...] = ()
    want_hidden: bool = False
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class StartRun:
    """Decode plainly from the root, one verdict a token, for `limit` tokens or until Truncate.

    watched: an EndRun may come after any token.
    """

    step: int
    root: NodeToken
    limit: int
    watched: bool = False


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run queues no further forward; the one under way gives its last token. Not answered."""

    step: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep the first `length` tokens of the unit's cache; a drafter drops all its nodes.

    Sent to a unit at rest, with one exception: it ends a run in progress. Not answered.
    """

    unit: UnitName
    length: int


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A committed token of the answer.

    logprob: under the verifier's unmodified distribution. proposer: whose node was accepted; None
    when the token is the verifier's own.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    proposer: str | None


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens that are now part of the text, and the record of the round that made them so."""

    tokens: tuple[EmittedToken, ...]
    record: StepRecord


@dataclass(frozen=True, slots=True)
class Stop:
    """The answer is complete. `error` is set when reason is "error".

    drafts: drafter steps that ended since the last round.
    """

    reason: FinishReason
    error: BaseException | None = None
    drafts: tuple[DraftRecord, ...] = ()


Command = Prefill | StartDraft | StartVerify | StartRun | EndRun | Truncate | Emit | Stop


# Events


@dataclass(frozen=True, slots=True)
class DraftResult:
    """What a drafter step found: children of the rows, rank by rank.

    catch_up_steps: forwards that were needed before this one. function_rows: of the function that
    ran, when it ran once: the step's time is that function's; else 0. window: the first position
    that the drafter still sees beyond its four oldest, 0 while it sees everything.
    """

    step: int
    proposals: tuple[Proposal, ...]
    start_ns: int
    end_ns: int
    catch_up_steps: int = 0
    function_rows: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's walk from the root.

    accepted: the accepted nodes, top down. tokens: their tokens, then the verifier's own next one:
    (len(accepted) + 1,). logprobs: one each. top_logprobs: per token the likeliest (token,
    log-probability) pairs, empty unless asked for. hidden: the final norm's output of the last row
    of the walk, shape (hidden_size,), when asked for. row_tokens: what the law chose after every
    row of the request, with its noise. rider_tokens: each rider's likeliest token, without.
    more: a run goes on; the last verdict of a run has it False, and no tokens when the run was
    ended from outside.
    """

    step: int
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    start_ns: int
    end_ns: int
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    hidden: FloatArray | None = None
    row_tokens: tuple[int, ...] = ()
    rider_tokens: tuple[int, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Where an answer ends.

    ends_at: called once for every token of the answer, in order; True makes it the last one
    (end-of-sequence ids and stop strings). max_tokens: at least 1.
    """

    max_tokens: int
    ends_at: Callable[[int], bool]


# Step records: all statistics are derived from these.


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the children that the drafter gave one node of the committed path.

    claims: its claimed chance of each, in rank order; empty when it had not expanded the node.
    taken: rank of the one that is now text, -1 for none.
    """

    claims: tuple[float, ...]
    taken: int


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One drafter step: rows expanded, nodes that the tree gained, when.

    function_rows: as in `DraftResult`.
    """

    rows: int
    function_rows: int
    kept: int
    start_ns: int
    end_ns: int
    window: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One round: what was drafted, verified, accepted and waited for, and when.

    strategy: the one in force. context: tokens before the root. rows: of the forward, root and
    fill included. drafted: rows put before the verifier, root excluded; like accepted and committed
    it counts what stayed after the answer's end was cut. waited_ns: how long the verifier had been
    idle. root_was_known: the tree already held the new root. accepted_by: proposers. outcomes: one
    per committed token. drafts: drafter steps that ended since the last round. drafted_by:
    proposers of the drafted rows, drafted_at: their levels below the root, from 1. offered_by: how
    many nodes each proposer gave the tree since the last round. window: of lookahead, if one rode
    along. refused: tokens of the likeliest path that was drafted on from where the verifier turned
    off. lived_on, dropped: nodes below the new root, and those that left the tree.
    """

    strategy: str
    context: int
    rows: int
    drafted: int
    accepted: int
    committed: int
    start_ns: int
    end_ns: int
    waited_ns: int
    root_was_known: bool
    accepted_by: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    drafts: tuple[DraftRecord, ...] = ()
    drafted_by: tuple[str, ...] = ()
    offered_by: tuple[tuple[str, int], ...] = ()
    window: Window | None = None
    drafted_at: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    lived_on: int = 0
    dropped: int = 0
