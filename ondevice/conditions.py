"""What slows a Mac down without anybody's doing: heat, and low-power mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THERMAL_STATES = ("nominal", "fair", "serious", "critical")
"""NSProcessInfoThermalState, from 0 on; from "serious" on the machine is slowed down."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """thermal_state: one of THERMAL_STATES, or the number of a state that is newer than this code.

    Both None where the system does not say.
    """

    thermal_state: str | None = None
    low_power_mode: bool | None = None

    @property
    def slowed(self) -> str:
        """Why figures taken now say less than they should; "" when nothing is wrong."""
        reasons = []
        if _severity(self.thermal_state) >= THERMAL_STATES.index("serious"):
            reasons.append(
                f"the machine is slowed down by heat (thermal state {self.thermal_state})"
            )
        if self.low_power_mode:
            reasons.append("low-power mode is on")
        return "; ".join(reasons)


def worst(seen: Iterable[Conditions]) -> Conditions:
    """The hottest state of `seen`, and whether low-power mode was ever on; None: never known."""
    states, modes = set(), set()
    for each in seen:
        states.add(each.thermal_state)
        modes.add(each.low_power_mode)
    known = modes - {None}
    return Conditions(max(states, key=_severity, default=None), any(known) if known else None)


def _severity(state: str | None) -> int:
    if state is None:
        return -1
    return THERMAL_STATES.index(state) if state in THERMAL_STATES else len(THERMAL_STATES)


def conditions_now() -> Conditions:
    """As macOS reports them through Foundation; nothing known elsewhere or without PyObjC."""
    try:
        from Foundation import NSProcessInfo
    except ImportError:
        return Conditions()
    info = NSProcessInfo.processInfo()
    state = int(info.thermalState())
    named = THERMAL_STATES[state] if 0 <= state < len(THERMAL_STATES) else str(state)
    return Conditions(named, bool(info.isLowPowerModeEnabled()))
