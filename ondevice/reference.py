"""What the emulator gives for a drafter's functions: the inputs are those of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.runtime import Array, CoreMLRuntime, FunctionSignature, TensorSpec
from ondevice.drafter import CoreMLDrafter
from ondevice.drafterfolder import Functions
from ondevice.slots import tree_room


@dataclass(frozen=True, slots=True)
class Sample:
    """One call and what the emulator made of it."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]


Samples = Mapping[str, list[Sample]]

PASSES = 2
"""Calls of each function that are compared."""


class _Recorder:
    """A CoreMLRuntime that keeps the last calls of each function."""

    sleeps = False

    def __init__(self, inner: CoreMLRuntime) -> None:
        self._inner, self.name = inner, inner.name
        self.samples: dict[str, list[Sample]] = {}

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        return self._inner.functions

    def buffer(self, spec: TensorSpec) -> Array:
        return self._inner.buffer(spec)

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        outputs = self._inner.predict(function, inputs, out)
        kept = self.samples.setdefault(function, [])
        kept.append(Sample(*({key: a.copy() for key, a in s.items()} for s in (inputs, outputs))))
        del kept[:-PASSES]
        return outputs

    def close(self) -> None:
        self._inner.close()


def reference(folder: Path, verifier_folder: Path, functions: Functions) -> Samples:
    """Inputs as a session makes them, for every function, and the emulator's outputs.

    The same ones every time: a text of random tokens, as long as each context holds, read in steps
    that fill each function's rows.
    """
    recorders: list[_Recorder] = []

    def record(path: Path) -> CoreMLRuntime:
        recorders.append(_Recorder(Emulator.open(path, "fp32")))
        return recorders[0]

    drafter = CoreMLDrafter.open(folder, verifier_folder, record, functions)
    rng = np.random.default_rng(0)
    held = 0
    session = drafter.open_session()
    for context in sorted(functions.context_sizes):
        counts = [rows for rows in sorted(functions.row_counts) if rows <= tree_room(context)]
        steps = [1 + held - _held(drafter, session), *counts * PASSES] if held else counts * PASSES
        for rows in steps:
            tokens = rng.integers(0, drafter.manifest.vocab_size, rows).tolist()
            drafter.prefill(session, tokens, lambda: False)
        held = context - tree_room(context)
    drafter.close()
    return recorders[0].samples


def _held(drafter: CoreMLDrafter, session: int) -> int:
    return drafter.prefill(session, (), lambda: False)
