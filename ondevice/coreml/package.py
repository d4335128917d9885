"""An .mlpackage as data: functions, typed ops and constants, read without macOS.

    NAME.mlpackage/
      Manifest.json                                  which item is the model
      Data/com.apple.CoreML/model.mlmodel            protobuf, `Model` of coremltools
      Data/com.apple.CoreML/weights/weight.bin       blobs (ondevice.coreml.blob)

`Package.open` checks all that it can without running anything: a truncated or foreign package is
one ArtifactError, before any work has been done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ondevice.artifact import file_sha256
from ondevice.coreml.blob import Array, BlobFile
from ondevice.errors import ArtifactError

MANIFEST = "Manifest.json"
_SMALL_ELEMENTS = 64  # constants up to this many elements are written out in the op listing


@dataclass(frozen=True, slots=True)
class TensorType:
    """MIL element type ("fp16", "int32", "string", ...) and shape; -1 is a dynamic dimension."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Blob:
    """A constant's place in a weight file."""

    file: BlobFile
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A constant tensor or string, either immediate or in the weight file (then `blob` is set)."""

    type: TensorType
    immediate: Array | str | None = None
    blob: Blob | None = None

    def read(self) -> Array | str:
        """Its value; elements under a byte are widened to a byte. Not to be written to."""
        if self.blob is not None:
            return self.blob.file.read(self.blob.offset, self.type.dtype, self.type.shape)
        assert self.immediate is not None
        return self.immediate


@dataclass(frozen=True, slots=True)
class Value:
    """A named value: a function's input, or one output of an op."""

    name: str
    type: TensorType
    is_state: bool = False


Argument = str | Constant


@dataclass(frozen=True, slots=True)
class Op:
    """One MIL operation; a parameter may have several arguments (`concat.values`).

    `const` and the iOS16 constexpr ops keep their values in attributes; they are inputs here.
    """

    type: str
    name: str
    inputs: Mapping[str, tuple[Argument, ...]]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Function:
    """A static function: inputs, ops in order of execution, names of the outputs."""

    name: str
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Type of every value by name."""
        values = [*self.inputs, *(value for op in self.ops for value in op.outputs)]
        return {value.name: value.type for value in values}

    @cached_property
    def constants(self) -> dict[str, Constant]:
        """Values of the `const` ops by name."""
        found: dict[str, Constant] = {}
        for op in self.ops:
            if op.type == "const":
                value = op.inputs["val"][0]
                assert isinstance(value, Constant)
                found[op.outputs[0].name] = value
        return found


@dataclass(frozen=True)
class Package:
    """A parsed .mlpackage."""

    path: Path
    specification_version: int
    functions: Mapping[str, Function]
    default_function: str

    @classmethod
    def open(cls, path: Path | str) -> Package:
        """Read the package at `path`; raises ArtifactError when it is not whole or not MIL."""
        from ondevice.coreml.milproto import parse  # brings protobuf

        path = Path(path)
        return parse(path, model_file(path))


def model_file(path: Path) -> Path:
    """The protobuf file that the manifest of the package at `path` names as its root, inside it."""
    manifest = path / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        item = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
        model = path / "Data" / str(item)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__} {error}"
        raise ArtifactError(
            f"{path} is no Core ML package: {MANIFEST} cannot be read ({reason}); "
            "expected an .mlpackage folder, convert the model again"
        ) from error
    if not model.resolve().is_relative_to(path.resolve()):
        raise ArtifactError(
            f"{path} has its model outside of itself, at {item}; convert the model again"
        )
    if not model.is_file():
        raise ArtifactError(f"{path} has no {item}, named by its manifest; convert the model again")
    return model


def weights_file(path: Path) -> Path:
    """Where the package at `path` keeps its blobs (absent when every constant is immediate)."""
    return model_file(path).parent / "weights" / "weight.bin"


def weights_digest(path: Path) -> str:
    """sha256 of weight.bin in the package at `path`; that of no bytes when it has none."""
    weights = weights_file(Path(path))
    return file_sha256(weights) if weights.is_file() else hashlib.sha256().hexdigest()


def ops_digest(package: Package) -> str:
    """sha256 of `listing`: equal for identical builds, whose model.mlmodel bytes may differ."""
    digest = hashlib.sha256()
    for line in listing(package):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def listing(package: Package) -> Iterator[str]:
    """All functions as canonical text, one op a line.

    Inner values are numbered in order of definition, because coremltools names them from a counter
    of the process; small constants are written where they are used; a constant in the weight file
    is written as its type and its rank among the package's blobs.
    """
    ranks = _blob_ranks(package)
    for name in sorted(package.functions):
        function = package.functions[name]
        yield f"function {name}"
        labels = {value.name: value.name for value in function.inputs}
        yield from (f"  input {v.name} {v.type} state={v.is_state}" for v in function.inputs)
        for op in function.ops:
            if op.type != "const":
                yield "  " + _line(op, function, labels, ranks)
        for output in function.outputs:
            source = labels.get(output) or _constant_text(function.constants[output], ranks)
            yield f"  output {output} = {source}"


def _line(op: Op, function: Function, labels: dict[str, str], ranks: dict[int, int]) -> str:
    arguments = []
    for parameter in sorted(op.inputs):
        texts = []
        for argument in op.inputs[parameter]:
            constant = function.constants.get(argument) if isinstance(argument, str) else argument
            if constant is not None:
                texts.append(_constant_text(constant, ranks))
            else:
                assert isinstance(argument, str)
                texts.append(labels[argument])
        arguments.append(f"{parameter}=({', '.join(texts)})")
    for value in op.outputs:
        labels[value.name] = f"%{len(labels)}"
    results = ", ".join(f"{labels[value.name]} {value.type}" for value in op.outputs)
    return f"{results} = {op.type}({', '.join(arguments)})"


def _constant_text(constant: Constant, ranks: dict[int, int]) -> str:
    if constant.blob is not None:
        return f"{constant.type} blob {ranks[constant.blob.offset]}"
    value = constant.read()
    if isinstance(value, str):
        return repr(value)
    if value.size > _SMALL_ELEMENTS:
        return f"{constant.type} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return f"{constant.type} {value.tolist()!r}"


def _blob_ranks(package: Package) -> dict[int, int]:
    offsets = {
        argument.blob.offset
        for function in package.functions.values()
        for op in function.ops
        for arguments in op.inputs.values()
        for argument in arguments
        if isinstance(argument, Constant) and argument.blob is not None
    }
    return {offset: rank for rank, offset in enumerate(sorted(offsets))}
