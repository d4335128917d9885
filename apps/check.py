"""`ondevice check`: is the text the same however it was speculated?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ondevice.apps.chat import check_options
from ondevice.apps.comparison import SEED, Report, Tally, answers_needed, compare, difference_line
from ondevice.apps.counting import counting
from ondevice.apps.margin import NEAR_TIE
from ondevice.apps.opening import open_engine
from ondevice.apps.prompts import PROMPTS
from ondevice.apps.questions import read_questions
from ondevice.apps.terminal import figure, results
from ondevice.engine import Engine
from ondevice.session import Options

QUICK_PROMPTS, QUICK_TOKENS = 5, 32


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for. prompts: a file of `read_questions`, None for our own."""

    pair: str
    prompts: Path | None = None
    max_tokens: int = 64
    quick: bool = False
    as_json: bool = False


def run(request: Request) -> bool:
    """Check and print what was found; False when a difference is no near-tie."""
    check_options(Options(max_tokens=request.max_tokens))
    prompts: Sequence[str] = PROMPTS
    if request.prompts:
        prompts = [question.text for question in read_questions(request.prompts)]
    max_tokens = request.max_tokens
    if request.quick:
        prompts, max_tokens = prompts[:QUICK_PROMPTS], min(max_tokens, QUICK_TOKENS)
    with open_engine(request.pair) as engine:
        report = _compare(engine, prompts, max_tokens)
    if request.as_json:
        print(json.dumps(as_json(report, request.pair, len(prompts), max_tokens)), flush=True)
    else:
        print_report(report)
    return report.passed


def _compare(engine: Engine, prompts: Sequence[str], max_tokens: int) -> Report:
    with counting("check", answers_needed(prompts)) as count:
        return compare(engine, prompts, max_tokens, count)


def as_json(report: Report, pair: str, prompts: int, max_tokens: int) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "pair": pair,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "seed": SEED,
        "near_tie_margin": NEAR_TIE,
        "passed": report.passed,
        "rounding": report.rounding,
        "results": [_tally_json(tally) for tally in report.tallies],
        "differences": [
            asdict(difference) | {"near_tie": difference.near_tie}
            for difference in report.differences
        ],
    }


def _tally_json(tally: Tally) -> dict[str, Any]:
    return {
        "temperature": tally.temperature,
        "strategy": tally.strategy,
        "texts": tally.texts,
        "tokens": tally.tokens,
        "near_ties": tally.near_ties,
        "faults": tally.faults,
        "num_spec_steps": tally.steps,
        "num_draft_tokens": tally.drafted,
        "num_accepted_draft_tokens": tally.accepted,
        "decode_tok_s": tally.median_tok_s,
        "rounding": tally.rounding,
        "notes": sorted(tally.notes),
    }


def print_report(report: Report) -> None:
    """A table of the strategies, then every difference, then the verdict."""
    console = results()
    table = Table(box=None, pad_edge=False)
    table.add_column("temp", justify="right")
    table.add_column("strategy", no_wrap=True)
    for heading in ("texts", "tokens", "identical", "near-ties", "faults", "accepted", "tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tally in report.tallies:
        table.add_row(*_cells(tally))
    console.print(table)
    for line in _lines(report):
        console.print(line, soft_wrap=True)


def _cells(tally: Tally) -> list[str]:
    identical = tally.texts - len(tally.differences)
    accepted = tally.accepted / tally.steps if tally.steps else None
    return [
        f"{tally.temperature:g}",
        tally.strategy,
        str(tally.texts),
        str(tally.tokens),
        "reference" if tally.strategy == "plain" else str(identical),
        str(tally.near_ties),
        str(tally.faults),
        figure(accepted, ".2f"),
        figure(tally.median_tok_s, ".1f"),
    ]


def _lines(report: Report) -> list[str]:
    lines = [difference_line(difference) for difference in report.differences]
    for tally in report.tallies:
        name = f"{tally.strategy} at temperature {tally.temperature:g}"
        lines += [f"{name}: {note}" for note in sorted(tally.notes)]
        if not tally.speculated:
            lines.append(f"{name}: nothing was speculated, so nothing was checked")
    lines.append(
        "rounding: the same token's log-probability differed by up to "
        f"{report.rounding:.1e} between a row alone and a row among others"
    )
    lines.append(
        "passed: every text is plain decoding's, near-ties apart"
        if report.passed
        else "FAILED: speculation changed a text, or was not at work"
    )
    return lines
