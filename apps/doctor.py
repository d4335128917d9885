"""`ondevice doctor`: what this machine has, what that means, and what a pair's steps take on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ondevice import blas, ladder
from ondevice.apps.artifacts import locate
from ondevice.apps.costtable import cost_tables, speculation_lines
from ondevice.apps.findings import (
    Counters,
    RuntimeState,
    installed,
    look_at_counters,
    runtimes_of,
    verdict_line,
    write_report,
)
from ondevice.apps.inspect import print_rows
from ondevice.apps.opening import open_engine, remedy
from ondevice.apps.terminal import results
from ondevice.artifact import (
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    PAIR_FILE,
    DrafterManifest,
    PairManifest,
)
from ondevice.blas import BlasReport
from ondevice.conditions import Conditions, conditions_now
from ondevice.coreml.package import Package
from ondevice.coststore import CostRecord, stored_for
from ondevice.errors import ArtifactError
from ondevice.home import HOME_VARIABLE, home_folder, pairs_folder
from ondevice.machine import Machine, this_machine
from ondevice.models.pairs import pair_names
from ondevice.probereport import ProbeReport
from ondevice.traces import require_file_name
from ondevice.verifierfolder import check_verifier_folder

PACKAGES = ("ondevice", "mlx", "mlx-lm", "coremltools", "numpy", "transformers")
MAC_PACKAGES = ("pyobjc-core", "pyobjc-framework-CoreML", "zeus-apple-silicon")
GIB = 2**30
ROOM_BYTES = 2_000_000_000
"""Free disk below which a conversion may fail; the default pair needs half of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    calibrate: examine and measure the pair again. report: where to write a text to paste.
    """

    pair: str
    calibrate: bool = False
    as_json: bool = False
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found. folder: of the pair, None when it has not been converted.

    record: the pair's measured costs; trouble: why there are none although they were asked for.
    verdicts: what examinations of the pair's drafter found on this Mac. drafts: whether the pair
    has a drafter. damage: what is wrong with the pair's files, "" for nothing.
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
    runtimes: tuple[RuntimeState, ...] = (RuntimeState("emulator"),)
    counters: Counters = field(default_factory=Counters)
    conditions: Conditions = field(default_factory=Conditions)
    verdicts: tuple[ProbeReport, ...] = ()
    drafts: bool = True
    damage: str = ""


def run(request: Request) -> None:
    """Examine and print. Raises UserError for a pair that is none, or a report's wrong name."""
    if request.report is not None:
        require_file_name(request.report)
    found = examine(request)
    if request.report is not None:
        hidden = request.pair if os.sep in request.pair else ""
        write_report(request.report, lambda console: print_examination(found, console), hidden)
    if request.as_json:
        print(json.dumps(as_json(found)), flush=True)
    else:
        print_examination(found, results())


def examine(request: Request) -> Examination:
    """Look at everything; opens the pair only to measure it."""
    report, machine = blas.prepare(), this_machine()
    folder: Path | None
    state = _PairState()
    if request.calibrate:
        folder, record, trouble = _measured(request.pair)
        state = _state_of(folder, machine)
    else:
        folder, record, trouble = _pair_folder(request.pair), None, ""
        if folder is not None:
            state = _state_of(folder, machine)
            record = None if state.damage else stored_for(folder)
    import mlx.core as mx

    home = home_folder()
    packages = (*PACKAGES, *MAC_PACKAGES) if machine.apple_silicon else PACKAGES
    return Examination(
        machine=machine,
        blas=report,
        device="GPU" if mx.default_device().type == mx.gpu else "CPU",
        versions={
            "python": platform.python_version(),
            **{name: installed(name) for name in packages},
        },
        home=home,
        free_bytes=shutil.disk_usage(_existing(home)).free,
        pair=request.pair,
        folder=folder,
        record=record,
        trouble=trouble,
        runtimes=tuple(runtimes_of(machine)),
        counters=look_at_counters(),
        conditions=conditions_now(),
        verdicts=state.verdicts,
        drafts=state.drafts,
        damage=state.damage,
    )


@dataclass(frozen=True, slots=True)
class _PairState:
    """See Examination."""

    verdicts: tuple[ProbeReport, ...] = ()
    drafts: bool = True
    damage: str = ""


def _state_of(folder: Path, machine: Machine) -> _PairState:
    """Looks at every file of the pair but at the bytes of its weights."""
    try:
        pair = PairManifest.read(folder / PAIR_FILE)
        check_verifier_folder(folder / pair.verifier)
        if pair.drafter is None:
            return _PairState(drafts=False)
        drafter = folder / pair.drafter
        DrafterManifest.read(drafter / DRAFTER_FILE)
        Package.open(drafter / DRAFTER_PACKAGE)
        return _PairState(tuple(ladder.known(drafter)) if machine.apple_silicon else ())
    except ArtifactError as error:
        return _PairState(damage=str(error))


def _measured(pair: str) -> tuple[Path, CostRecord | None, str]:
    folder = _pair_folder(pair)
    drafter = None if folder is None else PairManifest.read(folder / PAIR_FILE).drafter
    if folder is not None and drafter is not None:
        ladder.forget(folder / drafter)
    with open_engine(pair, measure=False) as engine:
        engine.measure_costs(again=True)
        return locate(pair), engine.cost_record, engine.cost_trouble


