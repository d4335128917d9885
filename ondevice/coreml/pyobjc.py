"""Runs a Core ML package on a Mac through PyObjC: inputs are bound once, and not copied.

PyObjC releases the interpreter's lock in every call, so a prediction keeps nobody from working.
Every function of a package is a model of its own to Core ML. Inputs are bound once for each set of
arrays that they come in; a caller that uses `buffer` for them is never copied from.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.coreml.apple import Apple
from ondevice.coreml.devicearray import DeviceArray, copy_out, lent, owner, supported
from ondevice.coreml.package import Function, Package, TensorType
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec, check_call, find_function
from ondevice.errors import CallMismatch, UnitFailed, UnknownOp


class PyObjCRuntime:
    """A CoreMLRuntime on Apple's own; one thread opens, uses and closes it."""

    name, sleeps = "pyobjc", True

    def __init__(
        self, package: Package, compiled: Path, functions: Collection[str] | None = None
    ) -> None:
        """Load `functions` of a package, all by default, from its compiled form (`.mlmodelc`).

        May take minutes the first time: the Neural Engine's compiler runs then. Raises
        RuntimeUnavailable without PyObjC, UnitFailed when Core ML refuses.
        """
        self._apple = apple = Apple()
        self._path = package.path
        wanted = package.functions if functions is None else functions
        self._functions = {name: signature_of(package.functions[name]) for name in wanted}
        self._loaded: dict[str, _Loaded] = {}
        with apple.pool():
            for name, signature in self._functions.items():
                model = load_model(apple, compiled, name)
                self._loaded[name] = _Loaded(apple, name, model, signature)

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        """Signature of every loaded function; half precision stays so."""
        return self._functions

    @property
    def ignored_backings(self) -> int:
        """How often Core ML put an output elsewhere than told to, which costs a copy."""
        return sum(loaded.ignored_backings for loaded in self._loaded.values())

    def buffer(self, spec: TensorSpec) -> Array:
        """Zeros in memory that Core ML binds, an IOSurface where the shape allows it."""
        if not supported(spec.dtype):
            raise CallMismatch(f"Core ML has no arrays of {spec.dtype}")
        with self._apple.pool():
            return np.asarray(DeviceArray(self._apple, spec))

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run `function` once; see CoreMLRuntime.predict."""
        loaded = self._find(function)
        check_call(function, loaded.signature, inputs, out)
        with self._apple.pool():
            loaded.run(inputs)
        return loaded.collect(out or {})

    def close(self) -> None:
        """Release models and buffers; a later `predict` raises UnitFailed."""
        self._loaded = {}

    def _find(self, function: str) -> _Loaded:
        closed = f"Core ML's models of {self._path} are closed; open them again"
        return find_function(function, self._loaded, self._functions, self._path, closed)


class _Binding:
    """A provider over one set of arrays, and what of them must be unlocked or copied to."""

    def __init__(
        self, provider: Any, shared: Mapping[str, DeviceArray], staged: Mapping[str, DeviceArray]
    ) -> None:
        self.provider = provider
        self.staged = {name: np.asarray(array) for name, array in staged.items()}
        self.staging = [array for array in staged.values() if array.on_surface]
        # The caller's own: when it lets go of one, nothing here shall hold its memory.
        self.shared = [weakref.ref(array) for array in shared.values() if array.on_surface]


class _Loaded:
    """One function: its model, its outputs' buffers, and the inputs bound so far."""

    def __init__(self, apple: Apple, name: str, model: Any, signature: FunctionSignature) -> None:
        self.signature = signature
        self.ignored_backings = 0
        self._apple, self._name, self._model = apple, name, model
        self._outputs = {name: DeviceArray(apple, spec) for name, spec in signature.outputs.items()}
        self._views = {name: np.asarray(array) for name, array in self._outputs.items()}
        self._options = apple.core_ml.MLPredictionOptions.alloc().init()
        self._options.setOutputBackings_(
            apple.dictionary({name: each.multi_array for name, each in self._outputs.items()})
        )
        self._staging: dict[str, DeviceArray] = {}
        self._bindings: dict[tuple[int, ...], _Binding] = {}

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Predict on `inputs`; the outputs are in `_views` afterwards."""
        binding = self._bound(inputs)
        for name, staged in binding.staged.items():
            np.copyto(staged, inputs[name])
        surfaces = [*binding.staging, *self._surfaces()]
        surfaces += [array for ref in binding.shared if (array := ref()) is not None]
        what = f"Core ML failed in {self._name}"
        with lent(surfaces), self._apple.explained(what):
            answer = self._model.predictionFromFeatures_options_error_(
                binding.provider, self._options, None
            )
        self._take(self._apple.must(answer, what))

    def collect(self, out: Mapping[str, Array]) -> dict[str, Array]:
        """Every output: in `out` where the caller gave an array, else where Core ML left it."""
        for name, array in out.items():
            np.copyto(array, self._views[name])
        return {**self._views, **out}

    def _take(self, result: Any) -> None:
        for name, array in self._outputs.items():
            value = result.featureValueForName_(name)
            found = None if value is None else value.multiArrayValue()
            if found is None:
                raise UnitFailed(f"Core ML gave no array {name} in {self._name}")
            if found is not array.multi_array:
                self.ignored_backings += 1
                copy_out(found, self.signature.outputs[name], self._views[name])

    def _surfaces(self) -> list[DeviceArray]:
        return [array for array in self._outputs.values() if array.on_surface]

    def _bound(self, inputs: Mapping[str, Array]) -> _Binding:
        owners = {name: owner(inputs[name]) for name in self.signature.inputs}
        key = tuple(id(array) for array in owners.values())
        if key not in self._bindings:
            self._bindings[key] = self._bind(key, owners)
        return self._bindings[key]

    def _bind(self, key: tuple[int, ...], owners: Mapping[str, DeviceArray | None]) -> _Binding:
        shared = {name: array for name, array in owners.items() if array is not None}
        staged = {name: self._staged(name) for name, array in owners.items() if array is None}
        features = {name: array.feature for name, array in {**shared, **staged}.items()}
        what = f"the inputs of {self._name} could not be bound"
        empty = self._apple.core_ml.MLDictionaryFeatureProvider.alloc()
        with self._apple.explained(what):
            answer = empty.initWithDictionary_error_(self._apple.dictionary(features), None)
        binding = _Binding(self._apple.must(answer, what), shared, staged)
        forget = self._bindings.pop
        for array in shared.values():
            weakref.finalize(array, forget, key, None).atexit = False
        return binding

    def _staged(self, name: str) -> DeviceArray:
        if name not in self._staging:
            self._staging[name] = DeviceArray(self._apple, self.signature.inputs[name])
        return self._staging[name]


def load_model(apple: Apple, compiled: Path, function: str) -> Any:
    """One function of a compiled model, for the Neural Engine. Raises UnitFailed."""
    what = f"Core ML does not load {function}"
    with apple.explained(what):
        return apple.must(
            apple.core_ml.MLModel.modelWithContentsOfURL_configuration_error_(
                apple.url(compiled), configuration(apple, function), None
            ),
            what,
        )


def configuration(apple: Apple, function: str) -> Any:
    """An MLModelConfiguration: this function, on the Neural Engine, the CPU for what it cannot."""
    chosen = apple.core_ml.MLModelConfiguration.alloc().init()
    chosen.setComputeUnits_(apple.core_ml.MLComputeUnitsCPUAndNeuralEngine)
    if function != MAIN:
        chosen.setFunctionName_(apple.text(function))
    return chosen


MAIN = "main"
"""The only function of a package that has but one; Core ML takes no name for it before macOS 15."""


def signature_of(function: Function) -> FunctionSignature:
    """Inputs and outputs as Core ML takes them. Raises UnknownOp for states and other types."""
    if any(value.is_state for value in function.inputs):
        raise UnknownOp(f"function {function.name} has Core ML state, which no runtime here keeps")
    return FunctionSignature(
        {value.name: _spec(value.type, value.name) for value in function.inputs},
        {name: _spec(function.types[name], name) for name in function.outputs},
    )


_MIL_TYPES = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}


def _spec(type_: TensorType, name: str) -> TensorSpec:
    if type_.dtype not in _MIL_TYPES or -1 in type_.shape:
        raise UnknownOp(f"{name} is {type_}; Core ML's arrays are fp16, fp32 or int32, and static")
    return TensorSpec(type_.shape, np.dtype(_MIL_TYPES[type_.dtype]))
