"""Stretches of time: when a unit worked, how much of that two had in common, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ondevice.records import StepRecord

Span = tuple[int, int]
"""Start and end, in ns."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as stretches that are in order and apart; empty ones are left out."""
    found: list[Span] = []
    for start_ns, end_ns in sorted(spans):
        if end_ns <= start_ns:
            continue
        if found and start_ns <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_ns)
        else:
            found.append((start_ns, end_ns))
    return found


def length_ns(spans: Iterable[Span]) -> int:
    """The time that all of them cover together."""
    return sum(end_ns - start_ns for start_ns, end_ns in merged(spans))


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """What both cover."""
    mine, theirs = merged(one), merged(other)
    found, at = [], 0
    for start_ns, end_ns in mine:
        while at < len(theirs) and theirs[at][1] <= start_ns:
            at += 1
        for other_start_ns, other_end_ns in theirs[at:]:
            if other_start_ns >= end_ns:
                break
            found.append((max(start_ns, other_start_ns), min(end_ns, other_end_ns)))
    return found


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """What of `within` none of them covers."""
    start_ns, end_ns = within
    found = []
    for busy_from_ns, busy_until_ns in common(spans, [within]):
        found.append((start_ns, busy_from_ns))
        start_ns = busy_until_ns
    return merged([*found, (start_ns, end_ns)])


@dataclass(frozen=True, slots=True)
class Busy:
    """Where the time of decoding went, in ms, from the first forward's start to the last one's end.

    verifier, drafter: at work. both: of these, at the same time. idle: neither at work. waited:
    that the verifier's next forward waited, as the coordinator saw it. All from step records.
    """

    wall_ms: float = 0.0
    verifier_ms: float = 0.0
    drafter_ms: float = 0.0
    both_ms: float = 0.0
    idle_ms: float = 0.0
    waited_ms: float = 0.0

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Busy:
        """Of one answer."""
        if not records:
            return cls()
        decoding = records[0].start_ns, records[-1].end_ns
        forwards = [(record.start_ns, record.end_ns) for record in records]
        steps = [(draft.start_ns, draft.end_ns) for record in records for draft in record.drafts]
        drafting = common(steps, [decoding])
        return cls(
            wall_ms=(decoding[1] - decoding[0]) / 1e6,
            verifier_ms=length_ns(forwards) / 1e6,
            drafter_ms=length_ns(drafting) / 1e6,
            both_ms=length_ns(common(forwards, drafting)) / 1e6,
            idle_ms=length_ns(gaps([*forwards, *drafting], decoding)) / 1e6,
            waited_ms=sum(record.waited_ns for record in records[1:]) / 1e6,
        )

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.wall_ms + other.wall_ms,
            self.verifier_ms + other.verifier_ms,
            self.drafter_ms + other.drafter_ms,
            self.both_ms + other.both_ms,
            self.idle_ms + other.idle_ms,
            self.waited_ms + other.waited_ms,
        )

    def share(self, part_ms: float) -> float | None:
        """`part_ms` of the whole; None where no time passed."""
        return part_ms / self.wall_ms if self.wall_ms > 0 else None
