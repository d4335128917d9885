"""What runs the drafter on this machine: the best that passes its examination.

On a Mac: Core ML through PyObjC, then through coremltools, both on the Neural Engine, then MLX on
the GPU, then none. Elsewhere: the emulator. What an examination found is kept with the drafter,
DRAFTER/verdicts/<machine, system and versions>-<runtime>.json, refusals too: a compiler that
crashes is not to crash at every start.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

from ondevice.artifact import DRAFTER_FILE, DrafterManifest
from ondevice.coreml.runtime import CoreMLRuntime
from ondevice.drafter import CoreMLDrafter
from ondevice.errors import ArtifactError, CacheUnwritable, RuntimeUnavailable
from ondevice.machine import this_machine
from ondevice.probe import RuntimeKind, examine, open_runtime
from ondevice.probereport import ProbeReport
from ondevice.remote import ProcessDrafter

RUNGS: tuple[RuntimeKind, ...] = get_args(RuntimeKind)
"""Runtimes of a Mac, the best first."""
VERSIONED = ("ondevice", "coremltools", "mlx", "pyobjc-core", "pyobjc-framework-CoreML")
"""Packages whose version may change an examination's outcome."""
_PLACES = {
    "pyobjc": "Core ML on the Neural Engine, through PyObjC",
    "coremltools": "Core ML on the Neural Engine, through coremltools",
    "mlx": "MLX on the GPU",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs the drafter. reports: of the runtimes that were looked at, the chosen one last."""

    kind: Literal["emulator", "pyobjc", "coremltools", "mlx"]
    reports: tuple[ProbeReport, ...] = ()

    @property
    def line(self) -> str:
        """For the chat: which, and why not a better one."""
        if self.kind == "emulator":
            return "emulated Core ML (emulator-fp32) on this machine's CPU"
        *refused, chosen = self.reports
        share = chosen.ane_share
        place = _PLACES[self.kind]
        if share is not None:
            place += f" ({share:.0%} of the cost by Core ML's plan)"
        elif self.kind != "mlx":
            place += " (where it runs is not proven: Core ML's plan cannot be read)"
        return "; ".join([place, *refusals(refused)])


def refusals(reports: Iterable[ProbeReport]) -> Iterator[str]:
    """Refused runtimes, and why; neighbours with the same reason together."""
    for reason, alike in itertools.groupby(reports, lambda report: report.reason):
        yield f"not {' or '.join(report.runtime for report in alike)}: {reason}"


def choose(
    folder: Path,
    verifier_folder: Path,
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Choice:
    """What is to run the drafter in `folder`; examines it where that was not done yet, or `again`.

    say: is told what takes its time. Raises RuntimeUnavailable, with every reason, when nothing
    will do; ArtifactError for a drafter that is damaged.
    """
    if not this_machine().apple_silicon:
        return Choice("emulator")
    reports: list[ProbeReport] = []
    for kind in RUNGS:
        reports.append(_examined(kind, folder, verifier_folder, again, say))
        if reports[-1].accepted:
            return Choice(kind, tuple(reports))
    raise RuntimeUnavailable("; ".join(refusals(reports)))


def known(folder: Path) -> list[ProbeReport]:
    """What is kept of examinations of the drafter in `folder` on this machine, best rung first."""
    return [report for kind in RUNGS if (report := _stored(_verdict_path(folder, kind)))]


def known_anywhere(folder: Path) -> list[ProbeReport]:
    """All that is kept of examinations, on whatever machine: by machine, then best rung first."""
    found = [report for path in (folder / "verdicts").glob("*.json") if (report := _stored(path))]
    return sorted(found, key=lambda each: (each.cpu, each.system, _rung(each.runtime)))


def _rung(runtime: str) -> int:
    return [*RUNGS, runtime].index(runtime)


def forget(folder: Path) -> None:
    """Let the drafter in `folder` be examined again on this machine."""
    for kind in RUNGS:
        _verdict_path(folder, kind).unlink(missing_ok=True)


def open_chosen(folder: Path, verifier_folder: Path, choice: Choice) -> CoreMLDrafter:
    """The drafter in `folder` on what was chosen, with the functions worth loading."""
    if choice.kind == "emulator":
        return CoreMLDrafter.open(folder, verifier_folder)
    functions = choice.reports[-1].used
    names = functions.names(DrafterManifest.read(folder / DRAFTER_FILE))

    def runtime(path: Path) -> CoreMLRuntime:
        return open_runtime(choice.kind, path, names)

    return CoreMLDrafter.open(folder, verifier_folder, runtime, functions)


def open_process(folder: Path, verifier_folder: Path, choice: Choice) -> ProcessDrafter:
    """`open_chosen` in a process of its own, in which its arrays stay too."""
    return ProcessDrafter(open_chosen, folder, verifier_folder, choice)


def _examined(
    kind: RuntimeKind,
    folder: Path,
    verifier_folder: Path,
    again: bool,
    say: Callable[[str], None],
) -> ProbeReport:
    path = _verdict_path(folder, kind)
    stored = None if again else _stored(path)
    if stored is not None:
        return stored
    report = examine(kind, folder, verifier_folder, partial(_tell, say, kind))
    machine = this_machine()
    report = report.model_copy(update={"cpu": machine.cpu, "system": machine.system})
    try:
        report.write(path)
    except CacheUnwritable as error:
        say(f"what was found of {kind} is not kept: {error}")
    return report


def _tell(say: Callable[[str], None], kind: str, stage: str) -> None:
    say(f"{kind}: {stage}")


def _stored(path: Path) -> ProbeReport | None:
    try:
        return ProbeReport.read(path)
    except ArtifactError:
        return None


def _verdict_path(folder: Path, kind: str) -> Path:
    manifest = DrafterManifest.read(folder / DRAFTER_FILE)
    machine = this_machine()
    parts = [machine.cpu, machine.system, manifest.ops_sha256, manifest.weights_sha256]
    parts += [f"{name} {_version(name)}" for name in VERSIONED]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return folder / "verdicts" / f"{key}-{kind}.json"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
