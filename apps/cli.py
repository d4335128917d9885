"""The command line: names, defaults and help; each command's work is in a module of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ondevice.apps.convertcli import converting
from ondevice.apps.distilcli import distil
from ondevice.apps.failures import INTERRUPTED, USAGE, reported, say, usage_line
from ondevice.apps.options import (
    DebugOption,
    JsonOption,
    LimitOption,
    PairArgument,
    PromptsOption,
    StrategiesOption,
    StrategyOption,
)
from ondevice.apps.profilecli import profile

app = typer.Typer(
    help="Exact speculative decoding: a drafter on the Neural Engine, a verifier on the GPU.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(converting, name="convert")


LookaheadOption = Annotated[
    str | None,
    typer.Option(
        metavar="W,N,G", help="Shape of the lookahead window; chosen by what pays if left out."
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same text; drawn and reported if not given."),
]
ShowOption = Annotated[
    Literal["draft"] | None,
    typer.Option(help="Colour tokens by who proposed them; only on a terminal."),
]
LookupOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text to propose continuations from, beside the chat's."),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, sys.argv's by default; returns the exit status."""
    if sys.stdout is None:  # the shell closed it (>&-)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    command = typer.main.get_command(app)
    args = None if arguments is None else list(arguments)
    try:
        with reported(debug=False):
            status: Any = command.main(args=args, prog_name="ondevice", standalone_mode=False)
    except typer.TyperException as error:
        say(usage_line(error))
        return USAGE
    except typer.Abort:
        return INTERRUPTED
    except typer.Exit as failure:
        return failure.exit_code
    return status if isinstance(status, int) else 0


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Exact speculative decoding: a drafter on the Neural Engine, a verifier on the GPU."""
    if version:
        from importlib.metadata import version as installed

        print(f"ondevice {installed('ondevice')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def chat(
    pair: PairArgument,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and leave."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")
    ] = None,
    strategy: StrategyOption = "auto",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability kept, above 0; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 is off.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Least share of the likeliest token's probability; 0 is off.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Against the last 64 tokens; 1 is off.")
    ] = 1.0,
    seed: SeedOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated."),
    ] = None,
    lookahead: LookaheadOption = None,
    lookup: LookupOption = None,
    show: ShowOption = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show the figures of each answer, on stderr.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Talk with a model, or answer once.

    One answer: -p TEXT, a prompt piped in, or both (the piped text follows that of -p).
    """
    with reported(debug):
        from ondevice.apps import chat as command
        from ondevice.sampling import SamplingParams
        from ondevice.session import Options

        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        window = command.read_window(lookahead)
        options = Options(sampling, max_tokens, tuple(stop or ()), strategy, window=window)
        command.run(
            command.Request(
                pair, options, prompt, system, stats, json, lookup, show_draft=show == "draft"
            )
        )


