"""Writing a Core ML program op by op: every op named, every weight stored once.

coremltools numbers unnamed ops with a process-wide counter, so that two builds of one graph differ;
here each op has a name of its own. Functions of one program share a weight by its `weight_id`; the
library's own deduplication compares values (with a tolerance), here the name decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ondevice.models.packed import Half, Matrix, Palettised, Scaled

# Any: coremltools has no type annotations. A Var is the output of an op inside a function.
Var = Any


# Parameters that MIL would fill in, each as a constant op of its own; given here they are shared.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "conv": {
        "strides": (1, 1),
        "pad_type": "valid",
        "pad": (0, 0, 0, 0),
        "dilations": (1, 1),
        "groups": 1,
    },
    "concat": {"interleave": False},
    "matmul": {"transpose_x": False, "transpose_y": False},
}

Parameter = bool | int | str | np.float16 | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """A prefix of op names in one function; `scope("add", "sum", x=a, y=b)` builds an op.

    A parameter value is one constant op per function, however many ops take it: without that, two
    thirds of a decoder's ops are constants and six functions of 30 layers outgrow 2 % of the
    weights.
    """

    prefix: str = ""
    _constants: dict[tuple[type, Parameter], Var] = field(default_factory=dict)

    def __call__(self, op: str, name: str, **inputs: Var | Parameter | Sequence[Var]) -> Var:
        """Build MIL op `op` named prefix + `name`; raises ValueError when MIL refuses it."""
        given = {**_DEFAULTS.get(op, {}), **inputs}
        arguments = {key: self._argument(value) for key, value in given.items()}
        return getattr(_builder(), op)(name=self.prefix + name, **arguments)

    def within(self, name: str) -> Scope:
        """The scope whose names begin with this one's prefix and `name`."""
        return Scope(f"{self.prefix}{name}_", self._constants)

    def weight(self, name: str, value: Half) -> Var:
        """A constant that all functions with a weight of this full name share in weight.bin."""
        full_name = self.prefix + name
        return _shared(full_name, value)

    def matrix(self, name: str, matrix: Matrix) -> Var:
        """The constant weight (out, in, 1, 1) of a convolution, decompressed where it is packed."""
        full_name = self.prefix + name
        if isinstance(matrix, Palettised):
            groups, size = matrix.palettes.shape
            return _builder().constexpr_lut_to_dense(
                indices=_shared(f"{full_name}_indices", _as_uint(matrix)),
                lut=_shared(f"{full_name}_lut", matrix.palettes.reshape(groups, 1, 1, 1, size, 1)),
                name=full_name,
            )
        if isinstance(matrix, Scaled):
            return _builder().constexpr_blockwise_shift_scale(
                data=_shared(f"{full_name}_integers", matrix.integers[:, :, None, None]),
                scale=_shared(f"{full_name}_scale", matrix.scale.reshape(-1, 1, 1, 1)),
                name=full_name,
            )
        return self.weight(name, matrix[:, :, None, None])

    def linear(self, name: str, x: Var, weight: Matrix, bias: Half | None = None) -> Var:
        """`weight` (out, in) applied to x (1, in, 1, T) as a 1x1 convolution: (1, out, 1, T).

        The engine's native layout for a product with constant weights (Apple, "Deploying
        Transformers on the Apple Neural Engine", principle 1).
        """
        inputs = {"x": x, "weight": self.matrix(f"{name}_weight", weight)}
        if bias is not None:
            inputs["bias"] = self.weight(f"{name}_bias", bias)
        return self("conv", name, **inputs)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, bool | int | str | np.float16 | tuple):
            return value
        key = (type(value), value)
        if key not in self._constants:
            # [()]: MIL wants a scalar where an array of rank 0 would come out.
            stored = np.array(value, np.int32)[()] if type(value) in (int, tuple) else value
            name = f"parameter_{len(self._constants)}"
            self._constants[key] = _builder().const(val=stored, name=name)
        return self._constants[key]


def _shared(name: str, value: Any) -> Var:
    constant = _builder().const(val=np.ascontiguousarray(value), name=name)
    constant.op.weight_id = name
    return constant


def _as_uint(matrix: Palettised) -> Any:
    from coremltools.converters.mil.mil import types

    dtype = {4: types.np_uint4_dtype, 6: types.np_uint6_dtype}[matrix.bits]
    # A view: indices of a large model fill a gigabyte, and every function asks for them.
    return matrix.indices.view(dtype)[:, :, None, None]


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function to be built: its fp16 inputs by name and shape, and the body that makes outputs.

    `body(inputs)` returns the output variables; the name of each is the name of its op.
    """

    name: str
    inputs: Mapping[str, tuple[int, ...]]
    body: Callable[[Mapping[str, Var]], Sequence[Var]]


def program(sources: Sequence[FunctionSource]) -> Any:
    """A multifunction MIL program for iOS 18 / macOS 15; the first function is the default."""
    import coremltools as ct
    from coremltools.converters.mil.mil import Function, Program, types

    built = Program()
    for source in sources:
        placeholders = {
            name: _builder().placeholder(shape, dtype=types.fp16)
            for name, shape in source.inputs.items()
        }
        with Function(placeholders, opset_version=ct.target.iOS18) as function:
            function.set_outputs(list(source.body(function.inputs)))
        built.add_function(source.name, function)
    built.default_function_name = sources[0].name
    built.export_as_multifunction = True
    return built


def _builder() -> Any:
    from coremltools.converters.mil import Builder

    return Builder
