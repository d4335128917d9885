"""What the field reports of speculative decoding by kind of text, beside what was measured here.

The ranges are those that articles on speculative decoding on Macs commonly give, for 7B to 13B
verifiers with trained drafters, mostly drafting chains; nobody here measured them. Acceptance there
is that of a chain's next token, so the figure of ours that is like it is how often the drafter's
first choice is the verifier's token; the share of all draft tokens that were accepted depends on
how wide a tree the policy chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.apps.figures import REFERENCE, Figures
from ondevice.apps.race import Spread

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Reported:
    """acceptance: share of draft tokens. speed_up: times plain decoding."""

    acceptance: Range
    speed_up: Range


REPORTED = {
    "code": Reported((0.75, 0.85), (2.5, 3.5)),
    "summary": Reported((0.65, 0.75), (2.0, 2.5)),
    "chat": Reported((0.55, 0.70), (1.5, 2.0)),
    "translation": Reported((0.70, 0.80), (2.0, 3.0)),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A domain as the field reports it and as it was measured here, with the fastest strategy.

    first_choice_rate: None where nothing was drafted; acceptance_rate likewise.
    """

    domain: str
    reported_acceptance: Range
    reported_speed_up: Range
    strategy: str
    first_choice_rate: float | None
    acceptance_rate: float | None
    speed_up: Spread | None


def comparison(figures: Sequence[Figures]) -> list[Comparison]:
    """A row for each domain that is both reported and measured."""
    rows = []
    for domain, reported in REPORTED.items():
        ours = [f for f in figures if f.domain == domain and f.strategy != REFERENCE]
        if not ours:
            continue
        best = max(ours, key=lambda each: each.speed_up.median if each.speed_up else 0.0)
        # The drafter is the same under every strategy: the one that looked at it most often tells.
        drafter = max(ours, key=lambda each: each.drafts.known)
        rows.append(
            Comparison(
                domain=domain,
                reported_acceptance=reported.acceptance,
                reported_speed_up=reported.speed_up,
                strategy=best.strategy,
                first_choice_rate=drafter.first_choice_rate,
                acceptance_rate=best.acceptance_rate,
                speed_up=best.speed_up,
            )
        )
    return rows
