"""Small Core ML programs, really saved as .mlpackage with coremltools' MIL builder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

logging.getLogger("coremltools").setLevel(logging.ERROR)

import coremltools as ct  # noqa: E402  warns while it is imported, unless silenced before
from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import Function, Program, types  # noqa: E402

MIL_TYPES = {
    np.dtype(np.float16): types.fp16,
    np.dtype(np.float32): types.fp32,
    np.dtype(np.int32): types.int32,
    np.dtype(np.bool_): types.bool,
}

Shape = tuple[int, ...]
Body = Callable[..., Any]


def half(*shape: int) -> Any:
    """An fp16 input."""
    return mb.placeholder(shape, dtype=types.fp16)


def single(*shape: int) -> Any:
    """An fp32 input."""
    return mb.placeholder(shape, dtype=types.fp32)


def function(inputs: Mapping[str, Any], body: Body, target: Any = None) -> Any:
    """A MIL function; `body(**inputs)` returns its output or a list of outputs."""
    with Function(dict(inputs), opset_version=target or ct.target.iOS18) as built:
        outputs = body(**built.inputs)
        built.set_outputs(list(outputs) if isinstance(outputs, list | tuple) else [outputs])
    return built


def save(functions: Mapping[str, Any], path: Path, target: Any = None) -> Path:
    """Save the functions as one package at `path`; several functions need iOS18."""
    program = Program()
    for name, built in functions.items():
        program.add_function(name, built)
    if list(functions) != ["main"]:
        program.default_function_name = next(iter(functions))
        program.export_as_multifunction = True
    model = ct.convert(
        program,
        minimum_deployment_target=target or ct.target.iOS18,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        skip_model_load=True,
        pass_pipeline=ct.PassPipeline.EMPTY,
    )
    model.save(str(path))
    return path


def shared_weight(name: str, value: np.ndarray) -> Any:
    """A constant that all functions with this name store once."""
    constant = mb.const(val=value, name=name)
    constant.op.weight_id = name
    return constant
