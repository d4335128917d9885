"""Runs a Core ML package on a Mac through coremltools, where PyObjC's runtime cannot.

Only ever in a process of its own (ondevice.remote): coremltools keeps the interpreter's lock during
a prediction, and Core ML may drop its reference to an input a second after the call without that
lock, which corrupts the heap (coremltools pull requests 2827, 2829). Hence the rules here: inputs
are float32 or int32, never float16, which coremltools would replace by a fresh array in every call;
none is ever freed, only used again once nobody else, Core ML included, refers to it.

Core ML converts every float32 input to the model's halves in every call, so whoever has large
inputs is better off elsewhere: see MOST_CACHE_BYTES.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.coreml.apple import one_line
from ondevice.coreml.compiled import predicts
from ondevice.coreml.package import Package
from ondevice.coreml.pyobjc import MAIN, signature_of
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec, check_call, find_function
from ondevice.errors import RuntimeUnavailable, UnitFailed

MOST_CACHE_BYTES = 16_000_000
"""Keys and values of a drafter, as the package stores them: more take longer to convert than to
draft with (16 MB of halves at 10 GB/s: 1.6 ms each way)."""

_FLOAT32 = np.dtype(np.float32)
_for_ever: dict[int, Array] = {}
_UNUSED_REFERENCES = 3
"""The dictionary's, the loop variable's and the counting call's."""


class CoreMLToolsRuntime:
    """A CoreMLRuntime; one thread opens, uses and closes it."""

    name, sleeps = "coremltools", True

    def __init__(
        self, package: Package, compiled: Path, functions: Collection[str] | None = None
    ) -> None:
        """Load `functions` of a package, all by default, from its compiled form (`.mlmodelc`).

        Raises RuntimeUnavailable where coremltools cannot predict, UnitFailed when Core ML refuses.
        """
        self._path = package.path
        wanted = package.functions if functions is None else functions
        self._functions = {name: _widened(signature_of(package.functions[name])) for name in wanted}
        self._models = {name: _load(compiled, name) for name in wanted}
        self._staging: dict[tuple[str, str], Array] = {}

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        """Signature of every loaded function; what the package has in halves is float32."""
        return self._functions

    def buffer(self, spec: TensorSpec) -> Array:
        """Zeros that are never freed: Core ML may still refer to them when nobody else does."""
        for array in _for_ever.values():
            fits = array.shape == spec.shape and array.dtype == spec.dtype
            if fits and sys.getrefcount(array) == _UNUSED_REFERENCES:
                array[...] = 0
                return array
        array = spec.empty()
        _for_ever[id(array)] = array
        return array

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run `function` once; see CoreMLRuntime.predict. Copies inputs but those of `buffer`."""
        closed = f"Core ML's models of {self._path} are closed; open them again"
        model = find_function(function, self._models, self._functions, self._path, closed)
        signature = self._functions[function]
        check_call(function, signature, inputs, out)
        # A new dictionary: coremltools puts its own arrays into the one that it is given.
        given = {name: self._lasting(function, name, array) for name, array in inputs.items()}
        try:
            found = model.predict(given)
        except Exception as error:
            raise UnitFailed(f"Core ML failed in {function}: {one_line(error)}") from error
        return _collected(function, signature, found, out or {})

    def close(self) -> None:
        """Release the models; a later `predict` raises UnitFailed."""
        self._models = {}

    def _lasting(self, function: str, name: str, array: Array) -> Array:
        if id(array) in _for_ever:
            return array
        key = function, name
        if key not in self._staging:
            self._staging[key] = self.buffer(self._functions[function].inputs[name])
        np.copyto(self._staging[key], array)
        return self._staging[key]


def _widened(signature: FunctionSignature) -> FunctionSignature:
    def widen(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(spec.shape, _FLOAT32) if spec.dtype == np.float16 else spec
            for name, spec in specs.items()
        }

    return FunctionSignature(widen(signature.inputs), widen(signature.outputs))


def _load(compiled: Path, function: str) -> Any:
    import coremltools as ct

    try:
        return ct.models.CompiledMLModel(
            str(compiled),
            ct.ComputeUnit.CPU_AND_NE,
            None if function == MAIN else function,
        )
    except Exception as error:
        kind = UnitFailed if predicts() else RuntimeUnavailable
        raise kind(f"coremltools does not load {function}: {one_line(error)}") from error


def _collected(
    function: str,
    signature: FunctionSignature,
    found: Mapping[str, Any],
    out: Mapping[str, Array],
) -> dict[str, Array]:
    outputs: dict[str, Array] = {}
    for name, spec in signature.outputs.items():
        value = found.get(name)
        if not isinstance(value, np.ndarray) or value.shape != spec.shape:
            shape = getattr(value, "shape", type(value).__name__)
            raise UnitFailed(
                f"Core ML gave {shape} for {name} in {function}, expected {spec.shape}"
            )
        outputs[name] = out.get(name, value)
        if name in out:
            np.copyto(out[name], value, casting="same_kind")
    return outputs
