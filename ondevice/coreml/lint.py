"""What a program does that the Neural Engine is known not to like, found without a Mac.

A finding is a warning, not a verdict: where an op runs is decided by Core ML on the machine (its
compute plan). Every rule names the source of its claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ondevice.coreml.blob import storage_bytes
from ondevice.coreml.ops import CONSTEXPR
from ondevice.coreml.package import Constant, Function, Op, Package, TensorType
from ondevice.models.ane import (
    ANE_MAX_AXIS,
    ANE_MAX_RANK,
    ANE_ROW_BYTES,
    ATTENTION_ELEMENTS,
    RELIABLE_STATES,
    RELIABLE_WEIGHT_BYTES,
    SLICE_MAX,
    SMALLEST_EPSILON,
    STATE_MULTIPLE,
)

_HALF_BYTES = 2
_CPU_OPS = frozenset(
    {
        "argsort",
        "gather",
        "gather_along_axis",
        "gather_nd",
        "reduce_argmax",
        "reduce_argmin",
        "topk",
    }
)
# fp type -> integer types of its size, bits of the lowest number, bits of infinity
_EXTREME_BITS = {
    "fp16": (np.uint16, np.int16, 0xFBFF, 0x7C00),
    "fp32": (np.uint32, np.int32, 0xFF7FFFFF, 0x7F800000),
}
_DATALESS = frozenset({"const", *CONSTEXPR})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine generation; the default is that of A13 to A15 class engines, M1 to M3."""

    rank: int = ANE_MAX_RANK
    axis: int = ANE_MAX_AXIS
    row_bytes: int = ANE_ROW_BYTES
    weight_bytes: int = RELIABLE_WEIGHT_BYTES
    states: int = RELIABLE_STATES
    state_multiple: int = STATE_MULTIPLE
    attention_elements: int = ATTENTION_ELEMENTS
    smallest_epsilon: float = SMALLEST_EPSILON


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A rule that `op` of `function` breaks; `op` is "" where the function as a whole does."""

    rule: str
    function: str
    op: str
    message: str
    source: str

    def __str__(self) -> str:
        place = f"{self.function}/{self.op}" if self.op else self.function
        return f"{self.rule}: {place}: {self.message} ({self.source})"


Broken = tuple[str, str]  # name of the op, message


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule, where its claim comes from, and the search for what breaks it."""

    name: str
    source: str
    broken: Callable[[Function, Limits], Iterator[Broken]]


def lint(package: Package, limits: Limits | None = None) -> list[LintFinding]:
    """All findings, by function, then by rule in the order of `RULES`."""
    chosen = limits or Limits()
    return [
        LintFinding(rule.name, name, op, message, rule.source)
        for name, function in sorted(package.functions.items())
        for rule in RULES
        for op, message in rule.broken(function, chosen)
    ]


def _running(function: Function) -> Iterator[Op]:
    return (op for op in function.ops if op.type not in _DATALESS)


def _values(function: Function) -> Iterator[tuple[str, TensorType]]:
    """Name of the op (or input) and type of every value that exists at run time."""
    yield from ((value.name, value.type) for value in function.inputs)
    for op in _running(function):
        yield from ((op.name, value.type) for value in op.outputs)


def _rank(function: Function, limits: Limits) -> Iterator[Broken]:
    for name, type_ in _values(function):
        if len(type_.shape) > limits.rank:
            yield name, f"rank {len(type_.shape)} of {type_}, at most {limits.rank}"


def _axis(function: Function, limits: Limits) -> Iterator[Broken]:
    for name, type_ in _values(function):
        if max(type_.shape, default=0) > limits.axis:
            yield name, f"axis of {max(type_.shape)} in {type_}, at most {limits.axis}"


def _row(function: Function, limits: Limits) -> Iterator[Broken]:
    names = [value.name for value in function.inputs] + list(function.outputs)
    narrow = [
        name
        for name in names
        if (shape := function.types[name].shape)
        and math.prod(shape) > 1
        and shape[-1] * _HALF_BYTES % limits.row_bytes
    ]
    if narrow:
        few = ", ".join(narrow[:4]) + (", ..." if len(narrow) > 4 else "")
        yield (
            "",
            f"{len(narrow)} of {len(names)} inputs and outputs are padded: their last axis is no "
            f"multiple of {limits.row_bytes} bytes ({few})",
        )


