"""How an op of the emulator is written: a rule that turns one MIL op into a numpy kernel.

A rule runs once, when a program is opened: it reads the op's constants, refuses what it does not
implement, and returns a kernel with the names of the parameters to pass to it at run time. Float
values are float32 arrays inside the emulator, whatever the program declares; an integer or a
boolean keeps its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ondevice.coreml.blob import NUMPY_TYPES, Array
from ondevice.coreml.constants import Known
from ondevice.coreml.package import Op, TensorType
from ondevice.errors import UnknownOp

Kernel = Callable[..., Any]
FLOAT_TYPES = frozenset({"fp16", "fp32"})


class Lowered(NamedTuple):
    """A kernel, and the parameters whose arrays it takes, in order."""

    kernel: Kernel
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one op type is lowered.

    moves: the op only moves or selects elements, so a result of half-precision inputs needs no
    rounding to half precision.
    """

    lower: Callable[[Operands], Lowered]
    moves: bool


RULES: dict[str, Rule] = {}


def rule(*op_types: str, moves: bool = False) -> Callable[[Callable[[Operands], Lowered]], Any]:
    """Register the decorated function as the rule of `op_types`."""

    def register(lower: Callable[[Operands], Lowered]) -> Callable[[Operands], Lowered]:
        for op_type in op_types:
            assert op_type not in RULES, op_type
            RULES[op_type] = Rule(lower, moves)
        return lower

    return register


class Operands:
    """What a rule sees of its op: constants by parameter, types of arguments and results.

    known: the op's constant arguments by parameter, float ones widened to float32; argument_types:
    the declared types of all its arguments.
    """

    def __init__(
        self,
        op: Op,
        function: str,
        known: Mapping[str, Known],
        argument_types: Mapping[str, tuple[TensorType, ...]],
    ) -> None:
        self.op = op
        self.function = function
        self._known = known
        self._types = argument_types

    @property
    def result(self) -> TensorType:
        """Declared type of the first output."""
        return self.op.outputs[0].type

    def type(self, parameter: str) -> TensorType:
        """Declared type of a parameter's first argument."""
        return self._types[parameter][0]

    def has(self, parameter: str) -> bool:
        """Whether the op gives the parameter."""
        return bool(self.op.inputs.get(parameter))

    def is_constant(self, *parameters: str) -> bool:
        """Whether every one of the parameters that is given is known before the run."""
        return all(p in self._known for p in parameters if self.has(p))

    def array(self, parameter: str) -> Array:
        """A constant array; refuses the op when the value is computed at run time."""
        value = self._constant(parameter)
        if isinstance(value, str):
            raise self.refuse(f"a text as {parameter}")
        return value

    def at_use(self, parameter: str) -> Callable[[], Array]:
        """A constant array as a function to be called when it is needed: it may be large."""
        known = self._known.get(parameter)
        if known is None or known.kept:
            value = self.array(parameter)
            return lambda: value

        def look() -> Array:
            value = known.value
            assert not isinstance(value, str)
            return value

        return look

    def text(self, parameter: str, default: str) -> str:
        """A constant string, or `default` when the op does not give it."""
        return str(self._constant(parameter)) if self.has(parameter) else default

    def integer(self, parameter: str, default: int) -> int:
        """A constant scalar as int, or `default`."""
        return int(self.array(parameter).item()) if self.has(parameter) else default

    def integers(self, parameter: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A constant vector as ints, or `default`."""
        if not self.has(parameter):
            return default
        return tuple(int(i) for i in self.array(parameter).reshape(-1))

    def flag(self, parameter: str, default: bool) -> bool:
        """A constant boolean, or `default`."""
        return bool(self.array(parameter).item()) if self.has(parameter) else default

    def number(self, parameter: str, default: float) -> np.float32:
        """A constant scalar as float32, or `default`."""
        return np.float32(self.array(parameter).item() if self.has(parameter) else default)

    def refuse(self, what: str) -> UnknownOp:
        """The error for an op that is known, with `what` that is not."""
        return UnknownOp(
            f"the emulator's {self.op.type} does not know {what} "
            f"(op {self.op.name} of function {self.function})"
        )

    def require_float(self, parameter: str) -> None:
        """Refuse the op unless the parameter is a float tensor."""
        if self.type(parameter).dtype not in FLOAT_TYPES:
            raise self.refuse(f"{self.type(parameter).dtype} as {parameter}")

    def result_dtype(self) -> np.dtype[Any]:
        """Dtype of the emulator's array for the first output."""
        return array_dtype(self.result.dtype)

    def _constant(self, parameter: str) -> Array | str:
        try:
            return self._known[parameter].value
        except KeyError:
            state = "computed at run time" if self.has(parameter) else "left out"
            raise self.refuse(f"a {parameter} that is {state}") from None


def array_dtype(mil: str) -> np.dtype[Any]:
    """Dtype of the emulator's arrays for a MIL element type: float32 for both float types."""
    return np.dtype(np.float32) if mil in FLOAT_TYPES else NUMPY_TYPES[mil]
