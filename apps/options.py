"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.schedule import STRATEGIES, Strategy


def default_pair() -> str:
    """The name in pairs.toml; read when a command runs, since help is to come at once."""
    from ondevice.models import pairs

    return pairs.default_pair()


PairArgument = Annotated[
    str,
    typer.Argument(
        metavar="PAIR",
        help="A known pair, or a folder of a converted one; the default pair if left out.",
        default_factory=default_pair,
        show_default=False,
    ),
]
StrategyOption = Annotated[
    Strategy,
    typer.Option(
        metavar="STRATEGY", help=f"{', '.join(STRATEGIES)}; changes the speed, never the text."
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated; all by default."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PromptsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Prompts in place of our own set: .jsonl, or one a line."),
]
LimitOption = Annotated[
    int | None, typer.Option(help="So many prompts, of all kinds in turn; all by default.")
]
