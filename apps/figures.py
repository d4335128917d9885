"""The figures of a profile: everything that is said of a strategy, derived from step records.

A `Figures` is one strategy on the prompts of one domain, or on all of them. Rates and ratios are
medians with quartiles over prompts (a prompt's repeats count as their median); counts are sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from ondevice.apps.race import Measured, Spread, Standing, rates, speed_ups
from ondevice.records import StepRecord, UnitName
from ondevice.spans import Busy
from ondevice.units import UnitMemory

EVERY = "all"
"""The domain of all prompts together."""
UNNAMED = "unnamed"
"""The domain of prompts whose file names none."""
REFERENCE = "plain"


@dataclass(frozen=True, slots=True)
class DepthCount:
    """Draft tokens `depth` levels below the root.

    rows: put before the verifier there. rounds: that had any there. accepted: rounds in which one
    of them was.
    """

    depth: int
    rows: int
    rounds: int
    accepted: int

    @property
    def rate(self) -> float:
        """Share of these rounds in which the text got that far."""
        return self.accepted / self.rounds


@dataclass(frozen=True, slots=True)
class ProposerCount:
    """Tokens of one proposer: offered to the tree, put before the verifier, accepted by it."""

    offered: int
    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts that a later run can be compared with.

    drafted, accepted: draft tokens. known: committed tokens at whose place the drafter had said
    something; right: those that were its first choice. Unlike acceptance, that does not depend on
    how many rows the policy chose.
    """

    drafted: int = 0
    accepted: int = 0
    known: int = 0
    right: int = 0

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Drafts:
        """Of these rounds."""
        found = cls()
        for record in records:
            known = [outcome for outcome in record.outcomes if outcome.claims]
            right = sum(outcome.taken == 0 for outcome in known)
            found += cls(record.drafted, record.accepted, len(known), right)
        return found

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.known + other.known,
            self.right + other.right,
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The most that a unit held in an answer, in bytes, see `ondevice.units.UnitMemory`."""

    weights_bytes: int
    caches_bytes: int
    scratch_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One strategy on the prompts of one domain.

    prefill_ms: from the prompt's arrival to the first forward over its last token; a part of
    ttft_ms. speed_up: decoding rate over that of plain. rounds: verdicts; num_spec_steps: those
    over at least one draft token. committed: tokens of all rounds. rerooting_rounds: rounds that a
    tree could outlive, rerooting_hits: those whose new root the tree already held. compared:
    answers that plain gave too, same_text: those whose tokens are the same. by_question: `Drafts`
    by prompt. memory: by unit. energy_mj_per_token: by rail, None without any counter;
    energy_reason: why.
    """

    strategy: str
    domain: str
    answers: int
    prompt_tokens: int
    tokens: int
    compared: int
    same_text: int
    ttft_ms: Spread | None
    prefill_ms: Spread | None
    decode_tok_s: Spread | None
    speed_up: Spread | None
    rounds: int
    committed: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    rerooting_rounds: int
    rerooting_hits: int
    busy: Busy
    by_depth: tuple[DepthCount, ...]
    by_proposer: dict[str, ProposerCount]
    by_question: dict[str, Drafts]
    memory: dict[str, MemoryUse] = field(default_factory=dict)
    energy_mj_per_token: dict[str, float] | None = None
    energy_reason: str | None = None
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def drafts(self) -> Drafts:
        """Of all prompts."""
        return reduce(Drafts.__add__, self.by_question.values(), Drafts())

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted."""
        return _over(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def first_choice_rate(self) -> float | None:
        """How often the drafter's first choice was the verifier's token."""
        return _over(self.drafts.right, self.drafts.known)

    @property
    def tokens_per_verify(self) -> float | None:
        """Tokens committed a forward, plain rounds included."""
        return _over(self.committed, self.rounds)

    @property
    def rerooting_rate(self) -> float | None:
        """Share of the speculating rounds after which the tree lived on."""
        return _over(self.rerooting_hits, self.rerooting_rounds)


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def profile_figures(measured: Sequence[Measured]) -> list[Figures]:
    """Of every strategy: on all prompts, then by domain where there are several.

    Order: that in which strategies, and domains, were first measured.
    """
    sides = dict.fromkeys(each.side for each in measured)
    domains = dict.fromkeys(domain_of(each) for each in measured)
    groups: list[tuple[str, list[Measured]]] = [(EVERY, list(measured))]
    if len(domains) > 1 or UNNAMED not in domains:
        groups += [
            (name, [each for each in measured if domain_of(each) == name]) for name in domains
        ]
    return [
        figures_of(side, domain, [each for each in group if each.side == side], _plain(group))
        for side in sides
        for domain, group in groups
        if any(each.side == side for each in group)
    ]


def domain_of(measured: Measured) -> str:
    """Of its prompt."""
    return measured.task.question.category or UNNAMED


def _plain(group: Iterable[Measured]) -> list[Measured]:
    return [each for each in group if each.side == REFERENCE]


def figures_of(
    strategy: str, domain: str, runs: Sequence[Measured], plain: Sequence[Measured]
) -> Figures:
    """Of `runs`, beside those of plain decoding on the same prompts."""
    standing = Standing(strategy, tuple(runs), ())
    compared = _texts(runs, plain)
    records = [record for each in runs for record in each.run.records]
    stats = [each.run.answer.stats for each in runs if each.run.answer is not None]
    speculating = [record for record in records if record.strategy != REFERENCE]
    prefills = [ms for each in runs if (ms := prefill_ms(each)) is not None]
    rails, reason = _energy(runs)
    return Figures(
        strategy=strategy,
        domain=domain,
        answers=len(runs),
        prompt_tokens=sum(len(each.task.prompt) for each in runs),
        tokens=standing.tokens,
        compared=len(compared),
        same_text=sum(ours == theirs for ours, theirs in compared),
        ttft_ms=standing.ttft_ms,
        prefill_ms=Spread.of(prefills),
        decode_tok_s=Spread.of(list(rates(runs, _decode_tok_s).values())),
        speed_up=Spread.of(list(speed_ups(runs, plain, _decode_tok_s).values())),
        rounds=len(records),
        committed=sum(record.committed for record in records),
        num_spec_steps=sum(record.drafted > 0 for record in records),
        num_draft_tokens=sum(record.drafted for record in records),
        num_accepted_draft_tokens=sum(record.accepted for record in records),
        rerooting_rounds=len(speculating),
        rerooting_hits=sum(record.root_was_known for record in speculating),
        busy=reduce(Busy.__add__, (Busy.of(each.run.records) for each in runs), Busy()),
        by_depth=by_depth(records),
        by_proposer=by_proposer(records),
        by_question=_by_question(runs),
        memory=_memory([each.run.memory for each in runs]),
        energy_mj_per_token=rails,
        energy_reason=reason,
        reasons=dict(Counter(each.reason for each in stats).most_common()),
    )


def prefill_ms(measured: Measured) -> float | None:
    """From the prompt's arrival to the start of the first forward that gives a token."""
    records = measured.run.records
    return (records[0].start_ns - measured.run.start_ns) / 1e6 if records else None


