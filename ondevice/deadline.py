"""How long a unit may take before it counts as hung."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """A step may take `factor` times the slowest one seen, and never less than `floor_s` seconds.

    floor_s: a hundred times an emulated step of 8 rows (55 ms for the default pair), a thousand
    times one on the Neural Engine: what is slower hangs, or the machine does. factor: swapping
    and a busy machine make a step some times slower, not ten. first_s: compiling belongs into
    opening, but Core ML may leave some of it to a function's first call, a minute for a large
    drafter. first_steps: how many steps have that time; three row counts at two context sizes.
    They do not count as slow ones seen.
    """

    floor_s: float = 5.0
    factor: float = 10.0
    first_s: float = 120.0
    first_steps: int = 6


NEVER = Deadline(floor_s=math.inf)
"""For a unit that nobody could do without: waiting is all that is left."""

GRACE_S = 0.05
"""An overdue step is looked at twice, so far apart: a program that was stopped (Ctrl-Z, a debugger)
finds late steps when it goes on, and they are done a moment later."""


class Stopwatch:
    """Times the steps of one unit. Its own thread starts and stops it, others look."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._since: float | None = None
        self._steps = 0
        self._slowest_s = 0.0
        self._seen_late: tuple[float, float] | None = None

    def start(self) -> None:
        """A step begins, or the next one follows without a pause."""
        self._since = monotonic()

    def step(self) -> None:
        """A step has ended, and the next one begins."""
        if self._since is not None:
            self._steps += 1
            if self._steps > self._deadline.first_steps:
                self._slowest_s = max(self._slowest_s, monotonic() - self._since)
        self.start()

    def stop(self) -> None:
        """Nothing runs."""
        self._since = None

    @property
    def limit_s(self) -> float:
        """How long the step under way may take."""
        deadline = self._deadline
        if self._steps < deadline.first_steps:
            return max(deadline.first_s, deadline.floor_s)
        return max(deadline.floor_s, deadline.factor * self._slowest_s)

    def patience_s(self) -> float:
        """When to look again, in seconds from now."""
        since, late = self._since, self._seen_late
        if since is None:
            return self._deadline.floor_s
        due = since + self.limit_s
        if late is not None and late[0] == since:
            due = late[1] + GRACE_S
        return max(0.001, due - monotonic())

    def overdue(self) -> bool:
        """Whether the step under way has taken too long, at the second look that finds it so."""
        since, now = self._since, monotonic()
        if since is None or now - since < self.limit_s:
            return False
        if self._seen_late is None or self._seen_late[0] != since:
            self._seen_late = since, now
        return now - self._seen_late[1] >= GRACE_S