@app.command()
def check(
    pair: PairArgument,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts in place of the 30 built in: .jsonl, or one a line."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only 5 prompts, at most 32 tokens each.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Prove on this machine that speculation changes no text.

    Every prompt is answered with each strategy, at temperature 0 and at 0.8 with a seed: the
    tokens must be those of plain decoding. Exit status 1 if they part and it is no near-tie.
    """
    with reported(debug):
        from ondevice.apps import check as command

        request = command.Request(pair, prompts, max_tokens, quick, json)
        if not command.run(request):
            raise typer.Exit(1)


@app.command()
def bench(
    pair: PairArgument,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    repeats: Annotated[int, typer.Option(help="Times that each side answers a prompt.")] = 1,
    strategy: StrategiesOption = None,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option(help="That mlx-lm drafts a round, 3 by itself; may be repeated."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the rounds of our answers, for simulate --trace."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure mlx-lm and our schedules on the same prompts, in turn, in one process.

    Greedy on all sides; the tokens must be mlx-lm's. Exit status 1 if they part and it is no
    near-tie.
    """
    with reported(debug):
        from ondevice.apps import bench as command

        request = command.Request(
            pair,
            prompts=prompts,
            limit=limit,
            max_tokens=max_tokens,
            repeats=repeats,
            strategies=tuple(strategy or ()),
            as_json=json,
            records=records,
            draft_tokens=tuple(draft_tokens or ()),
        )
        if not command.run(request):
            raise typer.Exit(1)


app.command()(profile)
app.command()(distil)


VerifyMsOption = Annotated[
    float | None, typer.Option(help="Your own row: milliseconds of a forward of one row.")
]
RowCostOption = Annotated[float, typer.Option(help="Percent of it for each further row.")]
DraftMsOption = Annotated[float | None, typer.Option(help="Milliseconds of a drafter step.")]
DraftRowsOption = Annotated[int, typer.Option(help="Rows that a step covers.")]
SlowdownOption = Annotated[
    float, typer.Option(help="Times as long a forward takes beside the drafter.")
]
AcceptanceOption = Annotated[
    list[float] | None,
    typer.Option(
        metavar="A",
        help="Probability that the first choice is right; 0.7 by default; may be repeated.",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="A Mac whose costs are predicted: m4-max...")
]
WorkloadOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The pair on it: qwen3-8b-4bit...")
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A row of a real run: bench --records FILE.")
]
TokensOption = Annotated[
    int | None, typer.Option(help="Of the longest runs; 4000 by default, 3000 with --regret.")
]
JobsOption = Annotated[
    int | None, typer.Option(help="Processes, one a core by default; changes no figure.")
]


@app.command()
def simulate(
    verify_ms: VerifyMsOption = None,
    row_cost: RowCostOption = 3.0,
    draft_ms: DraftMsOption = None,
    draft_rows: DraftRowsOption = 8,
    slowdown: SlowdownOption = 1.0,
    acceptance: AcceptanceOption = None,
    device: DeviceOption = None,
    workload: WorkloadOption = None,
    context: Annotated[int, typer.Option(help="Tokens of context of the prediction.")] = 512,
    trace: TraceOption = None,
    only: Annotated[bool, typer.Option("--only", help="Leave out the six built-in rows.")] = False,
    strategy: StrategiesOption = None,
    tokens: TokensOption = None,
    seed: Annotated[int, typer.Option(help="Of the modelled text.")] = 0,
    jobs: JobsOption = None,
    regret: Annotated[
        bool, typer.Option("--regret", help="auto against the best fixed schedule, over a grid.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few cells of the grid.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the schedules in virtual time, on modelled units.

    Prints six built-in machines, beside what the project's design says of them, and rows of your
    own. With --regret the exit status is 1 if auto is further behind than is allowed.
    """
    with reported(debug):
        from ondevice.apps import simulate as command

        request = command.Request(
            machine=command.stated_machine(verify_ms, draft_ms, row_cost, draft_rows, slowdown),
            acceptances=tuple(acceptance or ()),
            device=device,
            workload=workload,
            context=context,
            trace=trace,
            only=only,
            strategies=tuple(strategy or ()),
            tokens=tokens,
            seed=seed,
            jobs=jobs,
            regret=regret,
            quick=quick,
            as_json=json,
        )
        if not command.run(request):
            raise typer.Exit(1)


@app.command()
def inspect(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="ARTIFACT",
            help="Folder of a pair, verifier or drafter, an .mlpackage, or a pair's name.",
        ),
    ],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what an artifact is: shapes, sizes, hashes, graph and lint."""
    with reported(debug):
        from ondevice.apps import inspect as command

        command.run(artifact, json)


@app.command()
def doctor(
    pair: PairArgument,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the pair on this machine again.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a text to paste: no names, no paths."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what this machine has, what that means, and what a pair's steps take on it."""
    with reported(debug):
        from ondevice.apps import doctor as command

        command.run(command.Request(pair, calibrate, json, report))
