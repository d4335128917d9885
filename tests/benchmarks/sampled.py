"""Speculation at a temperature against our own plain decoding, in one interleaved run.

    uv run python tests/benchmarks/sampled.py [PAIR] [--temperature 0.7] [--prompts 8]
        [--max-tokens 128] [--repeats 1] [--sides auto,pipelined] [--prompt-file FILE]

The held-out prompts of the default drafter, unless a file is given. All sides draw with the same
seed, and rule `coupled`: the tokens must be the same. Rates: medians over prompts, quartiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ondevice import blas

blas.prepare()  # before MLX is imported

from ondevice.apps.bench import Load, make_tasks  # noqa: E402
from ondevice.apps.counting import counting  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import read_questions, spread  # noqa: E402
from ondevice.apps.race import Standing, race  # noqa: E402
from ondevice.apps.sides import OurSide  # noqa: E402
from ondevice.models.pairs import default_pair, models_folder  # noqa: E402
from ondevice.sampling import SamplingParams  # noqa: E402
from ondevice.schedule import STRATEGIES, Strategy  # noqa: E402

SEED = 1


def measure(options: argparse.Namespace) -> list[Standing]:
    """One interleaved run; plain comes first."""
    questions = read_questions(options.prompt_file or models_folder() / "heldout.jsonl")
    load = Load(spread(questions, options.prompts), options.max_tokens, options.repeats).checked()
    sampling = SamplingParams(temperature=options.temperature, seed=SEED)
    names = dict.fromkeys(["plain", *options.sides.split(",")])
    with open_engine(options.pair) as engine:
        tasks = make_tasks(engine, load)
        sides = [OurSide(engine, cast(Strategy, name), sampling=sampling) for name in names]
        with counting("measuring", len(sides) * len(tasks) * load.repeats) as step:
            measured = race(sides, tasks, load.max_tokens, load.repeats, step)
    return [
        Standing(name, tuple(each for each in measured if each.side == name), ()) for name in names
    ]


def shown(standing: Standing, plain: Standing) -> str:
    """For people."""
    ratio = standing.ratio_to(plain)
    same = sum(
        ours.run.tokens == theirs.run.tokens
        for ours, theirs in zip(standing.runs, plain.runs, strict=True)
    )
    figures = (
        "no rate" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
    )
    return f"{standing.side:12} {figures} x plain, {same} of {len(plain.runs)} texts the same"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description="speculation at a temperature")
    parser.add_argument("pair", nargs="?", default=default_pair())
    parser.add_argument("--temperature", type=float, default=0.7, help="of all sides (0.7)")
    parser.add_argument("--prompts", type=int, default=8, help="how many (8)")
    parser.add_argument("--prompt-file", type=Path, help="instead of the held-out prompts")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--repeats", type=int, default=1, help="of every prompt (1)")
    parser.add_argument("--sides", default="auto,pipelined", help="strategies beside plain")
    options = parser.parse_args(arguments)
    if unknown := set(options.sides.split(",")) - set(STRATEGIES):
        parser.error(f"unknown strategies: {', '.join(sorted(unknown))}")
    plain, *others = measure(options)
    for standing in (plain, *others):
        print(shown(standing, plain))


if __name__ == "__main__":
    sys.exit(main())
