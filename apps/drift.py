"""Has the drafter got worse? A saved profile against a new one, with confidence intervals.

Two rates are compared, by domain and over all: how often the drafter's first choice was right, and
how many draft tokens were accepted. The first one decides: the second depends on how many rows the
policy put before the verifier, which the machine's load changes; the first one only on which places
of the text the drafter had come to. Only strategies under which the
drafter drafted in both profiles are counted; `auto` where there is no other, since it drafts where
that pays at the moment.

Tokens of one answer are not independent, prompts are. So a rate is a ratio of sums over prompts,
and its variance is that of the prompts' residuals (Cochran 1977, Sampling Techniques, chapter 6:
ratio estimator). Prompts that both profiles have are compared with themselves, in pairs, which
takes away what makes prompts differ; where one profile has more of them, those that both have, if
they are half of the fewer. Fewer than LEAST_PROMPTS tell nothing. Intervals are Student's. In 5 %
of all comparisons one of them misses the truth, on either side: half of that is for all prompts
together, the other half for the domains, each of which has an equal part of it (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from ondevice.apps.figures import EVERY, Drafts
from ondevice.apps.report import Report

CONFIDENCE = 0.95
FIRST_CHOICE, ACCEPTED = "first choice right", "draft tokens accepted"
LEAST_PROMPTS = 4
"""With fewer, tokens of the same few answers would pass for evidence."""
LEAST_FALL = 0.01
"""A smaller one is not worth a distillation, however sure it is."""
Counts = tuple[int, int]
"""Right ones, and all."""


@dataclass(frozen=True, slots=True)
class Change:
    """One rate of one domain. then, now: counts. low, high: interval of the difference of rates.

    prompts: how many, of the profile that has fewer; paired: whether they are the same ones.
    """

    what: str
    domain: str
    then: Counts
    now: Counts
    prompts: int
    paired: bool
    low: float
    high: float

    @property
    def difference(self) -> float:
        """The rate now less the rate then."""
        return self.now[0] / self.now[1] - self.then[0] / self.then[1]

    @property
    def lower(self) -> bool:
        """Beyond what noise explains, and enough to matter."""
        return self.high < 0 and self.difference < -LEAST_FALL

    @property
    def higher(self) -> bool:
        """The same upwards."""
        return self.low > 0 and self.difference > LEAST_FALL

    @property
    def fell(self) -> bool:
        """Whether the drafter got worse."""
        return self.lower and self.what == FIRST_CHOICE

    @property
    def verdict(self) -> str:
        """In words."""
        if self.prompts < LEAST_PROMPTS:
            return "too few prompts to tell"
        if self.fell:
            return "FELL"
        if self.lower or self.higher:
            word = "lower" if self.lower else "higher"
            return word if self.what == FIRST_CHOICE else f"{word}, as trees of other sizes may be"
        return "no change beyond noise"


@dataclass(frozen=True, slots=True)
class Drift:
    """notes: what makes the profiles hard to compare."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def fell(self) -> bool:
        """Whether the drafter got worse on any kind of text."""
        return any(change.fell for change in self.changes)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "fell": self.fell,
            "notes": list(self.notes),
            "changes": [
                asdict(each) | {"difference": each.difference, "fell": each.fell}
                for each in self.changes
            ],
        }


def drift(then: Report, now: Report) -> Drift:
    """What has changed from one profile to the other."""
    strategies = _strategies(then, now)
    domains = [name for name in (EVERY, *then.domains) if name in (EVERY, *now.domains)]
    domains = list(dict.fromkeys(domains))
    changes = []
    for domain in domains:
        old, new = _by_question(then, domain, strategies), _by_question(now, domain, strategies)
        for what, counts in ((FIRST_CHOICE, _right), (ACCEPTED, _accepted)):
            tests = 2 * (len(domains) - 1) if domain != EVERY else min(2, len(domains))
            change = _change(what, domain, counts(old), counts(new), tests)
            if change is not None:
                changes.append(change)
    return Drift(tuple(changes), tuple(_notes(then, now)))


def _strategies(then: Report, now: Report) -> list[str]:
    def drafts(report: Report, strategy: str) -> bool:
        figures = report.figures_of(strategy)
        return figures is not None and figures.drafts.known > 0

    found = [name for name in then.strategies if drafts(then, name) and drafts(now, name)]
    return [name for name in found if name != "auto"] or found


def _by_question(report: Report, domain: str, strategies: Sequence[str]) -> dict[str, Drafts]:
    found: dict[str, Drafts] = {}
    for strategy in strategies:
        figures = report.figures_of(strategy, domain)
        for question, drafts in (figures.by_question if figures else {}).items():
            found[question] = found.get(question, Drafts()) + drafts
    return found


def _right(drafts: Mapping[str, Drafts]) -> dict[str, Counts]:
    return {question: (each.right, each.known) for question, each in drafts.items()}


