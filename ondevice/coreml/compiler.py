"""Compiles a MIL function into a list of bound numpy calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ondevice.coreml.constants import ConstantPool, Known
from ondevice.coreml.ops import CONSTEXPR, RULES
from ondevice.coreml.ops.base import Kernel, Lowered, Operands, Rule, array_dtype
from ondevice.coreml.package import Argument, Constant, Function, Op, TensorType, Value
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec
from ondevice.errors import RuntimeFailure, UnknownOp

_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)


_EXPONENT, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)


def to_half(x: Array) -> Array:
    """Float32 values rounded to half precision, still float32; overflow gives infinity.

    The same values as `x.astype(float16).astype(float32)`, signed zeros and NaN included, in 1.0 ns
    an element: numpy takes 4.1, and 72 for a subnormal, which softmax is full of. With |x| in
    [2^e, 2^(e+1)), floats around 2^(e+13) lie 2^(e-10) apart, as halves around x do, so adding and
    subtracting that power rounds to a half; below e = -14 halves keep the distance 2^-24, and
    from 2^16 on (x 2^112 overflows) there are none.
    """
    bits = np.asarray(x, _SINGLE).view(np.uint32)
    sign = bits & _SIGN
    grid = (bits & _EXPONENT).view(_SINGLE)
    grid *= np.float32(2**13)
    np.clip(grid, np.float32(0.5), np.float32(2.0**29), out=grid)
    signed = grid.view(np.uint32)
    signed |= sign
    result: Array = x + grid
    result -= grid
    result *= _UP
    result *= _DOWN
    signed = result.view(np.uint32)
    signed |= sign
    return result


class Step(NamedTuple):
    """One bound call: slots read, slots written (one, or one for each result), slots freed."""

    kernel: Kernel
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    single: bool
    frees: tuple[int, ...]
    op: Op


@dataclass(eq=False)
class CompiledFunction:
    """A function ready to run. Slots hold values; those of constants are filled beforehand."""

    signature: FunctionSignature
    template: list[Any]
    steps: list[Step]
    inputs: dict[str, int]
    outputs: dict[str, int]
    states: dict[str, tuple[int, TensorSpec]]
    checked: bool = field(default=False)

    def run(
        self,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array],
        state: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run once on checked inputs. The first run verifies every op's shape and dtype.

        state: the arrays of the function's states, which it reads and writes.
        """
        slots = self.template.copy()
        for name, (slot, _) in self.states.items():
            slots[slot] = (state or {})[name]
        for name, slot in self.inputs.items():
            slots[slot] = self._borrow(inputs[name])
        if self.checked:
            self._execute(slots)
        else:
            self._execute_checked(slots)
            self.checked = True
        return self._collect(slots, out)

    def _borrow(self, array: Array) -> Array:
        """The caller's array as the ops see it; what shares its memory stays read-only."""
        if array.dtype == _HALF:
            return array.astype(_SINGLE)
        view = array.view()
        view.flags.writeable = False
        return view

    def _execute(self, slots: list[Any]) -> None:
        for kernel, reads, writes, single, frees, _op in self.steps:
            result = kernel(*[slots[slot] for slot in reads])
            if single:
                slots[writes[0]] = result
            else:
                for slot, value in zip(writes, result, strict=True):
                    slots[slot] = value
            for slot in frees:
                slots[slot] = None

    def _execute_checked(self, slots: list[Any]) -> None:
        for step in self.steps:
            result = step.kernel(*[slots[slot] for slot in step.reads])
            results = (result,) if step.single else result
            for slot, value, declared in zip(step.writes, results, step.op.outputs, strict=True):
                _verify(step.op, declared, value)
                slots[slot] = value
            for slot in step.frees:
                slots[slot] = None

    def _collect(self, slots: list[Any], out: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs as C-contiguous arrays that share memory with nothing else."""
        outputs: dict[str, Array] = {}
        given_away: set[int] = set()
        for name, slot in self.outputs.items():
            value = slots[slot]
            if name in out:
                np.copyto(out[name], value, casting="same_kind")
                outputs[name] = out[name]
                continue
            spec = self.signature.outputs[name]
            owner = id(value if value.base is None else value.base)
            flags = value.flags
            shared = not flags.writeable or not flags.c_contiguous or owner in given_away
            given_away.add(owner)
            outputs[name] = np.array(value, spec.dtype, order="C", copy=True if shared else None)
        return outputs


def compile_function(
    function: Function, pool: ConstantPool, half: bool, rules: Mapping[str, Rule] = RULES
) -> CompiledFunction:
    """Compile `function`; half: round every op's output to half precision where it is fp16.

    rules: what an op becomes, numpy's by default. Raises UnknownOp for an op, or a use of one, that
    they do not know.
    """
    return _Compiler(function, pool, half, rules).compile()


class _Compiler:
    def __init__(
        self, function: Function, pool: ConstantPool, half: bool, rules: Mapping[str, Rule]
    ) -> None:
        self._function, self._rules = function, rules
        self._pool = pool
        self._half = half
        self._known: dict[str, Known] = {}
        self._slots: dict[str, int] = {}
        self._template: list[Any] = []
        self._steps: list[Step] = []

    def compile(self) -> CompiledFunction:
        function = self._function
        for value in function.inputs:
            self._check_input(value)
        slots = {value.name: self._new_slot(value.name) for value in function.inputs}
        states = {
            value.name: (slots.pop(value.name), TensorSpec(value.type.shape, _SINGLE))
            for value in function.inputs
            if value.is_state
        }
        inputs = slots
        kept = {slot for slot, _ in states.values()}
        for op in function.ops:
            self._add(op)
        outputs = {name: self._slot_of(name) for name in function.outputs}
        return CompiledFunction(
            signature=FunctionSignature(
                {v.name: self._spec(v.type) for v in function.inputs if not v.is_state},
                {name: self._spec(function.types[name]) for name in function.outputs},
            ),
            template=self._template,
            steps=_with_frees(self._steps, kept | {*inputs.values(), *outputs.values()}),
            inputs=inputs,
            outputs=outputs,
            states=states,
        )

    def _check_input(self, value: Value) -> None:
        if -1 in value.type.shape:
            raise UnknownOp(
                f"the emulator does not know dynamic shape {value.type} "
                f"(input {value.name} of function {self._function.name})"
            )

    def _spec(self, type_: TensorType) -> TensorSpec:
        dtype = array_dtype(type_.dtype)
        if type_.dtype == "fp16" and self._half:
            dtype = _HALF
        return TensorSpec(type_.shape, dtype)

    def _add(self, op: Op) -> None:
        if op.type == "const":
            self._known[op.outputs[0].name] = self._argument_value(op.inputs["val"][0])
        elif op.type in CONSTEXPR:
            self._known[op.outputs[0].name] = self._decompress(op)
        elif op.type in self._rules:
            self._bind(op)
        else:
            raise UnknownOp(
                f"the emulator does not know op {op.type} "
                f"({op.name} in function {self._function.name})"
            )
        for output in op.outputs:
            if -1 in output.type.shape:
                raise UnknownOp(
                    f"the emulator does not know a shape set at run time, {output.type} of "
                    f"{op.type} ({op.name} in function {self._function.name})"
                )

    def _argument_value(self, argument: Argument) -> Known:
        if isinstance(argument, Constant):
            return self._pool.of(argument, math.prod(argument.type.shape))
        return self._known[argument]

    def _is_known(self, argument: Argument) -> bool:
        return isinstance(argument, Constant) or argument in self._known

    def _decompress(self, op: Op) -> Known:
        values = {name: self._argument_value(given[0]) for name, given in op.inputs.items()}
        key = (op.type, *sorted((name, value.key) for name, value in values.items()))

        def decompress() -> Array:
            stored = {name: value.stored for name, value in values.items()}
            return CONSTEXPR[op.type](
                {name: value for name, value in stored.items() if not isinstance(value, str)}
            )

        return self._pool.get(key, decompress, math.prod(op.outputs[0].type.shape))

    def _bind(self, op: Op) -> None:
        lowered = self._lower(op)
        arguments = [a for name in lowered.reads for a in op.inputs.get(name, ())]
        kernel = self._rounded(op, lowered.kernel)
        single = len(op.outputs) == 1
        if op.outputs and all(self._is_known(a) for a in arguments):
            result = kernel(*[self._argument_value(a).value for a in arguments])
            for output, value in zip(op.outputs, (result,) if single else result, strict=True):
                self._known[output.name] = Known(partial(np.asarray, value), object())
            return
        reads = tuple(self._slot_of(a) for a in arguments)
        writes = tuple(self._new_slot(output.name) for output in op.outputs)
        self._steps.append(Step(kernel, reads, writes, single, (), op))

    def _lower(self, op: Op) -> Lowered:
        values = {
            name: self._argument_value(given[0])
            for name, given in op.inputs.items()
            if len(given) == 1 and self._is_known(given[0])
        }
        types = {
            name: tuple(
                a.type if isinstance(a, Constant) else self._function.types[a] for a in given
            )
            for name, given in op.inputs.items()
        }
        return self._rules[op.type].lower(Operands(op, self._function.name, values, types))

    def _rounded(self, op: Op, kernel: Kernel) -> Kernel:
        """`kernel` with its fp16 results rounded, where rounding can change them."""
        half = [output.type.dtype == "fp16" for output in op.outputs]
        if not self._half or self._rules[op.type].moves or not any(half):
            return kernel
        if len(half) > 1:  # an op without an output has nothing to round
            raise AssertionError(f"{op.type}: only ops that move elements have several results")
        return lambda *arrays: to_half(kernel(*arrays))

    def _slot_of(self, argument: Argument) -> int:
        if isinstance(argument, str) and argument in self._slots:
            return self._slots[argument]
        slot = self._new_slot(argument if isinstance(argument, str) else None)
        self._template[slot] = self._argument_value(argument).value
        return slot

    def _new_slot(self, name: str | None) -> int:
        self._template.append(None)
        if name is not None:
            self._slots[name] = len(self._template) - 1
        return len(self._template) - 1


def _with_frees(steps: Sequence[Step], kept: set[int]) -> list[Step]:
    """The steps, each freeing the computed values that no later step reads."""
    computed = {slot for step in steps for slot in step.writes} - kept
    result: list[Step] = []
    for step in reversed(steps):
        frees = tuple(sorted(({*step.reads, *step.writes}) & computed))
        computed.difference_update(frees)
        result.append(step._replace(frees=frees))
    return result[::-1]


def _verify(op: Op, declared: Value, value: Array) -> None:
    shape, dtype = np.shape(value), np.asarray(value).dtype
    if shape != declared.type.shape or dtype != array_dtype(declared.type.dtype):
        raise RuntimeFailure(
            f"the emulator's {op.type} gave {dtype}{list(shape)} for {declared.name}, "
            f"declared {declared.type}"
        )
