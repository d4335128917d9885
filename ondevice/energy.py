"""Energy of an answer by rail, in millijoules, or the reason why it is not known.

On a Mac the counters are Apple's own estimates (IOReport's Energy Model, read without root through
zeus-apple-silicon), on Linux the processor's (RAPL, readable by root on most systems). They count
what the whole machine uses, so what it uses when idle is measured once and subtracted. A counter
that is absent, or stays at zero while its unit works, is null with a reason, never 0: on some chips
and builds of macOS counters are dead.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ondevice.artifact import replacing
from ondevice.errors import CacheUnwritable
from ondevice.home import home_folder
from ondevice.machine import this_machine

Rails = dict[str, float | None]
"""mJ by rail: cpu, gpu, ane, dram; None where there is no counter."""

LEAST_MS = 10.0
"""A shorter window is noise: counters have steps of 1 mJ."""
DEAD_MS = 40.0
"""A counter that stays at zero for as long as this while its unit works is dead (mactop's rule)."""
IDLE_SECONDS, IDLE_WINDOWS = 1.0, 5
RAPL = Path("/sys/class/powercap")


class Source(Protocol):
    """Where windows of energy come from. name: for people to read."""

    name: str

    def begin(self, label: str) -> None:
        """Open a window."""

    def end(self, label: str) -> Rails:
        """Close it; what was used in it."""


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Of one window. rails_mj: idle subtracted; None as a whole without any counter.

    reason: why rails are null, None when none is. idle_mw: what was subtracted, None when it is not
    known and nothing was.
    """

    rails_mj: Rails | None
    reason: str | None
    idle_mw: dict[str, float] | None = None

    def per_token_mj(self, tokens: int) -> dict[str, float] | None:
        """By rail that is known."""
        known = {rail: mj for rail, mj in (self.rails_mj or {}).items() if mj is not None}
        return {rail: mj / tokens for rail, mj in known.items()} if known and tokens else None

    def rejected_mj(self, rail: str | None, drafted: int, accepted: int) -> float | None:
        """The drafter's energy for drafts that the verifier rejected; rail: the drafter's own.

        In proportion to the draft tokens that were put before the verifier.
        """
        used = (self.rails_mj or {}).get(rail) if rail else None
        return used * (1 - accepted / drafted) if used is not None and drafted else None


class Meter:
    """Opens windows on this machine's counters; any thread, any number at once."""

    def __init__(self, source: Source | None, reason: str = "", remedy: str = "") -> None:
        """reason: why there is no source. remedy: the command that brings one, "" for none."""
        self._source, self._reason, self.remedy = source, reason, remedy
        self._labels = itertools.count()
        self._lock = threading.Lock()
        self.idle_mw: dict[str, float] | None = None
        """What the machine uses by rail when nothing runs; None while it is not known."""

    @property
    def name(self) -> str | None:
        """What is read; None when there is nothing."""
        return self._source.name if self._source else None

    @property
    def reason(self) -> str:
        """Why there is nothing to read; "" when there is."""
        return self._reason

    def begin(self) -> Window:
        """A window from now on."""
        label = f"ondevice-{next(self._labels)}"
        if self._source is not None:
            try:
                with self._lock:
                    self._source.begin(label)
            except Exception as error:
                self._give_up(error)
        return Window(self, label)

    def _end(self, label: str) -> Rails | None:
        if self._source is None:
            return None
        try:
            with self._lock:
                return self._source.end(label)
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        assert self._source is not None
        self._reason = f"{self._source.name} failed: {error}"
        self._source = None

    def know_idle(self) -> None:
        """Have `idle_mw`: as it was kept for this machine, else measured now, which takes 1 s."""
        if self._source is None or self.idle_mw is not None:
            return
        path = home_folder() / "idle.json"
        machine = this_machine()
        key = f"{machine.cpu}, {machine.system}, {self._source.name}"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))[key]
            self.idle_mw = {rail: float(mw) for rail, mw in kept.items()}
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.idle_mw = self._measured_idle()
        if self.idle_mw is not None:
            try:
                with replacing(path) as fresh:
                    fresh.write_text(json.dumps({key: self.idle_mw}), encoding="utf-8")
            except CacheUnwritable:
                pass  # it is measured again next time

    def _measured_idle(self) -> dict[str, float] | None:
        """The least of some windows: whatever else runs only adds."""
        seen: dict[str, list[float]] = {}
        for _ in range(IDLE_WINDOWS):
            window, begun = self.begin(), time.monotonic()
            time.sleep(IDLE_SECONDS / IDLE_WINDOWS)
            rails = self._end(window.label)
            if rails is None:
                return None
            for rail, mj in rails.items():
                if mj is not None:
                    seen.setdefault(rail, []).append(mj / (time.monotonic() - begun))
        return {rail: min(powers) for rail, powers in seen.items()}


