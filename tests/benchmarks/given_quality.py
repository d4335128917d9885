"""Our schedules with a drafter of given quality, against mlx-lm plain, in one interleaved run.

    uv run python tests/benchmarks/given_quality.py [PAIR] [--a 0.7] [--step-ms 10]
        [--prompts 8] [--prompt-file FILE] [--max-tokens 200] [--context 400] [--repeats 1]
        [--children N] [--seed 0] [--no-end] [--json]

PAIR's verifier answers; its drafter is replaced by the test double of tests/givenquality.py, which
knows the text (recorded first, by plain decoding), is right as often as asked, and sleeps its step
time without using the CPU. What is measured, and how, is `ondevice bench`'s. The demands at a = 0.7
and 10 ms: the pipelined tree at least 1.8 times mlx-lm plain and 1.2 times our best sequential
schedule. At a = 0.05: `auto` at most 5 % slower than our plain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ondevice import blas

blas.prepare()  # before MLX is imported

sys.path.insert(0, str(Path(__file__).parent.parent))

from givenquality import ROWS_A_STEP, GivenQualityDrafter, Quality  # noqa: E402

from ondevice.apps.baselines import MlxLmPlain  # noqa: E402
from ondevice.apps.bench import Load, bench, make_tasks  # noqa: E402
from ondevice.apps.benchtable import Outcome, as_json, print_outcome, spread_cell  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import own_questions, read_questions, spread  # noqa: E402
from ondevice.apps.race import Spread, Standing  # noqa: E402
from ondevice.apps.sides import OurSide, Side  # noqa: E402
from ondevice.apps.terminal import results  # noqa: E402
from ondevice.artifact import PAIR_FILE, PairManifest  # noqa: E402
from ondevice.converters.pair import prepare_pair  # noqa: E402
from ondevice.costs import CostPoint, CostTable  # noqa: E402
from ondevice.engine import Engine  # noqa: E402
from ondevice.models.pairs import default_pair  # noqa: E402
from ondevice.schedule import STRATEGIES  # noqa: E402
from ondevice.session import Options  # noqa: E402
from ondevice.units import VerifierUnit  # noqa: E402

CHAIN, TREE = "chain", "tree"


def engine_with_double(
    pair: str, quality: Quality, *, ends: bool = True
) -> tuple[Engine, GivenQualityDrafter, Path]:
    """PAIR's verifier beside the double, and the verifier's folder.

    ends: whether answers end at the model's end tokens; without, all have the full length.
    """
    with open_engine(pair) as opened:
        model, costs = opened.model, costs_beside(opened.costs.table, quality)
    folder = prepare_pair(pair, quiet=True)
    verifier_folder = folder / PairManifest.read(folder / PAIR_FILE).verifier
    double = GivenQualityDrafter(quality, model.vocab_size)

    def open_verifier() -> VerifierUnit:
        from ondevice.verifier import MLXVerifier

        return MLXVerifier.open(verifier_folder)

    end_tokens = model.end_tokens if ends else frozenset[int]()
    engine = Engine(model.tokenizer, end_tokens, open_verifier, lambda: double, costs=costs)
    return engine, double, verifier_folder


def costs_beside(measured: CostTable, quality: Quality) -> CostTable:
    """The verifier's costs as measured, the double's as they are; sleeping disturbs nobody."""

    def undisturbed(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
        return tuple(replace(point, beside_ms=point.alone_ms) for point in points)

    drafter = [
        CostPoint(ROWS_A_STEP * steps, 0, quality.step_ms * steps, quality.step_ms * steps)
        for steps in (1, 2, 4, 8)
    ]
    return CostTable(undisturbed(measured.verifier), undisturbed(measured.plain), tuple(drafter))


def short_enough(engine: Engine, load: Load, limit: int, context: int) -> Load:
    """At most `limit` of the questions, of those whose prompt and answer fit in `context`."""
    tasks = make_tasks(engine, load)
    fitting = [task.question for task in tasks if len(task.prompt) + load.max_tokens <= context]
    if not fitting:
        raise SystemExit(f"no prompt and {load.max_tokens} tokens fit {context}; raise --context")
    return replace(load, questions=spread(fitting, limit))


def record(engine: Engine, double: GivenQualityDrafter, load: Load) -> None:
    """Let the double learn what the verifier alone answers."""
    for task in make_tasks(engine, load):
        options = Options(max_tokens=load.max_tokens, strategy="plain")
        double.learn(task.prompt, engine.generate(task.prompt, options).token_ids)


def our_sides(engine: Engine, children: int | None) -> list[OurSide]:
    """Rows of the table: each strategy, with chains and with trees where it can have both.

    children: proposals per node of a tree; None lets the strategy choose.
    """
    sides = []
    for strategy in STRATEGIES:
        if strategy in ("plain", "auto"):
            sides.append(OurSide(engine, strategy))
        else:
            sides.append(OurSide(engine, strategy, f"{strategy} {CHAIN}", 1))
            sides.append(OurSide(engine, strategy, f"{strategy} {TREE}", children))
    return sides


def measure(options: argparse.Namespace, quality: Quality) -> Outcome:
    """One interleaved run of mlx-lm plain and all our sides."""
    file = options.prompt_file
    questions = read_questions(file) if file else own_questions()
    load = Load(questions, options.max_tokens, options.repeats).checked()
    engine, double, verifier_folder = engine_with_double(
        options.pair, quality, ends=not options.no_end
    )
    with engine:
        load = short_enough(engine, load, options.prompts, options.context)
        record(engine, double, load)
        sides: list[Side] = [MlxLmPlain(verifier_folder, engine.model.end_tokens)]
        outcome = bench(engine, options.pair, [*sides, *our_sides(engine, options.children)], load)
    verifier = tuple(line for line in outcome.placement if line.startswith("verifier"))
    return replace(outcome, placement=(f"drafter: {double.runtime_name}", *verifier))


def demands(outcome: Outcome) -> dict[str, Spread | None]:
    """The ratios that the demands name; a ratio is missing where a side is."""
    by_name = {standing.side: standing for standing in outcome.standings}
    found: dict[str, Spread | None] = {}
    tree = by_name[f"pipelined {TREE}"]
    found["pipelined tree / mlx-lm"] = tree.ratio_to(outcome.base)
    best = max((by_name[f"sequential {kind}"] for kind in (CHAIN, TREE)), key=_median_rate)
    found[f"pipelined tree / {best.side} (our best sequential)"] = tree.ratio_to(best)
    found["plain / mlx-lm"] = by_name["plain"].ratio_to(outcome.base)
    if "auto" in by_name:
        found["auto / plain"] = by_name["auto"].ratio_to(by_name["plain"])
    return found


def _median_rate(standing: Standing) -> float:
    spread = standing.decode_tok_s
    return 0.0 if spread is None else spread.median


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description="our schedules with a drafter of given quality")
    parser.add_argument("pair", nargs="?", default=default_pair())
    parser.add_argument("--a", type=float, default=0.7, help="how often it is right (0.7)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="per 8 rows (10)")
    parser.add_argument("--prompts", type=int, default=8, help="how many (8)")
    parser.add_argument("--prompt-file", type=Path, help="instead of the project's own set")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer (200)")
    parser.add_argument(
        "--context", type=int, default=400, help="tokens of prompt and answer (400)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of every prompt (1)")
    parser.add_argument("--children", type=int, help="per node of a tree (the strategy's own)")
    parser.add_argument("--seed", type=int, default=0, help="of the double (0)")
    parser.add_argument("--no-end", action="store_true", help="answers have the full length")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not 0 < options.a < 1 or options.step_ms <= 0:
        parser.error("a must be above 0 and below 1, step-ms above 0")
    quality = Quality(options.a, options.step_ms, options.seed)
    outcome = measure(options, quality)
    lost = [why for each in outcome.standings for why in each.reasons if "failed" in why]
    if lost:
        raise SystemExit(f"the ratios would mean nothing: {lost[0]}")
    ratios = demands(outcome)
    if options.json:
        found = {name: each and each.as_json() for name, each in ratios.items()}
        print(json.dumps(as_json(outcome) | asdict(quality) | {"demands": found}))
        return
    print_outcome(outcome, results())
    for name, ratio in ratios.items():
        print(f"{name}: {spread_cell(ratio, '.3f')}")


if __name__ == "__main__":
    main()
