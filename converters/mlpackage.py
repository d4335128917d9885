"""MIL program -> .mlpackage on disk, without macOS."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ondevice.coreml.package import Package
from ondevice.errors import RuntimeFailure
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

        built = program(sources)
        authored = {name: _op_types(function) for name, function in built.functions.items()}
        model = ct.convert(
            built,
            minimum_deployment_target=ct.target.iOS18,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            skip_model_load=True,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
        model.save(str(path))
    _check_ops(Package.open(path), authored)


def _op_types(function: Any) -> list[str]:
    return [op.op_type for op in function.operations if op.op_type != "const"]


def _check_ops(package: Package, authored: Mapping[str, Sequence[str]]) -> None:
    """RuntimeFailure unless the package has the ops that were written, in that order."""
    for name, expected in authored.items():
        found = [op.type for op in package.functions[name].ops if op.type != "const"]
        if found != expected:
            raise RuntimeFailure(
                f"{name} of {package.path} has {len(found)} ops, not the {len(expected)} that were "
                "written; check the coremltools version"
            )


def folder_bytes(folder: Path) -> int:
    """Size of all files in `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
