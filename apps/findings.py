"""What `doctor` looks at on the machine itself: runtimes, counters; and the report to paste."""

from __future__ import annotations

import getpass
import io
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from ondevice.energy import DEAD_MS, open_meter
from ondevice.machine import Machine
from ondevice.probereport import ProbeReport
from ondevice.traces import write_lines

LOOK_MS = 2 * DEAD_MS
"""How long MLX works while the counters are looked at."""
LEAST_MACOS = 15
"""Packages with several functions, and the names of those, came with it."""


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """A way to run drafters. trouble: what it lacks here, "" for nothing; remedy: the command."""

    name: str
    version: str = ""
    trouble: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        if self.trouble:
            return f"{self.name}: not here"
        return f"{self.name} {self.version}".strip()


def installed(package: str) -> str:
    """Its version; "not installed" without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def runtimes_of(machine: Machine) -> Iterator[RuntimeState]:
    """What could run a drafter here, the best first."""
    if not machine.apple_silicon:
        yield RuntimeState("emulator")
        return
    found = re.match(r"macOS (\d+)", machine.system)
    old = found is not None and int(found[1]) < LEAST_MACOS
    trouble = f"macOS {LEAST_MACOS} or newer, for the Neural Engine" if old else ""
    remedy = "softwareupdate --list" if old else ""
    bound = all(find_spec(name) is not None for name in ("CoreML", "Quartz"))
    yield RuntimeState(
        "pyobjc",
        installed("pyobjc-framework-CoreML"),
        trouble or ("" if bound else "PyObjC's frameworks CoreML and Quartz"),
        remedy or ("" if bound else "pip install pyobjc-framework-CoreML pyobjc-framework-Quartz"),
    )
    built_in = _coremltools_predicts()
    yield RuntimeState(
        "coremltools",
        installed("coremltools"),
        trouble or ("" if built_in else "a coremltools with Core ML in it"),
        remedy or ("" if built_in else "pip install --force-reinstall --no-deps coremltools"),
    )
    yield RuntimeState("mlx", installed("mlx"))


def _coremltools_predicts() -> bool:
    spec = find_spec("coremltools")
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).parent.glob("libcoremlpython*"))


@dataclass(frozen=True, slots=True)
class Counters:
    """Energy counters. rails: "alive", or what is wrong, by rail. name: None without any.

    idle_mw: what the machine uses when nothing runs, where that was measured.
    """

    name: str | None = None
    rails: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    remedy: str = ""
    idle_mw: dict[str, float] | None = None

    def __str__(self) -> str:
        if self.name is None:
            return self.trouble or "no counters"
        return f"{self.name}: " + ", ".join(f"{rail} {state}" for rail, state in self.rails.items())


def look_at_counters() -> Counters:
    """Read them while MLX works for a moment: a dead counter shows itself."""
    meter = open_meter()
    if meter.name is None:
        return Counters(trouble=meter.reason, remedy=meter.remedy)
    window, worked_ms = meter.begin(), _mlx_works()
    use = window.end({"gpu": worked_ms})
    if use.rails_mj is None:
        return Counters(trouble=use.reason or "")
    states = {rail: "alive" if mj else "at 0" for rail, mj in use.rails_mj.items()}
    for reason in (use.reason or "").split("; "):
        rail, _, what = reason.partition(": ")
        if rail in states:
            states[rail] = "absent" if "no such" in what else "dead"
    if states.get("ane") == "at 0":
        states["ane"] = "not tried"
    return Counters(meter.name, states, idle_mw=meter.idle_mw)


def _mlx_works() -> float:
    import mlx.core as mx

    matrix = mx.random.normal((256, 256))
    begun = time.monotonic()
    while (time.monotonic() - begun) * 1e3 < LOOK_MS:
        mx.eval(matrix @ matrix)
    return (time.monotonic() - begun) * 1e3


def verdict_parts(report: ProbeReport) -> Iterator[str]:
    """An accepted examination in a few words."""
    share = report.ane_share
    if share is not None:
        yield f"{share:.0%} of the cost on the Neural Engine by Core ML's plan"
    for name, function in report.functions.items():
        if function.elsewhere:
            ops = ", ".join(f"{count} {op}" for op, count in function.elsewhere.items())
            yield f"{name} has {ops}"
    if report.agreement is not None:
        yield f"{report.agreement:.1%} of first choices among the emulator's three"
    for rows, ms in sorted(report.step_ms.items()):
        beside = report.beside_ms.get(rows)
        yield f"a step of {rows} row{'s' if rows != 1 else ''} {ms:.1f} ms" + (
            f", {beside:.1f} ms beside the GPU" if beside is not None else ""
        )
    if report.ignored_backings:
        yield "outputs are copied, since Core ML puts them elsewhere than told"
    if report.thermal_state not in (None, "nominal"):
        yield f"measured in thermal state {report.thermal_state}"
    if report.low_power_mode:
        yield "measured in low-power mode"


def verdict_line(report: ProbeReport) -> str:
    """An examination in one line."""
    if not report.accepted:
        return f"refused: {report.reason}"
    return "; ".join(verdict_parts(report)) or "accepted"


# The report


def write_report(path: Path, page: Callable[[Console], None], hidden: str = "") -> None:
    """The page as text without anything that tells whose machine it is.

    hidden: a path as the user typed it. Raises BadRequest where the page cannot be written.
    """
    text = io.StringIO()
    page(Console(file=text, width=100, no_color=True, highlight=False, markup=False))
    shown = anonymous(text.getvalue(), hidden)
    write_lines(path, (line.rstrip() for line in shown.splitlines()))


def anonymous(text: str, hidden: str = "") -> str:
    """The text without paths, `hidden` among them, this user's name and this machine's.

    What has a single slash is taken for a path only as `hidden`: "tok/s" is none.
    """
    if hidden:
        text = re.sub(rf"{re.escape(hidden)}(?:/[\w.@+~=-]+)*", "(a path)", text)
    part = r"[\w.@+~=-]+"
    text = re.sub(rf"(?<![\w.@+~=:/-])(?!/sys/)(?:{part})?(?:/{part}){{2,}}/?", "(a path)", text)
    names = {platform.node(), Path.home().name}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", "(a name)", text)
    return text