def _accepted(drafts: Mapping[str, Drafts]) -> dict[str, Counts]:
    return {question: (each.accepted, each.drafted) for question, each in drafts.items()}


def _change(
    what: str, domain: str, then: Mapping[str, Counts], now: Mapping[str, Counts], tests: int
) -> Change | None:
    """None where one of them has nothing to count."""
    common = then.keys() & now.keys()
    if paired := 2 * len(common) >= min(len(then), len(now)):
        then, now = ({question: side[question] for question in common} for side in (then, now))
    before, after = _total(then), _total(now)
    if not (before[1] and after[1]):
        return None
    prompts = min(len(then), len(now))
    difference = after[0] / after[1] - before[0] / before[1]
    width = math.inf
    if prompts >= LEAST_PROMPTS:
        quantile = student(1 - (1 - CONFIDENCE) / 2 / tests, prompts - 1)
        width = quantile * _error(then, now, paired)
    return Change(
        what=what,
        domain=domain,
        then=before,
        now=after,
        prompts=prompts,
        paired=paired,
        low=max(-1.0, difference - width),
        high=min(1.0, difference + width),
    )


def _total(counts: Mapping[str, Counts]) -> Counts:
    return sum(right for right, _ in counts.values()), sum(all_ for _, all_ in counts.values())


def _error(then: Mapping[str, Counts], now: Mapping[str, Counts], paired: bool) -> float:
    """Standard error of the difference."""
    before, after = _residuals(then), _residuals(now)
    if paired:
        return math.sqrt(_sum_variance([after[question] - before[question] for question in before]))
    return math.sqrt(_sum_variance([*before.values()]) + _sum_variance([*after.values()]))


def _residuals(counts: Mapping[str, Counts]) -> dict[str, float]:
    """What each prompt adds to the rate's deviation; they sum up to 0."""
    right, total = _total(counts)
    rate = right / total
    return {question: (r - rate * n) / total for question, (r, n) in counts.items()}


def _sum_variance(parts: Sequence[float]) -> float:
    return sum(part**2 for part in parts) * len(parts) / (len(parts) - 1)


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t for `freedom` degrees of freedom, 3 or more.

    The expansion of Abramowitz and Stegun 26.7.5; off by 0.5 % at 3 degrees and a probability of
    0.975, by 1.7 % at 0.998.
    """
    x = NormalDist().inv_cdf(probability)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))


def _notes(then: Report, now: Report) -> list[str]:
    notes = []
    old, new = then.identity, now.identity
    if old.verifier_sha256 != new.verifier_sha256:
        notes.append(
            f"the verifier is another one: {new.verifier_sha256[:12]} now, "
            f"{old.verifier_sha256[:12]} then; what changed may be its text, not the drafter"
        )
    if old.drafter_sha256 != new.drafter_sha256:
        notes.append(
            f"the drafter is another one: {(new.drafter_sha256 or 'none')[:12]} now, "
            f"{(old.drafter_sha256 or 'none')[:12]} then"
        )
    if (old.cpu, old.system) != (new.cpu, new.system):
        notes.append(f"another machine: {new.cpu}, {new.system}; then {old.cpu}, {old.system}")
    if then.max_tokens != now.max_tokens:
        notes.append(f"answers of up to {now.max_tokens} tokens now, {then.max_tokens} then")
    return notes


def drift_lines(drift: Drift) -> list[str]:
    """For people: what changed, with counts; what to do."""
    lines = ["", "against the saved profile:", *drift.notes]
    for change in drift.changes:
        pairing = "the same prompts" if change.paired else "other prompts"
        lines.append(
            f"{change.what}, {change.domain}: {_counts(change.now)} now, {_counts(change.then)} "
            f"then; difference {100 * change.difference:+.1f} points "
            f"({100 * change.low:+.1f} to {100 * change.high:+.1f}), {change.prompts} "
            f"prompt{'s' if change.prompts != 1 else ''}, {pairing}: {change.verdict}"
        )
    if not drift.changes:
        lines.append(
            "nothing to compare: no strategy under which the drafter drafted is in both profiles"
        )
    elif drift.fell:
        lines.append(
            "the drafter fits its verifier worse than it did: distil it again, or convert the pair "
            "that it was made for"
        )
    else:
        lines.append(_as_good(drift.changes[0]))
    return lines


def _as_good(over_all: Change) -> str:
    """What can be said where nothing fell: no more than its interval allows."""
    unseen = over_all.difference - over_all.low
    if over_all.prompts < LEAST_PROMPTS or unseen >= over_all.then[0] / over_all.then[1]:
        return "so few prompts cannot tell whether the drafter got worse: profile more of them"
    seen = f"a fall of less than {100 * unseen:.0f} points would not show"
    return "no sign that the drafter got worse" + (
        f"; with so many prompts {seen}" if unseen else ""
    )


def _counts(counts: Counts) -> str:
    return f"{counts[0]} of {counts[1]} ({counts[0] / counts[1]:.1%})"
