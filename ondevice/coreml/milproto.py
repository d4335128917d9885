"""Protobuf messages of an ML program -> the records of `ondevice.coreml.package`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.coreml.blob import NUMPY_TYPES, BlobFile, unpack
from ondevice.coreml.package import (
    Argument,
    Blob,
    Constant,
    Function,
    Op,
    Package,
    TensorType,
    Value,
    weights_file,
)
from ondevice.errors import ArtifactError

_WEIGHTS = "@model_path/weights/weight.bin"  # what coremltools writes, whatever the package's name
_ALIAS = "_ondevice_coremltools_proto"
_MIL_NAMES = {
    "BOOL": "bool",
    "STRING": "string",
    "FLOAT16": "fp16",
    "FLOAT32": "fp32",
    "FLOAT64": "fp64",
}
_IMMEDIATE_FIELDS = {"floats", "ints", "bools", "longInts", "doubles"}


def parse(path: Path, model_path: Path) -> Package:
    """Parse `model_path`, the root model of the package at `path`; raises ArtifactError."""
    from google.protobuf.message import DecodeError

    model = _message_module("Model_pb2").Model()
    try:
        model.ParseFromString(model_path.read_bytes())
    except (OSError, DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(
            f"{model_path} is not a Core ML model ({reason}); convert the model again"
        ) from error
    kind = model.WhichOneof("Type")
    if kind != "mlProgram":
        raise ArtifactError(f"{path} holds {kind or 'nothing'}, expected an ML program (mlProgram)")
    reader = _Reader(path, weights_file(path))
    functions = {
        name: reader.function(name, message)
        for name, message in sorted(model.mlProgram.functions.items())
    }
    default = model.description.defaultFunctionName or "main"
    if default not in functions:
        default = next(iter(functions), default)
    return Package(path, model.specificationVersion, functions, default)


def _message_module(name: str) -> Any:
    """A generated message module of coremltools, without importing coremltools itself.

    Its package module takes 2 to 3 s to import (transformers, sympy) and prints warnings; the
    messages alone take 0.13 s. Both ways give the same classes, from one descriptor pool.
    """
    if "coremltools" in sys.modules:
        return importlib.import_module(f"coremltools.proto.{name}")
    if _ALIAS not in sys.modules:
        spec = importlib.util.find_spec("coremltools")
        if spec is None or spec.origin is None:
            raise ArtifactError("coremltools is not installed; install ondevice's dependencies")
        alias = types.ModuleType(_ALIAS)
        alias.__path__ = [str(Path(spec.origin).parent / "proto")]
        sys.modules[_ALIAS] = alias
    return importlib.import_module(f"{_ALIAS}.{name}")


class _Reader:
    """Translates the messages of one model; its weight file is opened once, on first use."""

    def __init__(self, package: Path, weights: Path) -> None:
        self._package, self._weights_path = package, weights
        numbers = _message_module("MIL_pb2").DataType.DESCRIPTOR.values
        self._names = {v.number: _MIL_NAMES.get(v.name, v.name.lower()) for v in numbers}

    def function(self, name: str, message: Any) -> Function:
        block = message.block_specializations[message.opset]
        function = Function(
            name=name,
            inputs=tuple(self._value(value) for value in message.inputs),
            ops=tuple(self._op(op) for op in block.operations),
            outputs=tuple(block.outputs),
        )
        self._check_names(function)
        return function

    def _check_names(self, function: Function) -> None:
        """Every value is defined once, before it is used; coremltools can save other programs."""
        defined: set[str] = set()
        for value in function.inputs:
            self._define(defined, function, value)
        for op in function.ops:
            for name in (a for given in op.inputs.values() for a in given if isinstance(a, str)):
                self._require(name in defined, function, f"{op.name} uses {name}, not yet defined")
            for value in op.outputs:
                self._define(defined, function, value)
        for name in function.outputs:
            self._require(name in defined, function, f"output {name} is not defined")
        duplicates = len(function.outputs) != len(set(function.outputs))
        self._require(not duplicates, function, f"repeated outputs {', '.join(function.outputs)}")

    def _define(self, defined: set[str], function: Function, value: Value) -> None:
        self._require(value.name not in defined, function, f"{value.name} is defined twice")
        defined.add(value.name)

    def _require(self, condition: bool, function: Function, what: str) -> None:
        if not condition:
            raise ArtifactError(
                f"function {function.name} of {self._package} is inconsistent: {what}; "
                "convert the model again"
            )

    def _op(self, message: Any) -> Op:
        attributes: Mapping[str, Any] = message.attributes
        inputs: dict[str, tuple[Argument, ...]] = {
            parameter: tuple(self._argument(binding) for binding in argument.arguments)
            for parameter, argument in message.inputs.items()
        }
        for parameter, value in attributes.items():
            if parameter != "name":
                inputs[parameter] = (self._constant(value),)
        outputs = tuple(self._value(value) for value in message.outputs)
        name = outputs[0].name if outputs else message.type
        if "name" in attributes:
            name = attributes["name"].immediateValue.tensor.strings.values[0]
        return Op(message.type, name, inputs, outputs)

    def _argument(self, binding: Any) -> Argument:
        if binding.WhichOneof("binding") == "name":
            return str(binding.name)
        return self._constant(binding.value)

    def _value(self, message: Any) -> Value:
        if message.type.WhichOneof("type") == "stateType":
            return Value(message.name, self._type(message.type.stateType.wrappedType), True)
        return Value(message.name, self._type(message.type))

    def _type(self, message: Any) -> TensorType:
        kind = message.WhichOneof("type")
        if kind != "tensorType":
            return TensorType(str(kind), ())
        tensor = message.tensorType
        shape = tuple(
            int(d.constant.size) if d.WhichOneof("dimension") == "constant" else -1
            for d in tensor.dimensions
        )
        return TensorType(self._names[tensor.dataType], shape)

    def _constant(self, message: Any) -> Constant:
        type_ = self._type(message.type)
        if message.WhichOneof("value") == "blobFileValue":
            blob = Blob(self._file(message.blobFileValue.fileName), message.blobFileValue.offset)
            blob.file.locate(blob.offset, type_.dtype, type_.shape)
            return Constant(type_, blob=blob)
        return Constant(type_, immediate=self._immediate(message.immediateValue, type_))

    def _immediate(self, message: Any, type_: TensorType) -> Any:
        field = message.tensor.WhichOneof("value")
        if field == "strings":
            return str(message.tensor.strings.values[0])
        if field == "bytes":
            packed = np.frombuffer(message.tensor.bytes.values, np.uint8)
            return unpack(packed, type_.dtype, type_.shape)
        if field in _IMMEDIATE_FIELDS:
            values = getattr(message.tensor, field).values
            value = np.array(values, NUMPY_TYPES[type_.dtype]).reshape(type_.shape)
            value.flags.writeable = False
            return value
        return f"<{message.WhichOneof('value')}>"

    def _file(self, name: str) -> BlobFile:
        """The package's weight file: the one that `weights_digest` covers, so no other is read."""
        if name != _WEIGHTS:
            raise ArtifactError(
                f"{self._package} keeps a constant in {name!r}, expected {_WEIGHTS!r}; "
                "convert the model again"
            )
        return self._weights

    @cached_property
    def _weights(self) -> BlobFile:
        return BlobFile(self._weights_path)
