"""What the coordinator knows of one unit: what its cache holds, what it does, what must wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ondevice.records import Command, Prefill, StartRun, Truncate, UnitName


@dataclass(slots=True)
class Lane:
    """One unit gets one command at a time; commands leave through `out`.

    held: how many committed tokens its cache has, or it was told of; while a prefill is under way,
    what it had before. stale: the answer that the running command belongs to is over.
    """

    name: UnitName
    alive: bool
    out: list[Command]
    steps: Iterator[int]
    held: int = 0
    running: Command | None = None
    stale: bool = False
    idle_since_ns: int = 0
    waiting: list[Command] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """Alive, at rest, and nothing waits."""
        return self.alive and self.running is None and not self.waiting

    def runs(self, step: int) -> bool:
        """Whether `step` is the command it was given last; anything else is an echo."""
        return self.running is not None and getattr(self.running, "step", None) == step

    def send(self, command: Command) -> None:
        """Give the command now when the unit is at rest, else when it is."""
        if not self.alive:
            return
        if self.running is not None or self.waiting:
            self.waiting.append(command)
            return
        self.out.append(command)
        if not isinstance(command, Truncate):
            self.running = command

    def rest(self, now_ns: int) -> None:
        """The unit has answered: let go what waited for it."""
        self.running, self.stale, self.idle_since_ns = None, False, now_ns
        waiting, self.waiting = self.waiting, []
        for command in waiting:
            self.send(command)

    def lose(self) -> None:
        """The unit is gone, with all that it did or should have done."""
        self.alive, self.running, self.stale = False, None, False
        self.waiting.clear()

    def regain(self) -> None:
        """Another unit took its place, with an empty cache."""
        self.lose()
        self.alive, self.held = True, 0

    def load(self, committed: Sequence[int], common: int, *, prefill: bool) -> None:
        """Keep of the cache what lies within the first `common` of `committed`.

        With `prefill`, bring the rest too, except the last token: the root is never in the cache.
        """
        keep = min(common, self.held, len(committed) - 1)
        if keep < self.held or self.running is not None:
            self.send(Truncate(self.name, keep))
        self.held = keep
        rest = tuple(committed[keep:-1])
        if prefill and rest:
            self.send(Prefill(next(self.steps), self.name, rest))

    def loaded(self, now_ns: int, length: int) -> None:
        """A prefill ended with `length` tokens in the cache."""
        if not self.waiting:  # what waits was planned for the smaller length
            self.held = length
        self.rest(now_ns)

    def roll_back(self) -> None:
        """The answer is over: back to the committed tokens; what runs is stale."""
        self.waiting = [command for command in self.waiting if not isinstance(command, Prefill)]
        self.stale = self.running is not None
        if isinstance(self.running, Prefill):
            return  # only committed tokens went in; how many, `loaded` will say
        rollback = Truncate(self.name, self.held)
        if isinstance(self.running, StartRun):
            self.out.append(rollback)
            self.waiting.clear()  # truncations to no fewer tokens, which this one overtakes
        else:
            self.send(rollback)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
