"""`ondevice doctor`: what this machine has, what that means, and what a pair's steps take on it."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from ondevice import blas
from ondevice.apps.artifacts import locate
from ondevice.apps.costtable import cost_tables, speculation_lines
from ondevice.apps.inspect import print_rows
from ondevice.apps.opening import open_engine
from ondevice.apps.terminal import results
from ondevice.artifact import PAIR_FILE
from ondevice.blas import BlasReport
from ondevice.coststore import CostRecord, stored_for
from ondevice.home import HOME_VARIABLE, home_folder, pairs_folder
from ondevice.machine import Machine, this_machine
from ondevice.models.pairs import pair_names

PACKAGES = ("ondevice", "mlx", "mlx-lm", "coremltools", "numpy", "transformers")
CORE_ML_RUNTIMES = ("emulator",)
"""What this version can run a drafter with."""
ROOM_BYTES = 2_000_000_000
"""Free disk below which a conversion may fail; the default pair needs half of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for. calibrate: measure the pair again."""

    pair: str
    calibrate: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found. folder: of the pair, None when it has not been converted.

    record: the pair's measured costs; trouble: why there are none although they were asked for.
    """

    machine: Machine
    blas: BlasReport
    device: str
    versions: dict[str, str]
    home: Path
    free_bytes: int
    pair: str
    folder: Path | None
    record: CostRecord | None
    trouble: str = ""


def run(request: Request) -> None:
    """Examine and print. Raises UserError for a pair that is none, or is damaged."""
    found = examine(request)
    if request.as_json:
        print(json.dumps(as_json(found)), flush=True)
    else:
        print_examination(found, results())


def examine(request: Request) -> Examination:
    """Look at everything; opens the pair only to measure it."""
    report = blas.prepare()
    folder: Path | None
    if request.calibrate:
        folder, record, trouble = _measured(request.pair)
    else:
        folder, trouble = _pair_folder(request.pair), ""
        record = None if folder is None else stored_for(folder)
    import mlx.core as mx

    home = home_folder()
    return Examination(
        machine=this_machine(),
        blas=report,
        device="GPU" if mx.default_device().type == mx.gpu else "CPU",
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        home=home,
        free_bytes=shutil.disk_usage(_existing(home)).free,
        pair=request.pair,
        folder=folder,
        record=record,
        trouble=trouble,
    )


def _measured(pair: str) -> tuple[Path, CostRecord | None, str]:
    with open_engine(pair, measure=False) as engine:
        engine.measure_costs(again=True)
        return locate(pair), engine.cost_record, engine.cost_trouble


def _pair_folder(pair: str) -> Path | None:
    if pair in pair_names() and not (pairs_folder() / pair / PAIR_FILE).is_file():
        return None
    return locate(pair)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(part for part in (folder, *folder.parents) if part.is_dir())


def meaning(found: Examination) -> list[str]:
    """What the machine's properties mean for a user, a sentence or two each."""
    machine = found.machine
    lines = []
    if machine.apple_silicon:
        lines.append(
            "The verifier runs on the GPU. Drafters run in this version's own emulator of Core ML, "
            "on the CPU."
        )
    else:
        lines.append(
            "This is no Mac with Apple silicon: the verifier runs on the CPU, and drafters in an "
            "emulator of Core ML. Texts are what they are on a Mac; speeds say nothing about one."
        )
    if found.blas.needed:
        lines.append(f"{found.blas.advice}.")
    if machine.usable_cores == 1:
        lines.append(
            "There is one core for both models: they take turns on it, so that overlapping them "
            "gains nothing."
        )
    if found.free_bytes < ROOM_BYTES:
        lines.append(
            f"The cache folder has {found.free_bytes / 1e9:.1f} GB free, too little to convert "
            f"most pairs: free space there, or set {HOME_VARIABLE} to another disk."
        )
    return lines


def pair_lines(found: Examination) -> list[str]:
    """What is known of the pair's costs, and what speculation must bring to pay here."""
    record = found.record
    if found.trouble and record is None:
        return [f"Not measured: {found.trouble}. Costs are assumed, and corrected while running."]
    if found.folder is None:
        return [
            f"Not converted yet: the first `ondevice chat {found.pair}` does that, and measures it."
        ]
    if record is None:
        return [
            "Not measured on this machine with these versions: the next answer that speculates "
            "does that first, or `ondevice doctor --calibrate` now."
        ]
    lines = speculation_lines(record.table)
    if not record.sure:
        differed = (
            "was measured once" if record.spread is None else f"differed by {record.spread:.0%}"
        )
        lines.append(
            f"The typical figure {differed}: the machine was busy or is slow. Cliffs, where some "
            "rows cost more than more rows do, are left out. `ondevice doctor --calibrate` "
            "measures again."
        )
    if record.trouble:
        lines.append(
            f"{record.trouble}. Its costs are assumed, and corrected while running; `ondevice "
            "doctor --calibrate` measures again."
        )
    return lines


def as_json(found: Examination) -> dict[str, Any]:
    """The examination as plain values."""
    record = found.record
    return {
        "machine": asdict(found.machine),
        "versions": found.versions,
        "mlx_device": found.device,
        "blas": {**asdict(found.blas), "fast": found.blas.fast},
        "core_ml_runtimes": list(CORE_ML_RUNTIMES),
        "home": {"path": str(found.home), "free_bytes": found.free_bytes},
        "meaning": meaning(found),
        "pair": {
            "name": found.pair,
            "path": None if found.folder is None else str(found.folder),
            "costs": None if record is None else record.model_dump(mode="json"),
            "meaning": pair_lines(found),
        },
    }


def print_examination(found: Examination, console: Console) -> None:
    """For people: the machine, what that means, the pair's costs, what those mean."""
    machine = found.machine
    cores = f"{machine.cores} cores"
    if machine.usable_cores != machine.cores:
        cores += f", {machine.usable_cores} of them for this process"
    print_rows(
        console,
        "machine",
        [
            ("processor", f"{machine.cpu}, {cores}"),
            ("memory", f"{machine.memory_bytes / 1e9:.1f} GB"),
            ("system", machine.system),
            ("cache folder", f"{found.home}, {found.free_bytes / 1e9:.1f} GB free on its disk"),
            ("MLX", f"on the {found.device}"),
            ("Core ML", ", ".join(CORE_ML_RUNTIMES)),
        ],
    )
    console.print()
    print_rows(console, "software", list(found.versions.items()))
    console.print()
    _print_lines(console, "what that means", meaning(found))
    console.print()
    title = f"pair {found.pair}"
    if found.record is not None:
        when = found.record.measured_at.astimezone()
        title += f", measured {when:%Y-%m-%d %H:%M} in {found.record.took_s:.1f} s"
    console.print(title, style=None if console.no_color else "bold")
    if found.record is not None:
        for table in cost_tables(found.record.table, console):
            console.print(table)
            console.print()
    for line in pair_lines(found):
        console.print(line)


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    print_rows(console, title, [("-", line) for line in lines])
