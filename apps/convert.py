"""`ondevice convert`: models as people have them to artifacts that run here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ondevice import blas
from ondevice.apps.inspect import megabytes, print_rows
from ondevice.apps.terminal import results
from ondevice.artifact import DRAFTER_FILE, PAIR_FILE, VERIFIER_FILE, refuse_occupied
from ondevice.converters.plan import DrafterPlan, PairPlan, Plan, VerifierPlan
from ondevice.converters.progress import Reporter
from ondevice.converters.source import find_source
from ondevice.errors import BadRequest

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Output:
    """Where an artifact goes, or with `dry_run` that it goes nowhere, and how that is said."""

    folder: Path
    dry_run: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class DrafterChoices:
    """The drafter's options as they were typed; `vocabulary`: how many tokens, None for all."""

    layers: str | None
    rows: str
    context: str
    compression: str
    head_compression: str | None
    vocabulary: int | None
    corpus: Path | None


def convert_drafter(
    source: str, verifier: str | None, choices: DrafterChoices, output: Output
) -> None:
    """Make a drafter of SOURCE, for the verifier folder if one is given. Raises UserError."""
    reporter = _begin()
    refuse_occupied(output.folder, DRAFTER_FILE)
    folder = None if verifier is None else Path(verifier)
    plan = _drafter_plan(find_source(source, reporter), folder, choices)
    _finish(plan, output, reporter)


def convert_verifier(source: str, dtype: str | None, output: Output) -> None:
    """Make a verifier of SOURCE; dtype None leaves its weights as they are. Raises UserError."""
    reporter = _begin()
    refuse_occupied(output.folder, VERIFIER_FILE)
    _finish(VerifierPlan.of(find_source(source, reporter), dtype), output, reporter)


def convert_pair(
    verifier: str, drafter: str, dtype: str | None, choices: DrafterChoices, output: Output
) -> None:
    """Make a verifier and a drafter for it, as one pair. Raises UserError."""
    reporter = _begin()
    refuse_occupied(output.folder, PAIR_FILE)
    first = VerifierPlan.of(find_source(verifier, reporter), dtype)
    second = _drafter_plan(find_source(drafter, reporter), None, choices)
    _finish(PairPlan.of(first, second), output, reporter)


def _drafter_plan(source: Path, verifier: Path | None, choices: DrafterChoices) -> DrafterPlan:
    return DrafterPlan.of(
        source,
        verifier,
        layers=None if choices.layers is None else integers("--layers", choices.layers),
        row_counts=integers("--rows", choices.rows),
        context_sizes=integers("--context", choices.context),
        compression=choices.compression,
        head_compression=choices.head_compression,
        vocabulary=choices.vocabulary,
        corpus=choices.corpus,
    )


def _begin() -> Reporter:
    blas.prepare()
    return Reporter()


def _finish(plan: Plan, output: Output, reporter: Reporter) -> None:
    if not output.dry_run:
        plan.write(output.folder, reporter)
    if output.as_json:
        print(json.dumps({"written": not output.dry_run, **plan.facts()}), flush=True)
        return
    console = results()
    _print(console, plan, output)


def _print(console: Console, plan: Plan, output: Output) -> None:
    for title, facts in plan.sections():
        print_rows(console, title, [*facts.items()])
    needed = megabytes(plan.disk_bytes)
    if output.dry_run:
        console.print(f"would be written to {output.folder}, {needed} of disk")
    else:
        console.print(f"written to {output.folder}, at most {needed} of disk")


def integers(option: str, text: str) -> tuple[int, ...]:
    """`1,8,64` or `0-3,7` as numbers; BadRequest, naming the option, for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise BadRequest(
                f"{option}: expected numbers and ranges like 0-3,7, got {text!r}; correct it"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        numbers += range(first, last + 1)
    return tuple(numbers)
