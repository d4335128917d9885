"""`ondevice distil`: names, defaults and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.apps.failures import reported
from ondevice.apps.options import DebugOption, JsonOption


def distil(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PAIR|VERIFIER",
            help="A known pair, a pair's folder, or a model: Hugging Face folder or .gguf.",
        ),
    ],
    hours: Annotated[
        float, typer.Option(help="For texts and training; some minutes of measuring come on top.")
    ] = 8.0,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text of your domain, UTF-8; may be repeated."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts of yours: .jsonl, or one a line."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The pair that is written; distilled/ in the home by default."
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Texts, checkpoints, weights, card; distil/ in the home."
        ),
    ] = None,
    start: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A trained drafter to begin with.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Of the verifier, as the student begins; 0,1,2 by default.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Tokens that the drafter can propose; 16384 by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of questions, answers and their order.")] = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Teach a small drafter on a verifier's own text, and write the pair of both.

    The verifier writes questions and answers them; a student of a few of its layers learns to
    foretell it. A run that was killed goes on where it was when the same command is given again,
    and one that is done goes on with more --hours.
    """
    with reported(debug):
        from ondevice.apps import distil as command

        request = command.request(
            source, hours, text or (), prompts or (), layers, rows, seed, output, work, start, json
        )
        command.run(request)
