"""An answer's energy and the machine's state, beside its other statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ondevice.conditions import conditions_now
from ondevice.energy import EnergyUse, Meter
from ondevice.statistics import Statistics, Tally


@dataclass(frozen=True, slots=True)
class Power:
    """The meter, and the rails that the two units are on.

    drafter_rail: None where the drafter shares its rail with others.
    """

    meter: Meter = field(default_factory=lambda: Meter(None, "this engine has no meter"))
    verifier_rail: str = "cpu"
    drafter_rail: str | None = None

    def busy_ms(self, tally: Tally) -> dict[str, float]:
        """How long each unit worked for the answer, by its rail."""
        busy = {self.verifier_rail: tally.verifier_ns / 1e6}
        if self.drafter_rail:
            busy[self.drafter_rail] = tally.drafter_ns / 1e6
        return busy

    def added(self, stats: Statistics, use: EnergyUse) -> Statistics:
        """The statistics with what is known of energy and of the machine's state."""
        now, reasons = conditions_now(), [use.reason] if use.reason else []
        drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
        if use.rails_mj and drafted and self.drafter_rail is None:
            reasons.append("rejected drafts: the drafter shares its rail with others")
        return replace(
            stats,
            energy_mj=use.rails_mj,
            energy_reason="; ".join(reasons) or None,
            energy_idle_mw=use.idle_mw,
            energy_per_token_mj=use.per_token_mj(stats.completion_tokens),
            energy_rejected_drafts_mj=use.rejected_mj(self.drafter_rail, drafted, accepted),
            thermal_state=now.thermal_state,
            low_power_mode=now.low_power_mode,
        )
