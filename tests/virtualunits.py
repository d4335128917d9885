"""Units whose steps take known virtual times, for calibrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ondevice.calibration import calibrate
from ondevice.errors import UnitFailed
from ondevice.records import DraftResult, Verdict
from ondevice.worker import UnitWorker

DRAFTER_ROWS = (1, 8, 64)
VERIFIER_SLOWDOWN, DRAFTER_SLOWDOWN = 1.5, 1.25
CLIFFS = {3: 12.0, 6: 9.0}


class World:
    """The time, who keeps the units busy, and what else happens to a step."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.called = self.load = ""
        self.pace = 1.0
        self.disturb: Callable[[str, int], float] = lambda unit, rows: 1.0

    def step(self, unit: str, rows: int, ms: float) -> tuple[int, int]:
        self.called = unit
        start_ns = self.now_ns
        self.now_ns += round(1e6 * self.pace * ms * self.disturb(unit, rows))
        return start_ns, self.now_ns

    @contextmanager
    def busy(self, step: Callable[[], object]) -> Iterator[None]:
        step()
        self.load = self.called
        yield
        self.load = ""


def forward_ms(rows: int, context: int) -> float:
    return 20 + rows + CLIFFS.get(rows, 0.0) + context / 128


class VirtualVerifier:
    vocab_size, shape_reason = 100, "as scripted"

    def __init__(self, world: World, shape: str = "tree", context: int = 4096) -> None:
        self.world, self.shape, self.context = world, shape, context
        self.caches: dict[int, list[int]] = {}
        self.parents: list[list[int]] = []
        self.prefilled: list[int] = []
        self.fails = False

    def open_session(self) -> int:
        self.caches[len(self.prefilled)] = []
        return len(self.prefilled)

    def close_session(self, session):
        del self.caches[session]

    def prefill(self, session, tokens, stopped):
        self.world.now_ns += round(1e6 * self.world.pace * len(tokens))
        self.caches[session] += tokens
        self.prefilled.append(len(tokens))
        return len(tokens)

    def _slower(self) -> float:
        return VERIFIER_SLOWDOWN if self.world.load == "drafter" else 1.0

    def verify(self, requests):
        (request,) = requests
        if self.fails:
            raise UnitFailed("no forward today")
        cache = self.caches[request.session]
        self.parents.append([row.parent for row in request.rows])
        ms = forward_ms(len(request.rows), len(cache)) * self._slower()
        span = self.world.step("verifier", len(request.rows), ms)
        cache += [request.rows[0].token, request.rows[-1].token]
        return [Verdict(0, (1,), (1, 2), (0.0, 0.0), *span)]

    def run(self, request, stopped):
        cache = self.caches[request.session]
        ms = (15 + len(cache) / 128) * self._slower()
        for index in range(request.limit):
            late = {0: 0.6, request.limit - 1: -0.6}  # the next forward is under way by then
            span = self.world.step("verifier", 1, ms * (1 + late.get(index, 0)))
            cache.append(1)
            yield Verdict(0, (), (1,), (0.0,), *span, more=index < request.limit - 1)

    def truncate(self, session, length):
        assert self.shape != "plain", "rolling back costs a prefill there"
        assert length < len(self.caches[session])
        del self.caches[session][length:]

    def close(self):
        pass


class VirtualDrafter:
    name = runtime_name = "virtual"

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: set[int] = set()
        self.steps_left: int | None = None
        self.known: set[int] = set()

    def open_session(self):
        self.sessions.add(7)
        return 7

    def close_session(self, session):
        self.sessions.remove(session)

    def prefill(self, session, tokens, stopped):
        return len(tokens)

    def draft(self, request):
        if self.steps_left == 0:
            raise UnitFailed("no step today")
        if self.steps_left is not None:
            self.steps_left -= 1
        self.known -= set(request.dropped)
        assert not self.known, "nodes that nobody needs are not kept"
        self.known = {row.node for row in request.rows} - {0}
        slower = DRAFTER_SLOWDOWN if self.world.load == "verifier" else 1.0
        rows = len(request.rows)
        return DraftResult(0, (), *self.world.step("drafter", rows, (5 + rows / 4) * slower))

    def truncate(self, session, length):
        pass

    def close(self):
        pass


class Bed:
    """Both units on real workers."""

    def __init__(self, shape: str = "tree", drafter: bool = True, context: int = 4096) -> None:
        self.world = World()
        self.verifier = VirtualVerifier(self.world, shape, context)
        self.drafter = VirtualDrafter(self.world)
        self.workers = [UnitWorker("verifier", lambda: self.verifier)]
        if drafter:
            self.workers.append(UnitWorker("drafter", lambda: self.drafter))

    def calibrate(self, **more):
        verifier, drafter = (*self.workers, None)[:2]
        return calibrate(
            verifier,
            drafter,
            DRAFTER_ROWS if drafter else (),
            clock=lambda: self.world.now_ns / 1e9,
            busy=self.world.busy,
            **more,
        )
