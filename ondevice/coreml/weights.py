"""A package's stored weights by the name of the op that holds them, packed ones unpacked."""

from __future__ import annotations

from functools import cached_property

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.constexpr import CONSTEXPR
from ondevice.coreml.package import Argument, Constant, Function, Op


class StoredWeights:
    """Weights of one function, read one at a time."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, name: str) -> Array:
        """The value of the constant `name`, as stored or decompressed; KeyError if there is none.

        Half precision comes as such from a plain constant, as float32 with half-precision values
        from a packed one.
        """
        constant = self._function.constants.get(name)
        if constant is not None:
            return _read(constant)
        op = self._packed[name]
        arguments = {name: self._argument(value) for name, (value,) in op.inputs.items()}
        return CONSTEXPR[op.type](arguments)

    def _argument(self, argument: Argument) -> Array:
        if isinstance(argument, Constant):
            return _read(argument)
        return self(argument)

    @cached_property
    def _packed(self) -> dict[str, Op]:
        return {op.outputs[0].name: op for op in self._function.ops if op.type in CONSTEXPR}


def _read(constant: Constant) -> Array:
    value = constant.read()
    assert not isinstance(value, str)
    return value