def _fp32(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        for value in op.outputs:
            if value.type.dtype in ("fp32", "fp64"):
                yield op.name, f"{op.type} computes {value.type}; the engine computes in fp16 only"


def _cpu_op(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        if op.type in _CPU_OPS:
            yield op.name, f"{op.type} runs on the CPU"


def _integer(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        if op.type not in _CPU_OPS and "int" in op.outputs[0].type.dtype:
            yield op.name, f"{op.type} computes {op.outputs[0].type}; integers run on the CPU"


def _infinity(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in function.ops:
        for arguments in op.inputs.values():
            for argument in arguments:
                if isinstance(argument, Constant) and _is_infinite(argument):
                    yield (
                        op.name,
                        "a constant is -inf, inf, NaN or the lowest number; mask with -1e4",
                    )


def _is_infinite(constant: Constant) -> bool:
    """Whether any element is infinite, NaN or the lowest finite number.

    Read as integers, those are the largest bit patterns of either sign. Six functions over 137 MB
    are linted in 0.3 s so, in 2.2 s with half-precision comparisons.
    """
    patterns = _EXTREME_BITS.get(constant.type.dtype)
    if patterns is None or 0 in constant.type.shape:
        return False
    value = constant.read()
    assert not isinstance(value, str)
    unsigned, signed, lowest, infinity = patterns
    bits = value.reshape(-1)
    return bool(bits.view(unsigned).max() >= lowest or bits.view(signed).max() >= infinity)


def _dynamic(function: Function, limits: Limits) -> Iterator[Broken]:
    for name, type_ in _values(function):
        if -1 in type_.shape:
            yield name, f"dynamic shape {type_}"


def _state_count(function: Function, limits: Limits) -> Iterator[Broken]:
    states = [value.name for value in function.inputs if value.is_state]
    if len(states) > limits.states:
        yield "", f"{len(states)} states ({', '.join(states)}), at most {limits.states}"


def _state_shape(function: Function, limits: Limits) -> Iterator[Broken]:
    for value in function.inputs:
        if value.is_state and any(n % limits.state_multiple for n in value.type.shape[-2:]):
            yield (
                value.name,
                f"last axes of state {value.type} are no multiples of {limits.state_multiple}",
            )


def _weights(function: Function, limits: Limits) -> Iterator[Broken]:
    blobs = {
        argument.blob.offset: storage_bytes(argument.type.dtype, argument.type.shape)
        for op in function.ops
        for arguments in op.inputs.values()
        for argument in arguments
        if isinstance(argument, Constant) and argument.blob is not None
    }
    total = sum(blobs.values())
    if total > limits.weight_bytes:
        yield "", f"{total} bytes of weights, reliable up to {limits.weight_bytes}"


def _last_axis_slice(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        if op.type == "split":
            rank = len(op.outputs[0].type.shape)
            axis = _constant_ints(function, op, "axis")
            cut = axis is not None and axis[0] % rank == rank - 1 and len(op.outputs) > 1
        elif op.type in ("slice_by_index", "slice_by_size"):
            begin = _constant_ints(function, op, "begin")
            masked = _constant_ints(function, op, "begin_mask")
            cut = begin is None or (begin[-1] != 0 and not (masked and masked[-1]))
        else:
            continue
        if cut:
            yield (
                op.name,
                (f"{op.type} cuts the last axis after its start: |x| > {SLICE_MAX} saturates"),
            )


def _constant_ints(function: Function, op: Op, parameter: str) -> list[int] | None:
    """A constant integer parameter; None when it is absent or computed at run time."""
    for argument in op.inputs.get(parameter, ()):
        constant = function.constants.get(argument) if isinstance(argument, str) else argument
        if constant is not None:
            value = constant.read()
            assert not isinstance(value, str)
            return [int(i) for i in value.reshape(-1)]
    return None


def _attention(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        if op.type == "scaled_dot_product_attention":
            query = op.inputs["query"][0]
            assert isinstance(query, str)
            size = math.prod(function.types[query].shape)
            if size < limits.attention_elements:
                yield op.name, f"attention op over {size} elements, below 2M it runs on the CPU"


def _blockwise_int4(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in function.ops:
        if op.type == "constexpr_blockwise_shift_scale":
            data, scale = op.inputs["data"][0], op.inputs["scale"][0]
            if isinstance(data, Constant) and isinstance(scale, Constant):
                blocks = math.prod(scale.type.shape)
                if data.type.dtype.endswith("int4") and blocks > data.type.shape[0]:
                    yield op.name, "int4 weights with a scale per block; use a palette instead"


def _epsilon(function: Function, limits: Limits) -> Iterator[Broken]:
    for op in _running(function):
        for argument in op.inputs.get("epsilon", ()):
            constant = function.constants.get(argument) if isinstance(argument, str) else argument
            if constant is None:
                continue
            value = constant.read()
            assert not isinstance(value, str)
            if float(value) < limits.smallest_epsilon:
                yield op.name, f"epsilon {float(value):.3g}, in fp16 keep it 1e-6 or more"


RANK = Rule("rank", "Apple neural_engine_rules; ANEForge op-quirks", _rank)
AXIS = Rule("axis", "coreai-model-zoo ane-silicon-reference; ANEMLL llama_model.py", _axis)
ROW = Rule("row-bytes", "Apple neural_engine_rules: last axis of 64 bytes", _row)
FP32 = Rule("fp32", "Apple neural_engine_rules: fp16 compute only", _fp32)
CPU_OP = Rule("cpu-op", "ANEForge numeric-cliffs; rf-detr PR 1495", _cpu_op)
INTEGER = Rule("integer-op", "Apple neural_engine_rules: fp16, int8 and int16 tensors", _integer)
INFINITY = Rule("infinity", "coremltools PR 2669; Apple neural_engine_rules", _infinity)
DYNAMIC = Rule("dynamic-shape", "Apple neural_engine_rules; coremltools 2600", _dynamic)
STATE_COUNT = Rule("state-count", "CoreML-LLM MLSTATE_PATTERN: 3 or more fail (0x1d)", _state_count)
STATE_SHAPE = Rule("state-shape", "coremltools 2631", _state_shape)
WEIGHTS = Rule("weight-bytes", "CoreML-LLM DECODE_STATE_LAYOUTS; ANEMLL chunks", _weights)
SLICE = Rule("last-axis-slice", "ANEForge numeric-cliffs, M1 and M2", _last_axis_slice)
ATTENTION = Rule("attention-op", "Vx issue 437", _attention)
INT4_BLOCKS = Rule("int4-blocks", "coremltools guide opt-quantization-perf", _blockwise_int4)
EPSILON = Rule("epsilon", "fp16 storage: 1e-12 becomes 0", _epsilon)

RULES = (
    RANK,
    AXIS,
    ROW,
    FP32,
    CPU_OP,
    INTEGER,
    INFINITY,
    DYNAMIC,
    STATE_COUNT,
    STATE_SHAPE,
    WEIGHTS,
    SLICE,
    ATTENTION,
    INT4_BLOCKS,
    EPSILON,
)
