"""What the units say they hold."""

from __future__ import annotations

import time
from pathlib import Path

from faulty import open_tiny

from ondevice.apps.sides import settle
from ondevice.artifact import DRAFTER_PACKAGE
from ondevice.engine import Engine
from ondevice.session import Options
from ondevice.units import UnitMemory

OPTIONS = Options(max_tokens=24, strategy="pipelined")


def stored_bytes(path: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in path.rglob(pattern))


def test_weights_caches_and_peak_are_those_of_the_units(engine: Engine, tiny_pair: Path) -> None:
    before = engine.memory()
    with engine.session() as session:
        session.generate("One, two, three.", OPTIONS)
        held = engine.memory()
    verifier, drafter = held["verifier"], held["drafter"]
    # Beside its tensors a safetensors file has a header; the embedding is also the head.
    stored = stored_bytes(tiny_pair / "verifier", "*.safetensors")
    assert 0.8 * stored < verifier.weights_bytes <= 2 * stored
    assert verifier.caches_bytes > before["verifier"].caches_bytes == 0
    assert verifier.peak_bytes >= verifier.weights_bytes + verifier.caches_bytes
    assert drafter.weights_bytes == stored_bytes(
        tiny_pair / "drafter" / DRAFTER_PACKAGE, "weight.bin"
    )
    assert drafter.caches_bytes > before["drafter"].caches_bytes == 0
    assert drafter.peak_bytes > 10 * 2**20  # a whole process


def test_caches_are_free_once_their_session_is_closed(engine: Engine) -> None:
    with engine.session() as session:
        session.generate("One, two, three.", OPTIONS)
    settle(engine)
    patience = time.monotonic() + 30
    while any(memory.caches_bytes for memory in engine.memory().values()):
        assert time.monotonic() < patience


def test_a_unit_that_does_not_say_is_left_out(tiny_pair: Path) -> None:
    class Silent:
        name = runtime_name = "silent"

        def open_session(self) -> int:
            return 0

        def close(self) -> None:
            pass

    with open_tiny(tiny_pair, drafter=Silent) as engine:  # type: ignore[arg-type]
        assert engine.memory().keys() == {"verifier"}


def test_scratch_is_what_the_peak_had_besides() -> None:
    assert UnitMemory(10, 5, 22).scratch_bytes == 7
    assert UnitMemory(10, 5, 3).scratch_bytes == 0