@dataclass(slots=True)
class Window:
    """What is used from its making on. label: the source's name for it."""

    meter: Meter
    label: str
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.begun = time.monotonic()

    def end(self, busy_ms: Mapping[str, float]) -> EnergyUse:
        """Close it. busy_ms: how long the unit behind each rail worked meanwhile."""
        rails = self.meter._end(self.label)
        if rails is None:
            remedy = f": {self.meter.remedy}" if self.meter.remedy else ""
            return EnergyUse(None, self.meter.reason + remedy)
        seconds = time.monotonic() - self.begun
        if seconds * 1e3 < LEAST_MS:
            return EnergyUse(None, f"the answer took less than {LEAST_MS:.0f} ms")
        reasons, idle_mw = [], self.meter.idle_mw
        busy_ms = {"cpu": seconds * 1e3, "dram": seconds * 1e3, **busy_ms}
        used: Rails = {}
        for rail, mj in rails.items():
            used[rail], reason = _believed(rail, mj, busy_ms.get(rail, 0.0))
            if reason:
                reasons.append(reason)
            elif idle_mw and (value := used[rail]) is not None:
                used[rail] = max(0.0, value - idle_mw.get(rail, 0.0) * seconds)
        return EnergyUse(used, "; ".join(reasons) or None, idle_mw)


def _believed(rail: str, mj: float | None, busy_ms: float) -> tuple[float | None, str]:
    if mj is None:
        return None, f"{rail}: this machine has no such counter"
    if mj == 0 and busy_ms >= DEAD_MS:
        return None, f"{rail}: its counter stayed at 0 for {busy_ms:.0f} ms of work"
    return mj, ""


def open_meter() -> Meter:
    """The counters of this machine, or the reason why there are none."""
    try:
        apple = this_machine().apple_silicon
        return Meter(AppleCounters() if apple else RaplCounters(RAPL))
    except Unreadable as error:
        return Meter(None, str(error), error.remedy)


class Unreadable(Exception):
    """There are no counters to read; the message says why, remedy is the command that helps."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class AppleCounters:
    """Apple's estimates, through zeus-apple-silicon."""

    name = "zeus-apple-silicon"

    def __init__(self) -> None:
        """Raises Unreadable."""
        try:
            from zeus_apple_silicon import AppleEnergyMonitor
        except ImportError as error:
            raise Unreadable(
                f"no energy counters ({error})", "pip install zeus-apple-silicon"
            ) from error
        try:
            self._monitor: Any = AppleEnergyMonitor()
        except Exception as error:
            raise Unreadable(f"no energy counters: zeus-apple-silicon: {error}") from error

    def begin(self, label: str) -> None:
        """Open a window."""
        self._monitor.begin_window(label)

    def end(self, label: str) -> Rails:
        """Close it. gpu holds the GPU's own memory too, where that is counted."""
        metrics = self._monitor.end_window(label)
        gpu, sram = metrics.gpu_mj, metrics.gpu_sram_mj
        return {
            "cpu": metrics.cpu_total_mj,
            "gpu": None if gpu is None else gpu + (sram or 0),
            "ane": metrics.ane_mj,
            "dram": metrics.dram_mj,
        }


class RaplCounters:
    """The processor's counters below /sys/class/powercap: packages as cpu, and dram."""

    name = "RAPL"

    def __init__(self, root: Path) -> None:
        """Raises Unreadable."""
        self._zones = list(_rapl_zones(root))
        self._begun: dict[str, list[int]] = {}
        if not self._zones:
            raise Unreadable(f"no energy counters: {root} has no RAPL zones on this machine")
        try:
            self._read()
        except OSError as error:
            raise Unreadable(
                f"no energy counters: RAPL cannot be read ({error.strerror})",
                f"sudo chmod a+r {root}/intel-rapl:*/energy_uj",
            ) from error

    def begin(self, label: str) -> None:
        """Open a window."""
        self._begun[label] = self._read()

    def end(self, label: str) -> Rails:
        """Close it; a counter may have begun anew once."""
        rails: Rails = {}
        for zone, before, now in zip(
            self._zones, self._begun.pop(label), self._read(), strict=True
        ):
            used_uj = now - before if now >= before else now - before + zone.range_uj
            rails[zone.rail] = (rails.get(zone.rail) or 0.0) + used_uj / 1e3
        return rails

    def _read(self) -> list[int]:
        return [int((zone.folder / "energy_uj").read_text()) for zone in self._zones]


@dataclass(frozen=True, slots=True)
class _Zone:
    folder: Path
    rail: str
    range_uj: int


def _rapl_zones(root: Path) -> Iterator[_Zone]:
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            range_uj = int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        rail = "cpu" if name.startswith("package") else name
        if rail in ("cpu", "dram"):  # cores and uncore are parts of a package
            yield _Zone(folder, rail, range_uj)
