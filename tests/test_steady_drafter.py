"""A thousand steps of a drafter on a Mac's runtime: nothing grows, no bound input is replaced."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ondevice import drafter as drafter_module
from ondevice.coreml.compiled import compiled_model
from ondevice.coreml.package import Package
from ondevice.coreml.pyobjc import PyObjCRuntime
from ondevice.coreml.runtime import Array
from ondevice.drafter import CoreMLDrafter
from ondevice.records import DraftRow, NodeToken
from ondevice.sampling import Law, SamplingParams
from ondevice.units import DraftRequest

STEPS, MOST_GROWTH_BYTES = 1000, 64 * 1024
WARM_UP = 30
"""Steps until every function has been used and the text fills its window."""


@dataclass
class Watched:
    """The runtime under a drafter; replaced: inputs that were not the array they had been."""

    runtime: PyObjCRuntime
    replaced: set[str] = field(default_factory=set)
    known: dict[tuple[str, str], int] = field(default_factory=dict)
    settled: bool = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.runtime, name)

    def predict(
        self, function: str, inputs: Mapping[str, Array], out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        for name, array in inputs.items():
            before = self.known.setdefault((function, name), id(array))
            if self.settled and before != id(array):
                self.replaced.add(name)
            self.known[function, name] = id(array)
        return self.runtime.predict(function, inputs, out)


def steps(drafter: CoreMLDrafter) -> Iterator[None]:
    """An answer that goes on for ever: 1 to 5 rows a step, a token or two committed each time."""
    session, rng = drafter.open_session(), np.random.default_rng(0)
    drafter.prefill(session, rng.integers(4, 200, 400).tolist(), lambda: False)
    law, node = Law(SamplingParams(), 264, 400), 1
    dropped: tuple[int, ...] = ()
    while True:
        committed = tuple(NodeToken(0, int(rng.integers(4, 200))) for _ in range(1 + node % 2))
        rows = [DraftRow(0, ())]
        for count in range(node % 5):
            rows.append(DraftRow(node + count, (NodeToken(node + count, 5 + count),)))
        request = DraftRequest(session, node, tuple(rows), committed, dropped, 3, "coupled", law)
        drafter.draft(request)
        dropped = tuple(row.node for row in rows[1:])
        node += 5
        yield


@pytest.fixture
def watched(mac, tiny_pair) -> Watched:
    path = tiny_pair / "drafter" / "drafter.mlpackage"
    return Watched(PyObjCRuntime(Package.open(path), compiled_model(path)))


@pytest.fixture
def drafter(watched, tiny_pair) -> Iterator[CoreMLDrafter]:
    folders = tiny_pair / "drafter", tiny_pair / "verifier"
    opened = CoreMLDrafter.open(*folders, lambda path: watched)
    yield opened
    opened.close()


def grown_bytes(drafter: CoreMLDrafter, watched: Watched, count: int = STEPS) -> int:
    """By the product, over `count` steps after the first ones; the stand-in's own is left out."""
    endless = steps(drafter)
    for _ in range(WARM_UP):
        next(endless)
    watched.settled = True
    mine = [tracemalloc.Filter(True, "*/ondevice/*"), tracemalloc.Filter(False, "*/tests/*")]
    tracemalloc.start()
    try:
        for _ in range(20):
            next(endless)
        gc.collect()  # also empties the interpreter's own lists of tuples to use again
        before = tracemalloc.take_snapshot().filter_traces(mine)
        for _ in range(count):
            next(endless)
        gc.collect()
        after = tracemalloc.take_snapshot().filter_traces(mine)
    finally:
        tracemalloc.stop()
    lines = after.compare_to(before, "lineno")
    for each in lines[:5]:
        print(each)
    return sum(each.size_diff for each in lines)


def test_a_thousand_steps_allocate_nothing_that_stays_and_keep_their_inputs(mac, drafter, watched):
    provider = mac.module("CoreML").MLDictionaryFeatureProvider
    endless = steps(drafter)
    for _ in range(WARM_UP):
        next(endless)
    made = provider.made
    for _ in range(WARM_UP):
        next(endless)
    assert provider.made == made  # bound once
    grown = grown_bytes(drafter, watched)
    print(f"grew by {grown} bytes in {STEPS} steps")
    assert grown < MOST_GROWTH_BYTES
    assert watched.replaced == set()


def replacing(real: Callable[..., None]) -> Callable[..., None]:
    def fill(function: drafter_module._Function, *args: object) -> None:
        function._own["mask"] = function._runtime.buffer(
            function._signature.inputs["mask"]
        )  # a fresh one for every step
        real(function, *args)

    return fill


def test_an_input_that_is_replaced_while_bound_is_noticed(drafter, watched, monkeypatch):
    monkeypatch.setattr(drafter_module._Function, "fill", replacing(drafter_module._Function.fill))
    grown_bytes(drafter, watched, 20)
    assert watched.replaced == {"mask"}


def test_memory_that_is_kept_every_step_is_noticed(drafter, watched, monkeypatch):
    """Kept by a function that is compiled as a file of the product: only those count."""
    source = "kept = []\ndef keep():\n    kept.append(bytearray(400))\n"
    planted: dict[str, Callable[[], None]] = {}
    exec(compile(source, str(Path("x/ondevice/planted.py")), "exec"), planted)
    real = drafter_module._Function.fill

    def fill(function: drafter_module._Function, *args: object) -> None:
        planted["keep"]()
        real(function, *args)

    monkeypatch.setattr(drafter_module._Function, "fill", fill)
    assert grown_bytes(drafter, watched, 200) > MOST_GROWTH_BYTES
