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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from ondevice import blas

blas.prepare()  # before MLX is imported

from ondevice.apps.bench import Load, make_tasks  # noqa: E402
from ondevice.apps.counting import counting  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import (  # noqa: E402
    Question,
    own_questions,
    read_questions,
    spread,
)
from ondevice.apps.race import Measured, Standing, race, standings  # noqa: E402
from ondevice.apps.sides import OurSide  # noqa: E402
from ondevice.costs import CostModel  # noqa: E402
from ondevice.engine import Engine  # noqa: E402
from ondevice.models.pairs import default_pair  # noqa: E402
from ondevice.records import Window  # noqa: E402
from ondevice.schedule import STRATEGIES, Strategy  # noqa: E402

PUBLISHED = Window(columns=15, ngram=5, guesses=15)
"""Fu et al. 2024 on an A100: 1.5 to 2.3 times fewer steps."""
QUOTING = Path(__file__).parents[1] / "prompts" / "quoting.jsonl"
"""Extraction and editing, beside the project's own set."""
NAMES = ("weightless", "lookup", "lookahead", "jacobi", "auto")


@dataclass(frozen=True)
class Group:
    """One side on the prompts of a category.

    ratio: geometric mean of the prompts' rates over plain's. modelled: plain's time over the side's
    by the pair's cost table, so without what else the machine does and without the host's time;
    wider forwards than its widest are guessed. tokens_a_forward: over all forwards.
    """

    prompts: int
    ratio: float
    modelled: float
    tokens_a_forward: float


@dataclass(frozen=True)
class Row:
    """One side, by category, and what the proposers did."""

    side: str
    groups: dict[str, Group]
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


def categories_of(question: Question) -> list[str]:
    """Its own, and `quoting` where the prompt has a text to work on, which follows a blank line."""
    quoting = ["quoting"] if "\n\n" in question.text else []
    return ["all", *quoting, question.category]


def modelled_ratio(runs: Sequence[Measured], costs: CostModel) -> float:
    """Plain decoding's time for these tokens over that of the forwards, both as measured alone."""
    plain_ms = took_ms = 0.0
    for run in runs:
        for record in run.run.records:
            one_ms = costs.plain.ms(1, record.context)
            plain_ms += record.committed * one_ms
            plain = record.strategy == "plain"
            took_ms += one_ms if plain else costs.verifier.exactly(record.rows, record.context)
    return plain_ms / took_ms


def group_of(runs: Sequence[Measured], ratios: dict[str, float], costs: CostModel) -> Group:
    """What the side did on the prompts of `runs`. ratios: by question."""
    asked = {run.task.question.id for run in runs}
    records = [record for run in runs for record in run.run.records]
    return Group(
        len(asked),
        geometric(ratio for question, ratio in ratios.items() if question in asked),
        modelled_ratio(runs, costs),
        sum(record.committed for record in records) / len(records),
    )


def row_of(standing: Standing, plain: Standing, costs: CostModel) -> Row:
    """What a side came to."""
    ratios = standing.ratios_to(plain)
    members: dict[str, list[Measured]] = {}
    proposers: dict[str, Counter[str]] = {}
    for run in standing.runs:
        for category in categories_of(run.task.question):
            members.setdefault(category, []).append(run)
        assert run.run.answer is not None
        for name, counts in run.run.answer.stats.proposers.items():
            proposers.setdefault(name, Counter()).update(counts)
    groups = {name: group_of(runs, ratios, costs) for name, runs in members.items()}
    whose = {name: dict(counts) for name, counts in proposers.items()}
    return Row(standing.side, groups, whose, standing.near_ties, standing.faults)


def measure(options: argparse.Namespace) -> list[Row]:
    """One interleaved run."""
    file = options.prompt_file
    asked = read_questions(file) if file else [*own_questions(), *read_questions(QUOTING)]
    questions = spread(asked, options.prompts)
    load = Load(questions, options.max_tokens, options.repeats).checked()
    with open_engine(options.pair) as engine:
        tasks = make_tasks(engine, load)
        sides = our_sides(engine, options.sides.split(","))
        answers = len(sides) * len(tasks) * options.repeats
        with counting("measuring", answers) as step:
            measured = race(sides, tasks, load.max_tokens, load.repeats, step)
        found = standings(engine, measured)
        record = engine.cost_record
        costs = CostModel() if record is None else CostModel(record.table)
    return [row_of(standing, found[0], costs) for standing in found]


def shown(row: Row) -> str:
    """For people."""
    lines = [f"{row.side}: {row.near_ties} near-ties, {row.faults} faults"]
    for name, group in row.groups.items():
        lines.append(
            f"  {name:12} {group.prompts:3} prompts  {group.ratio:.2f}x plain  "
            f"{group.modelled:.2f}x by the cost table  "
            f"{group.tokens_a_forward:.2f} tokens a forward"
        )
    for name, counts in row.proposers.items():
        lines.append(f"  {name}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    return "\n".join(lines)


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
        print(json.dumps(asdict(row)) if options.json else shown(row))


if __name__ == "__main__":
    sys.exit(main())
