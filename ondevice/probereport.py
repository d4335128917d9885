"""What an examination of a drafter on this machine found, and what follows from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ondevice.artifact import Manifest
from ondevice.drafterfolder import Functions


class FunctionReport(Manifest):
    """Of one function. ane_share, elsewhere: see `coreml.plan`; None where there is no plan."""

    first_call_ms: float
    ane_share: float | None = None
    elsewhere: dict[str, int] = Field(default_factory=dict)


class ProbeReport(Manifest):
    """What an examination found. reason: why the runtime is refused, "" if it is not.

    cpu, system: of the machine; "" where that was not noted.
    load_s: compiling and loading. agreement, max_error: over `positions` of the same inputs in the
    emulator. step_ms, beside_ms: by rows, alone and while MLX works. bind_ms: to bind a session's
    buffers. thermal_state, low_power_mode: while it was timed. row_counts, context_sizes: of the
    functions worth loading.
    """

    format: Literal["ondevice-probe-1"] = "ondevice-probe-1"
    runtime: str
    reason: str
    cpu: str = ""
    system: str = ""
    load_s: float | None = None
    functions: dict[str, FunctionReport] = Field(default_factory=dict)
    positions: int = 0
    agreement: float | None = None
    max_error: float | None = None
    soak_calls: int = 0
    step_ms: dict[int, float] = Field(default_factory=dict)
    beside_ms: dict[int, float] = Field(default_factory=dict)
    bind_ms: float | None = None
    ignored_backings: int = 0
    thermal_state: str | None = None
    low_power_mode: bool | None = None
    row_counts: list[int] = Field(default_factory=list)
    context_sizes: list[int] = Field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether the runtime may be used."""
        return not self.reason

    @property
    def ane_share(self) -> float | None:
        """The least share of a function's cost on the Neural Engine, where it is known."""
        known = [each.ane_share for each in self.functions.values() if each.ane_share is not None]
        return min(known, default=None)

    @property
    def used(self) -> Functions:
        """The functions to load."""
        return Functions(tuple(self.row_counts), tuple(self.context_sizes))
