"""Runs a Core ML program anywhere: the very same .mlpackage, its MIL executed in numpy.

`Emulator` is a CoreMLRuntime. Two precisions:
- "fp32": weights as the package stores them, everything computed in float32. Inputs and outputs
  that the program declares fp16 are float32 (float16 inputs are widened).
- "fp16": every op accumulates in float32 and its output is rounded to half precision, with
  overflow to infinity; inputs and outputs are float16.

A program is compiled once, at open, into a list of bound numpy calls: constants are evaluated then,
half-precision weights are widened then (per call: 27 ms for 16,384 x 576), one copy for all
functions that share them. An op that is not known is refused then, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from ondevice.coreml.compiler import CompiledFunction, compile_function
from ondevice.coreml.constants import ConstantPool
from ondevice.coreml.package import Package
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec, check_call, find_function
from ondevice.errors import CallMismatch, OnDeviceError, UnitFailed

Precision = Literal["fp32", "fp16"]

_FLOAT32, _FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


class Emulator:
    """A CoreMLRuntime that needs no Mac; one caller at a time, from any thread."""

    sleeps = False

    def __init__(
        self, package: Package, precision: Precision = "fp32", keep_weights: bool = True
    ) -> None:
        """Compile every function of `package`; raises UnknownOp, ArtifactError.

        keep_weights: hold all weights widened; without it large ones are unpacked at every use,
        slowly, and take no memory.
        """
        if precision not in ("fp32", "fp16"):
            raise ValueError(f"precision {precision!r}, expected 'fp32' or 'fp16'")
        self._path = package.path
        self._precision = precision
        # Half precision is emulated on float32 arrays, so float32 costs nothing to take in, and a
        # float16 cache of the host is widened without loss.
        self._accepted = {_FLOAT32: frozenset({_FLOAT16})} if precision == "fp32" else {}
        pool = ConstantPool(keep_weights)
        with np.errstate(all="ignore"):
            self._compiled: dict[str, CompiledFunction] = {
                name: compile_function(function, pool, half=precision == "fp16")
                for name, function in package.functions.items()
            }
        self._functions = {name: f.signature for name, f in self._compiled.items()}

    @classmethod
    def open(cls, path: Path | str, precision: Precision = "fp32") -> Emulator:
        """Open the .mlpackage at `path`; raises ArtifactError, or UnknownOp naming the op."""
        return cls(Package.open(path), precision)

    @property
    def name(self) -> str:
        """ "emulator-fp32" or "emulator-fp16"."""
        return f"emulator-{self._precision}"

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        """Signature of every function by name."""
        return self._functions

    def buffer(self, spec: TensorSpec) -> Array:
        """Ordinary memory: the ops read any."""
        return spec.empty()

    def new_state(self, function: str) -> dict[str, Array]:
        """Fresh, zero-filled states of `function`, by name, in float32; {} when it has none."""
        return {name: spec.empty() for name, (_, spec) in self._find(function).states.items()}

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
        state: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run `function` once; see CoreMLRuntime.predict. No numpy warning escapes.

        state: what `new_state` gave, to be read and written; a function with states needs one.
        """
        compiled = self._find(function)
        check_call(function, compiled.signature, inputs, out, self._accepted)
        if compiled.states.keys() != (state or {}).keys():
            raise CallMismatch(
                f"{function}: expected the states {', '.join(compiled.states) or 'none'}, got "
                f"{', '.join(state or ()) or 'none'}; make them with new_state"
            )
        try:
            with np.errstate(all="ignore"):
                return compiled.run(inputs, out or {}, state)
        except OnDeviceError:
            raise
        except Exception as error:
            raise UnitFailed(f"the emulator failed in {function}: {error}") from error

    def close(self) -> None:
        """Drop weights and programs; a later `predict` raises UnitFailed."""
        self._compiled = {}

    def _find(self, function: str) -> CompiledFunction:
        closed = f"the emulator of {self._path} is closed; open it again"
        return find_function(function, self._compiled, self._functions, self._path, closed)
