"""MIL program -> .mlpackage on disk, without macOS."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from ondevice.models.mil import FunctionSource, program


def write_mlpackage(sources: Sequence[FunctionSource], path: Path) -> None:
    """Write one package with all functions; the weights are stored once.

    No optimisation pass runs: what is stored is the graph as written, on every machine. (The
    default pipeline reorders transposes and folds constants into weights, which are then rounded
    again.)
    """
    # Both are told on import and by each conversion: that the runtime is absent off a Mac, and the
    # passes' progress bars.
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()):
        import coremltools as ct

        model = ct.convert(
            program(sources),
            minimum_deployment_target=ct.target.iOS18,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            skip_model_load=True,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
        model.save(str(path))


def folder_bytes(folder: Path) -> int:
    """Size of all files in `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
