"""The learning rate over a run: up, level, down to nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, a level stretch, then a linear descent to zero.

    Shares of the whole run. A checkpoint of the level stretch can be trained on for longer, which a
    cosine's cannot (Hägele et al. 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed
    Training Durations, section 3).
    """

    rate: float
    warmup: float = 0.02
    descent: float = 0.4

    def at(self, progress: float) -> float:
        """The rate when `progress` of the run (0 to 1) is done."""
        if progress < self.warmup:
            return self.rate * max(progress / self.warmup, 0.05)
        return self.rate * min(1.0, max(0.0, (1 - progress) / self.descent))
