"""Runs a drafter's Core ML package in MLX: on a Mac's GPU, when the Neural Engine is not to be had.

It knows the ops that this project's drafter graph is made of (models/drafter_graph.py) and refuses
others by name. Weights are kept in half precision on a GPU, in single precision on a CPU, where
MLX has no fast halves; in between everything is float32, so nothing overflows that does not on the
Neural Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ondevice.coreml.compiler import CompiledFunction, compile_function
from ondevice.coreml.constants import ConstantPool
from ondevice.coreml.ops.base import Lowered, Operands, Rule
from ondevice.coreml.package import Package
from ondevice.coreml.pyobjc import signature_of
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec, check_call, find_function
from ondevice.errors import UnitFailed

Tensor = Any
"""An mlx.core.array: MLX is imported with the first runtime, not before."""


class MLXRuntime:
    """A CoreMLRuntime; one thread opens, uses and closes it, as MLX demands."""

    sleeps = False

    def __init__(self, package: Package, functions: Collection[str] | None = None) -> None:
        """Compile `functions` of a package, all by default. Raises UnknownOp naming the op."""
        import mlx.core as mx

        self._path = package.path
        on_gpu = mx.default_device().type == mx.gpu
        self.name = "mlx on the GPU" if on_gpu else "mlx on the CPU"
        wanted = package.functions if functions is None else functions
        self._functions = {name: signature_of(package.functions[name]) for name in wanted}
        rules = _Rules(mx.float16 if on_gpu else mx.float32)
        pool = ConstantPool()
        self._compiled: dict[str, Callable[..., list[Tensor]]] = {}
        for name in wanted:
            compiled = compile_function(package.functions[name], pool, False, rules.by_type)
            self._compiled[name] = mx.compile(_Graph(compiled))

    @property
    def functions(self) -> Mapping[str, FunctionSignature]:
        """Signature of every function; half precision stays so."""
        return self._functions

    def buffer(self, spec: TensorSpec) -> Array:
        """Ordinary memory: MLX copies its inputs (5 MB of slots: 0.3 ms)."""
        return spec.empty()

    def predict(
        self,
        function: str,
        inputs: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Run `function` once; see CoreMLRuntime.predict."""
        import mlx.core as mx

        closed = f"the MLX drafter of {self._path} is closed; open it again"
        run = find_function(function, self._compiled, self._functions, self._path, closed)
        signature = self._functions[function]
        check_call(function, signature, inputs, out)
        try:
            found = run(*[mx.array(inputs[name]) for name in signature.inputs])
            mx.eval(found)
        except Exception as error:
            raise UnitFailed(f"MLX failed in {function}: {error}") from error
        outputs = {}
        for (name, spec), tensor in zip(signature.outputs.items(), found, strict=True):
            value = np.array(
                tensor.astype(mx.float16 if spec.dtype == np.float16 else tensor.dtype)
            )
            outputs[name] = value
            if out is not None and name in out:
                np.copyto(out[name], value)
                outputs[name] = out[name]
        return outputs

    def close(self) -> None:
        """Drop the weights; a later `predict` raises UnitFailed."""
        self._compiled = {}


class _Graph:
    """A compiled function, called with MLX arrays in the order of its inputs."""

    def __init__(self, compiled: CompiledFunction) -> None:
        import mlx.core as mx

        self._compiled = compiled
        self._template = [
            mx.array(value) if isinstance(value, np.ndarray) else value
            for value in compiled.template
        ]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        import mlx.core as mx

        slots = list(self._template)
        for slot, tensor in zip(self._compiled.inputs.values(), inputs, strict=True):
            half = tensor.dtype == mx.float16
            slots[slot] = tensor.astype(mx.float32) if half else tensor
        for kernel, reads, writes, single, frees, _op in self._compiled.steps:
            result = kernel(*[slots[slot] for slot in reads])
            for slot, value in zip(writes, (result,) if single else result, strict=True):
                slots[slot] = value
            for slot in frees:
                slots[slot] = None
        return [slots[slot] for slot in self._compiled.outputs.values()]


