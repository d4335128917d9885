"""Stand-in for zeus-apple-silicon 1.1: windows by label, millijoules or None."""

from __future__ import annotations

import time

from standin import fault

WATTS = {"cpu_total_mj": 4.0, "gpu_mj": 8.0, "gpu_sram_mj": 0.5, "ane_mj": 2.0, "dram_mj": 1.0}


class AppleEnergyMetrics:
    def __init__(self, seconds: float) -> None:
        absent, dead = fault("rails_absent", ()), fault("rails_dead", ())
        for name, watts in WATTS.items():
            value = None if name in absent else 0 if name in dead else int(seconds * watts * 1000)
            setattr(self, name, value)


class AppleEnergyMonitor:
    def __init__(self) -> None:
        if fault("monitor"):
            raise RuntimeError("Failed to create subscription")
        self._windows: dict[str, float] = {}

    def begin_window(self, label: str, restart: bool = False) -> None:
        if label in self._windows and not restart:
            raise RuntimeError(f"window {label} is active")
        self._windows[label] = time.monotonic()

    def end_window(self, label: str) -> AppleEnergyMetrics:
        if label not in self._windows:
            raise RuntimeError(f"no window {label}")
        if fault("end_window"):
            raise RuntimeError("the subscription is gone")
        return AppleEnergyMetrics(time.monotonic() - self._windows.pop(label))
