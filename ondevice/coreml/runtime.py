"""One protocol for everything that can run a Core ML function: emulator, PyObjC, a worker process.

Buffers belong to the caller. A runtime reads the input arrays during `predict`, never later, and
never writes to them; arrays of its own making (`buffer`) it may keep bound between calls. Outputs
are arrays of the runtime that hold until its next `predict`, or are written into the caller's `out`
arrays when it gives some.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ondevice.errors import CallMismatch, UnitFailed

Array = np.ndarray[Any, np.dtype[Any]]
Held = TypeVar("Held")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and numpy dtype of a function's input or output, as a caller allocates it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def empty(self) -> Array:
        """A new zero-filled buffer of this shape and dtype."""
        return np.zeros(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """Names, shapes and dtypes of a function's inputs and outputs."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class CoreMLRuntime(Protocol):
    """Runs the functions of one package; one caller at a time."""

    @property
    def name(self) -> str:
        """Short name for reports: "emulator-fp32", "pyobjc", ..."""
        ...

    @property
    def sleeps(self) -> bool:
        """Whether its hardware powers down when idle and takes long to wake (Neural Engine)."""
        ...

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        """Signature of every function by name; the dtypes are those that cost no conversion."""
        ...

    def buffer(self, spec: TensorSpec) -> Array:
        """Zeros that `predict` takes as an input without copying them, where the runtime can."""
        ...

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run `function` once and return its outputs by name.

        inputs: every input of the signature, C order not required. out: buffers for some or all of
        the outputs, returned in place of the runtime's own. Raises CallMismatch for an unknown
        function, a missing or extra tensor, a wrong shape or dtype; UnitFailed when the run itself
        fails.
        """
        ...

    def close(self) -> None:
        """Release what the runtime holds; a later `predict` raises UnitFailed."""
        ...


def find_function(
    function: str, held: Mapping[str, Held], known: Collection[str], path: Path, closed: str
) -> Held:
    """What a runtime holds for `function`; nothing is held once it was closed.

    known: functions of the package at `path`. Raises CallMismatch for any other, and UnitFailed,
    saying `closed`, for one that is held no more.
    """
    if function in held:
        return held[function]
    if function in known:
        raise UnitFailed(closed)
    raise CallMismatch(f"{path} has no function {function}; it has {', '.join(sorted(known))}")


def check_call(
    function: str,
    signature: FunctionSignature,
    inputs: Mapping[str, Array],
    out: Mapping[str, Array] | None,
    accepted: Mapping[np.dtype[Any], frozenset[np.dtype[Any]]] | None = None,
) -> None:
    """Raise CallMismatch unless the call fits the signature.

    accepted: for a signature's dtype, further dtypes that the runtime takes as inputs.
    """
    if inputs.keys() != signature.inputs.keys():
        raise CallMismatch(_difference(function, "input", inputs, signature.inputs))
    for name, spec in signature.inputs.items():
        allowed = (accepted or {}).get(spec.dtype, frozenset())
        _check_tensor(function, "input", name, inputs[name], spec, allowed)
    if out:
        if not out.keys() <= signature.outputs.keys():
            raise CallMismatch(_difference(function, "output", out, signature.outputs))
        for name, array in out.items():
            _check_tensor(function, "output", name, array, signature.outputs[name], frozenset())
            if not array.flags.writeable:
                raise CallMismatch(f"{function}: output buffer {name} is read-only")


def _check_tensor(
    function: str,
    role: str,
    name: str,
    array: Array,
    spec: TensorSpec,
    allowed: frozenset[np.dtype[Any]],
) -> None:
    if not isinstance(array, np.ndarray):
        raise CallMismatch(f"{function}: {role} {name} is no array but a {type(array).__name__}")
    if array.shape != spec.shape:
        raise CallMismatch(
            f"{function}: {role} {name} has shape {array.shape}, expected {spec.shape}"
        )
    if array.dtype != spec.dtype and array.dtype not in allowed:
        raise CallMismatch(
            f"{function}: {role} {name} has dtype {array.dtype}, expected {spec.dtype}"
        )


def _difference(
    function: str, role: str, given: Mapping[str, Array], expected: Mapping[str, TensorSpec]
) -> str:
    parts = []
    if missing := sorted(expected.keys() - given.keys()):
        parts.append(f"missing {', '.join(missing)}")
    if extra := sorted(given.keys() - expected.keys()):
        parts.append(f"unknown {', '.join(extra)}")
    return f"{function}: {role}s do not fit: {'; '.join(parts)}; expected {', '.join(expected)}"