class _Rules:
    """What each op becomes. Weights that functions share are converted once."""

    def __init__(self, weights: Any) -> None:
        import mlx.core as mx

        self._mx, self._dtype = mx, weights
        self._weights: dict[int, tuple[Array, Tensor]] = {}
        binary: dict[str, Callable[..., Tensor]] = {
            "add": mx.add,
            "sub": mx.subtract,
            "mul": mx.multiply,
            "real_div": mx.divide,
            "maximum": mx.maximum,
            "less_equal": mx.less_equal,
        }
        unary = {"abs": mx.abs, "exp": mx.exp, "silu": lambda x: x * mx.sigmoid(x)}
        moving = {"reshape", "transpose", "concat", "split", "slice_by_size"}
        lowers: dict[str, Callable[[Operands], Lowered]] = {
            **{kind: _calls(kernel, "x", "y") for kind, kernel in binary.items()},
            **{kind: _calls(kernel, "x") for kind, kernel in unary.items()},
            "select": _calls(mx.where, "cond", "a", "b"),
            "reduce_max": self._reduction(mx.max),
            "reduce_sum": self._reduction(mx.sum),
            **{kind: getattr(self, f"_{kind}") for kind in moving},
            "matmul": self._matmul,
            "conv": self._conv,
            "layer_norm": self._layer_norm,
        }
        self.by_type = {kind: Rule(lower, kind in moving) for kind, lower in lowers.items()}

    def _reduction(self, reduce: Callable[..., Tensor]) -> Callable[[Operands], Lowered]:
        def lower(op: Operands) -> Lowered:
            every = tuple(range(len(op.type("x").shape)))
            axes, keep = op.integers("axes", every), op.flag("keep_dims", False)
            return Lowered(lambda x: reduce(x, axis=axes, keepdims=keep), ("x",))

        return lower

    def _reshape(self, op: Operands) -> Lowered:
        shape = op.result.shape
        return Lowered(lambda x: self._mx.reshape(x, shape), ("x",))

    def _transpose(self, op: Operands) -> Lowered:
        order = op.integers("perm", ())
        return Lowered(lambda x: self._mx.transpose(x, order), ("x",))

    def _concat(self, op: Operands) -> Lowered:
        axis = op.integer("axis", 0)
        if op.flag("interleave", False):
            raise op.refuse("interleave")
        return Lowered(lambda *values: self._mx.concatenate(values, axis=axis), ("values",))

    def _split(self, op: Operands) -> Lowered:
        axis, sizes = op.integer("axis", 0), [output.type.shape for output in op.op.outputs]
        cuts = np.cumsum([size[axis] for size in sizes])[:-1].tolist()
        return Lowered(lambda x: tuple(self._mx.split(x, cuts, axis=axis)), ("x",))

    def _slice_by_size(self, op: Operands) -> Lowered:
        begin, result = op.integers("begin", ()), op.result.shape
        part = tuple(slice(at, at + size) for at, size in zip(begin, result, strict=True))
        return Lowered(lambda x: x[part], ("x",))

    def _matmul(self, op: Operands) -> Lowered:
        left, right = op.flag("transpose_x", False), op.flag("transpose_y", False)

        def kernel(x: Tensor, y: Tensor) -> Tensor:
            x = self._mx.swapaxes(x, -1, -2) if left else x
            return x @ (self._mx.swapaxes(y, -1, -2) if right else y)

        return Lowered(kernel, ("x", "y"))

    def _conv(self, op: Operands) -> Lowered:
        weight, shape = op.array("weight"), op.type("x").shape
        if weight.shape[2:] != (1, 1) or shape[0] != 1:
            raise op.refuse(f"a kernel {weight.shape} on {shape}")
        if op.integer("groups", 1) != 1 or set(op.integers("strides", (1,))) != {1}:
            raise op.refuse("groups or strides")
        matrix, result = self._shared(weight), op.result.shape
        bias = self._mx.array(op.array("bias").reshape(-1, 1, 1)) if op.has("bias") else None

        def kernel(x: Tensor) -> Tensor:
            columns = self._mx.reshape(x, (shape[1], -1)).astype(matrix.dtype)
            product = self._mx.reshape((matrix @ columns).astype(self._mx.float32), result)
            return product if bias is None else product + bias

        return Lowered(kernel, ("x",))

    def _shared(self, weight: Array) -> Tensor:
        if id(weight) not in self._weights:
            matrix = self._mx.array(weight.reshape(weight.shape[:2])).astype(self._dtype)
            self._weights[id(weight)] = weight, matrix  # the array is kept, so that its id is
        return self._weights[id(weight)][1]

    def _layer_norm(self, op: Operands) -> Lowered:
        axes, epsilon = op.integers("axes", ()), float(op.number("epsilon", 1e-5))
        if op.has("gamma") or op.has("beta"):
            raise op.refuse("gains")

        def kernel(x: Tensor) -> Tensor:
            centred = x - self._mx.mean(x, axis=axes, keepdims=True)
            spread = self._mx.mean(self._mx.square(centred), axis=axes, keepdims=True)
            return centred * self._mx.rsqrt(spread + epsilon)

        return Lowered(kernel, ("x",))


def _calls(kernel: Callable[..., Tensor], *reads: str) -> Callable[[Operands], Lowered]:
    return lambda op: Lowered(kernel, reads)