def _decode_tok_s(measured: Measured) -> float | None:
    """Tokens after the first verdict, over the time from its end to the last one's end."""
    records = measured.run.records
    elapsed_ns = records[-1].end_ns - records[0].end_ns if records else 0
    tokens = sum(record.committed for record in records[1:])
    return tokens / (elapsed_ns / 1e9) if elapsed_ns > 0 else None


def by_depth(records: Iterable[StepRecord]) -> tuple[DepthCount, ...]:
    """Down to the deepest level that was drafted."""
    rows: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for record in records:
        rows.update(record.drafted_at)
        rounds.update(set(record.drafted_at))
        accepted.update(range(1, record.accepted + 1))
    return tuple(
        DepthCount(depth, rows[depth], rounds[depth], accepted[depth]) for depth in sorted(rows)
    )


def by_proposer(records: Sequence[StepRecord]) -> dict[str, ProposerCount]:
    """By name."""
    offered: Counter[str] = Counter()
    verified: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for record in records:
        offered.update(dict(record.offered_by))
        verified.update(record.drafted_by)
        accepted.update(record.accepted_by)
    return {
        name: ProposerCount(offered[name], verified[name], accepted[name])
        for name in sorted(offered | verified)
    }


def _by_question(runs: Iterable[Measured]) -> dict[str, Drafts]:
    found: dict[str, Drafts] = {}
    for each in runs:
        key = each.task.question.key
        found[key] = found.get(key, Drafts()) + Drafts.of(each.run.records)
    return found


def _texts(
    runs: Iterable[Measured], plain: Iterable[Measured]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Tokens of each answer beside those of plain's in the same turn, where there is one."""
    texts = {(each.task.question.id, each.repeat): each.run.tokens for each in plain}
    turns = [(each.run.tokens, (each.task.question.id, each.repeat)) for each in runs]
    return [(tokens, texts[turn]) for tokens, turn in turns if turn in texts]


def _memory(held: Iterable[Mapping[UnitName, UnitMemory]]) -> dict[str, MemoryUse]:
    """By unit, that of the answer in which it held the most."""
    most: dict[str, UnitMemory] = {}
    for units in held:
        for name, memory in units.items():
            if name not in most or memory.peak_bytes > most[name].peak_bytes:
                most[name] = memory
    return {
        name: MemoryUse(
            memory.weights_bytes, memory.caches_bytes, memory.scratch_bytes, memory.peak_bytes
        )
        for name, memory in most.items()
    }


def _energy(runs: Iterable[Measured]) -> tuple[dict[str, float] | None, str | None]:
    """Millijoules a token by rail, of the answers that know it; and why others do not."""
    used: dict[str, float] = {}
    tokens: Counter[str] = Counter()
    reasons: dict[str, None] = {}
    for each in runs:
        if each.run.answer is None:
            continue
        stats = each.run.answer.stats
        if stats.energy_reason:
            reasons[stats.energy_reason] = None
        for rail, spent_mj in (stats.energy_mj or {}).items():
            if spent_mj is not None:
                used[rail] = used.get(rail, 0.0) + spent_mj
                tokens[rail] += stats.completion_tokens
    per_token = {rail: spent / tokens[rail] for rail, spent in used.items() if tokens[rail]}
    return per_token or None, "; ".join(reasons) or None