def _pair_folder(pair: str) -> Path | None:
    if pair in pair_names() and not (pairs_folder() / pair / PAIR_FILE).is_file():
        return None
    folder = locate(pair)
    if not (folder / PAIR_FILE).is_file():
        raise ArtifactError(f"{folder} is no pair: expected {PAIR_FILE} in it")
    return folder


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(part for part in (folder, *folder.parents) if part.is_dir())


def meaning(found: Examination) -> list[str]:
    """What the machine's properties mean for a user, a sentence or two each."""
    machine = found.machine
    lines = []
    if machine.apple_silicon:
        lines.append(
            "The verifier runs on the GPU, through MLX. A drafter runs on the Neural Engine, if it "
            "passes an examination there when its pair is first opened; else on the GPU."
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
    if found.conditions.slowed:
        lines.append(f"Speeds are lower than this machine's: {found.conditions.slowed}.")
    return lines


def missing(found: Examination) -> list[tuple[str, str]]:
    """What is not there, and the command that mends it."""
    lacks = [(state.trouble, state.remedy) for state in found.runtimes if state.trouble]
    if found.blas.needed and not found.blas.fast:
        lacks.append(("a fast BLAS for MLX", "apt-get install libopenblas0-pthread"))
    if found.counters.remedy:
        lacks.append((found.counters.trouble, found.counters.remedy))
    if found.folder is None:
        lacks.append((f"the pair {found.pair}, not converted", f"ondevice chat {found.pair}"))
    elif found.damage:
        what, _, advice = found.damage.rpartition("; ")  # such errors end with one
        lacks.append((what or found.damage, remedy(found.folder) or advice))
    elif found.record is None:
        what = "what the pair's steps take here"
        lacks.append((what, f"ondevice doctor {found.pair} --calibrate"))
    whole = found.folder is not None and not found.damage
    if whole and found.drafts and found.machine.apple_silicon and not found.verdicts:
        what = "an examination of the pair's drafter on this Mac"
        lacks.append((what, f"ondevice doctor {found.pair} --calibrate"))
    return lacks


def placement_rows(found: Examination) -> list[tuple[str, str]]:
    """Where the pair's parts run, as far as that was found out."""
    rows = [("verifier", f"MLX on the {found.device}")]
    if not found.drafts:
        return [*rows, ("drafter", "the pair has none")]
    if not found.machine.apple_silicon:
        return [*rows, ("drafter", "emulated Core ML on the CPU")]
    for report in found.verdicts:
        rows.append((report.runtime, verdict_line(report)))
    return rows if found.verdicts else [*rows, ("drafter", "not examined on this Mac yet")]


def pair_lines(found: Examination) -> list[str]:
    """What is known of the pair's costs, and what speculation must bring to pay here."""
    record = found.record
    if found.trouble and record is None:
        return [f"Not measured: {found.trouble}. Costs are assumed, and corrected while running."]
    if found.damage:
        return ["Damaged, so that nothing is known of its costs."]
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
        "core_ml_runtimes": [each.name for each in found.runtimes if not each.trouble],
        "runtimes": [asdict(each) for each in found.runtimes],
        "energy_counters": asdict(found.counters),
        "conditions": asdict(found.conditions),
        "missing": [{"what": what, "mend": mend} for what, mend in missing(found)],
        "home": {"path": str(found.home), "free_bytes": found.free_bytes},
        "meaning": meaning(found),
        "pair": {
            "name": found.pair,
            "path": None if found.folder is None else str(found.folder),
            "damage": found.damage,
            "costs": None if record is None else record.model_dump(mode="json"),
            "placement": dict(placement_rows(found)),
            "examinations": [report.model_dump(mode="json") for report in found.verdicts],
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
            ("memory", f"{machine.memory_bytes / GIB:.1f} GiB"),
            ("system", machine.system),
            ("cache folder", f"{found.home}, {found.free_bytes / 1e9:.1f} GB free on its disk"),
            ("MLX", f"on the {found.device}"),
            ("Neural Engine", "present" if machine.apple_silicon else "none"),
            ("Core ML", "; ".join(map(str, found.runtimes))),
            ("energy", str(found.counters)),
            *_condition_rows(found.conditions),
        ],
    )
    console.print()
    print_rows(console, "software", list(found.versions.items()))
    console.print()
    _print_lines(console, "what that means", meaning(found))
    console.print()
    if lacks := missing(found):
        rows = [("-", f"{what}: {mend}") for what, mend in lacks]
        print_rows(console, "what is missing, and what mends it", rows)
        console.print()
    print_rows(console, f"where {found.pair} runs", placement_rows(found))
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


def _condition_rows(conditions: Conditions) -> list[tuple[str, str]]:
    if conditions.thermal_state is None:
        return []
    mode = "on" if conditions.low_power_mode else "off"
    return [("heat", f"{conditions.thermal_state}; low-power mode {mode}")]


def _print_lines(console: Console, title: str, lines: list[str]) -> None:
    print_rows(console, title, [("-", line) for line in lines])
