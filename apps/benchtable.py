"""The results of `bench`: a table for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ondevice.apps.comparison import difference_line
from ondevice.apps.margin import NEAR_TIE
from ondevice.apps.race import Spread, Standing
from ondevice.apps.terminal import figure
from ondevice.conditions import Conditions, worst

HEADINGS = (
    "tok/s",
    "times mlx-lm",
    "taken\na round",
    "of\ndrafts",
    "ttft\nms",
    "same\ntext",
)
ROOMY_WIDTH = 90
"""Columns of a terminal; narrower ones, down to 80, get narrower gaps."""
REASONS_SHOWN = 3
"""Lines that one side's reasons may take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured. left_out: sides that could not run, and why.

    standings: the first is the one that the others are compared with. placement: what ran where.
    """

    pair: str
    questions: int
    max_tokens: int
    repeats: int
    standings: tuple[Standing, ...]
    left_out: dict[str, str]
    placement: tuple[str, ...]

    @property
    def base(self) -> Standing:
        """mlx-lm plain."""
        return self.standings[0]

    @property
    def conditions(self) -> Conditions:
        """The worst that the machine was in after any answer."""
        return worst(each.conditions for standing in self.standings for each in standing.runs)

    @property
    def passed(self) -> bool:
        """Every text is that of the first side, near-ties apart."""
        return all(standing.faults == 0 for standing in self.standings)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values."""
    return {
        "pair": outcome.pair,
        "prompts": outcome.questions,
        "max_tokens": outcome.max_tokens,
        "repeats": outcome.repeats,
        "near_tie_margin": NEAR_TIE,
        "passed": outcome.passed,
        "placement": list(outcome.placement),
        "left_out": outcome.left_out,
        "conditions": asdict(outcome.conditions),
        "sides": [_side_json(standing, outcome.base) for standing in outcome.standings],
        "answers": [answer for each in outcome.standings for answer in _answers_json(each)],
        "differences": [
            asdict(each) | {"near_tie": each.near_tie}
            for standing in outcome.standings
            for each in standing.differences
        ],
    }


def _side_json(standing: Standing, base: Standing) -> dict[str, Any]:
    return {
        "side": standing.side,
        "texts": len(standing.runs),
        "tokens": standing.tokens,
        "decode_tok_s": _spread_json(standing.decode_tok_s),
        "ratio": _spread_json(standing.ratio_to(base)),
        "ttft_ms": _spread_json(standing.ttft_ms),
        **standing.drafting.as_json(),
        "near_ties": standing.near_ties,
        "faults": standing.faults,
        "reasons": standing.reasons,
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else spread.as_json()


def _answers_json(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "side": standing.side,
            "question_id": each.task.question.id,
            "category": each.task.question.category,
            "repeat": each.repeat,
            "prompt_tokens": len(each.task.prompt),
            "tokens": len(each.run.tokens),
            "decode_tok_s": each.run.decode_tok_s,
            "ttft_ms": each.run.ttft_ms,
            **each.run.drafting.as_json(),
            **asdict(each.conditions),
        }
        for each in standing.runs
    ]


def print_outcome(outcome: Outcome, console: Console) -> None:
    """A table of the sides, then what was left out, every difference, and the verdict."""
    gap = 2 if console.width >= ROOMY_WIDTH else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", overflow="fold")
    for standing in outcome.standings:
        table.add_row(*_cells(standing, outcome.base))
    console.print(table)
    for line in _lines(outcome):
        console.print(line, soft_wrap=not console.is_terminal)


def _cells(standing: Standing, base: Standing) -> Sequence[str]:
    rates, drafting, ttft = standing.decode_tok_s, standing.drafting, standing.ttft_ms
    identical = f"{len(standing.runs) - len(standing.differences)}/{len(standing.runs)}"
    return (
        standing.side,
        spread_cell(rates, _rate_form(rates)),
        "1" if standing is base else spread_cell(standing.ratio_to(base), ".2f"),
        figure(drafting.mean_accepted, ".2f"),
        figure(drafting.acceptance_rate, ".0%"),
        figure(ttft.median if ttft else None, ".0f"),
        "" if standing is base else identical,
    )


def _rate_form(rates: Spread | None) -> str:
    """Three digits, as far as they are before the point."""
    if rates is None or rates.median < 10:
        return ".2f"
    return ".1f" if rates.median < 100 else ".0f"


def spread_cell(spread: Spread | None, form: str) -> str:
    """Median (lower quartile to upper quartile); the median alone where there was one value."""
    if spread is None:
        return "n/a"
    if spread.low == spread.high:
        return f"{spread.median:{form}}"
    return f"{spread.median:{form}} ({spread.low:{form}}-{spread.high:{form}})"


def _lines(outcome: Outcome) -> list[str]:
    base, texts = outcome.base, len(outcome.base.runs)
    lines = [
        f"{texts} answers each of up to {outcome.max_tokens} tokens, in turn; "
        "medians over prompts (quartiles)",
        *outcome.placement,
        *_left_out_lines(outcome.left_out),
    ]
    for standing in outcome.standings:
        lines += _reason_lines(standing)
        lines += [difference_line(each, base.side) for each in standing.differences]
    lines += slowed_lines(outcome.conditions)
    silent = texts - sum(each.run.decode_tok_s is not None for each in base.runs)
    if silent:
        lines.append(f"{silent} of {texts} answers ended with their first tokens and have no rate")
    near_ties = sum(standing.near_ties for standing in outcome.standings)
    lines.append(
        f"passed: every text is {base.side}'s, {near_ties} near-ties apart"
        if outcome.passed
        else f"FAILED: a text is not {base.side}'s"
    )
    return lines


def slowed_lines(conditions: Conditions) -> list[str]:
    """What the reader of figures must know of the machine; nothing where all was well."""
    if not conditions.slowed:
        return []
    return [f"speeds are lower than this machine's: {conditions.slowed}"]


def _left_out_lines(left_out: dict[str, str]) -> list[str]:
    """One a reason, with all sides that it holds for."""
    sides: dict[str, list[str]] = {}
    for side, why in left_out.items():
        sides.setdefault(why, []).append(side)
    return [f"left out: {', '.join(names)}: {why}" for why, names in sides.items()]


def _reason_lines(standing: Standing) -> list[str]:
    """What the answers said beyond that the strategy was the one that was set, most often first."""
    told = [(why, count) for why, count in standing.reasons.items() if not why.endswith(", as set")]
    lines = [f"{standing.side}: {why} ({count} answers)" for why, count in told[:REASONS_SHOWN]]
    if len(told) > REASONS_SHOWN:
        lines.append(f"{standing.side}: and {len(told) - REASONS_SHOWN} other reasons, see --json")
    return lines
