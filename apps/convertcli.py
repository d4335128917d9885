"""`ondevice convert ...`: names, defaults and help of its three commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.apps.failures import reported
from ondevice.apps.options import DebugOption, JsonOption

converting = typer.Typer(
    help="Make a drafter, a verifier, or a pair of both from models as people have them.\n\n"
    "SOURCE is a folder in Hugging Face format, a folder of mlx-community, a .gguf file, or a "
    "model's id on the hub (OWNER/NAME, OWNER/NAME/FILE.gguf, either with @REVISION).",
    rich_markup_mode=None,
    invoke_without_command=True,
)

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Where the model is.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done, and how large it gets.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Round weights to float32, float16 or bfloat16; left as they are by default "
        "(bfloat16 from a GGUF).",
    ),
]
LayersOption = Annotated[
    str | None, typer.Option(metavar="N-M,N", help="Layers of the drafter, from 0; all by default.")
]
RowsOption = Annotated[
    str, typer.Option("--rows", metavar="N,N", help="Rows a step, a function for each.")
]
ContextOption = Annotated[
    str,
    typer.Option(
        "--context", metavar="N,N", help="Slots of the cache, a function for each: 512 to 4096."
    ),
]
CompressionOption = Annotated[
    str, typer.Option(metavar="FORM", help="How weights are stored: lut6, lut4, int8 or fp16.")
]
HeadOption = Annotated[
    str | None,
    typer.Option(metavar="FORM", help="The same for the output matrix; as the rest by default."),
]
VocabularyOption = Annotated[
    int | None,
    typer.Option(
        "--drafter-vocab", metavar="N", help="Only the N tokens that --corpus uses most; 16384..."
    ),
]
CorpusOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Text as the verifier writes it.")
]


@converting.callback()
def convert(context: typer.Context) -> None:
    """Without a command: the help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@converting.command()
def drafter(
    source: SourceArgument,
    out: OutOption,
    verifier: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the verifier that it is for; checked."),
    ] = None,
    layers: LayersOption = None,
    rows: RowsOption = "1,8,64",
    context: ContextOption = "512,2048",
    compression: CompressionOption = "lut6",
    head_compression: HeadOption = None,
    drafter_vocab: VocabularyOption = None,
    corpus: CorpusOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a Core ML drafter of SOURCE, proved against mlx-lm."""
    with reported(debug):
        from ondevice.apps import convert as command

        choices = command.DrafterChoices(
            layers, rows, context, compression, head_compression, drafter_vocab, corpus
        )
        command.convert_drafter(source, verifier, choices, command.Output(out, dry_run, json))


@converting.command()
def verifier(
    source: SourceArgument,
    out: OutOption,
    dtype: DtypeOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make an MLX verifier of SOURCE.

    Any family that mlx-lm runs, quantised or not.
    """
    with reported(debug):
        from ondevice.apps import convert as command

        command.convert_verifier(source, dtype, command.Output(out, dry_run, json))


@converting.command()
def pair(
    verifier: Annotated[str, typer.Option(metavar="SOURCE", help="The verifier's model.")],
    drafter: Annotated[
        str, typer.Option(metavar="SOURCE", help="The drafter's: a small one of the same family.")
    ],
    out: OutOption,
    dtype: DtypeOption = None,
    layers: LayersOption = None,
    rows: RowsOption = "1,8,64",
    context: ContextOption = "512,2048",
    compression: CompressionOption = "lut6",
    head_compression: HeadOption = None,
    drafter_vocab: VocabularyOption = None,
    corpus: CorpusOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a verifier and a drafter for it.

    `ondevice chat DIR` then runs the pair.
    """
    with reported(debug):
        from ondevice.apps import convert as command

        choices = command.DrafterChoices(
            layers, rows, context, compression, head_compression, drafter_vocab, corpus
        )
        output = command.Output(out, dry_run, json)
        command.convert_pair(verifier, drafter, dtype, choices, output)
