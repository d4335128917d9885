"""Speculation without a drafter against our own plain decoding, in one interleaved run.

    uv run python tests/benchmarks/weightless.py [PAIR] [--prompts N] [--prompt-file FILE]
        [--max-tokens 240] [--repeats 1] [--sides weightless,lookup,...] [--json]

Only PAIR's verifier is used. Demands, as geometric means over prompts: `weightless` at least 1.25
times plain, at least 1.6 times on prompts that quote their input, never under 0.97 on a category.
`lookahead W,N,G` is the published shape: what it needs is tokens a forward, not speed here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ondevice import blas

blas.prepare()  # before MLX is imported

from ondevice.apps.bench import Load, make_tasks  # noqa: E402
from ondevice.apps.counting import counting  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import own_questions, read_questions, spread  # noqa: E402
from ondevice.apps.race import Standing, race, standings  # noqa: E402
from ondevice.apps.sides import OurSide  # noqa: E402
from ondevice.engine import Engine  # noqa: E402
from ondevice.models.pairs import default_pair  # noqa: E402
from ondevice.records import Window  # noqa: E402
from ondevice.schedule import STRATEGIES, Strategy  # noqa: E402

PUBLISHED = Window(columns=15, ngram=5, guesses=15)
"""Fu et al. 2024 on an A100: 1.5 to 2.3 times fewer steps."""
NAMES = ("weightless", "lookup", "lookahead", "jacobi", "auto")


@dataclass(frozen=True)
class Row:
    """One side: ratios to plain by category, tokens a forward, and what the proposers did."""

    side: str
    ratios: dict[str, float]
    tokens_a_forward: float
    proposers: dict[str, dict[str, int]]
    near_ties: int
    faults: int


def our_sides(engine: Engine, names: Sequence[str]) -> list[OurSide]:
    """Plain first. `published` is lookahead in the paper's shape."""
    sides = [OurSide(engine, "plain")]
    for name in names:
        if name == "published":
            letters = f"{PUBLISHED.columns},{PUBLISHED.ngram},{PUBLISHED.guesses}"
            sides.append(OurSide(engine, "lookahead", f"lookahead {letters}", window=PUBLISHED))
        else:
            sides.append(OurSide(engine, cast(Strategy, name)))
    return sides


def geometric(values: Iterable[float]) -> float:
    """Geometric mean; nan of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def row_of(standing: Standing, plain: Standing) -> Row:
    """What a side came to."""
    categories = {run.task.question.id: run.task.question.category for run in standing.runs}
    ratios = standing.ratios_to(plain)
    by_category = {"all": geometric(ratios.values())}
    for category in sorted(set(categories.values())):
        by_category[category] = geometric(
            ratio for question, ratio in ratios.items() if categories[question] == category
        )
    records = [record for run in standing.runs for record in run.run.records]
    proposers: dict[str, dict[str, int]] = {}
    for run in standing.runs:
        assert run.run.answer is not None
        for name, counts in run.run.answer.stats.proposers.items():
            total = proposers.setdefault(name, dict.fromkeys(counts, 0))
            for kind, count in counts.items():
                total[kind] += count
    forwards = max(1, len(records))
    return Row(
        standing.side,
        by_category,
        sum(record.committed for record in records) / forwards,
        proposers,
        standing.near_ties,
        standing.faults,
    )


def measure(options: argparse.Namespace) -> list[Row]:
    """One interleaved run."""
    file = options.prompt_file
    questions = spread(read_questions(file) if file else own_questions(), options.prompts)
    load = Load(questions, options.max_tokens, options.repeats).checked()
    with open_engine(options.pair) as engine:
        tasks = make_tasks(engine, load)
        sides = our_sides(engine, options.sides.split(","))
        answers = len(sides) * len(tasks) * options.repeats
        with counting("measuring", answers) as step:
            measured = race(sides, tasks, load.max_tokens, load.repeats, step)
        found = standings(engine, measured)
    return [row_of(standing, found[0]) for standing in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description="speculation without a drafter")
    parser.add_argument("pair", nargs="?", default=default_pair())
    parser.add_argument("--prompts", type=int, help="how many (all)")
    parser.add_argument("--prompt-file", type=Path, help="instead of the project's own set")
    parser.add_argument("--max-tokens", type=int, default=240, help="of an answer (240)")
    parser.add_argument("--repeats", type=int, default=1, help="of every prompt (1)")
    parser.add_argument("--sides", default="weightless", help=f"of {','.join(NAMES)},published")
    parser.add_argument("--json", action="store_true", help="print one JSON object a side")
    options = parser.parse_args(arguments)
    if unknown := set(options.sides.split(",")) - {*STRATEGIES, "published"}:
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}")
    for row in measure(options):
        if options.json:
            print(json.dumps(row.__dict__))
            continue
        cells = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row.ratios.items())
        print(f"{row.side}: x plain: {cells}; {row.tokens_a_forward:.2f} tokens a forward")
        print(f"  {row.proposers}, {row.near_ties} near-ties, {row.faults} faults")


if __name__ == "__main__":
    sys.exit(main())
