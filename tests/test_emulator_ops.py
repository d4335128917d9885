"""Every op of the emulator against coremltools' own numpy semantics, through saved packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_cases import CASES, Array, Case
from mil_more_cases import MORE_CASES
from mlpackages import MIL_TYPES, function, mb, save, types

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.ops import RULES

ALL_CASES = [*CASES, *MORE_CASES]
NAMED = [(f"{case.op}_{index}", case) for index, case in enumerate(ALL_CASES)]
IDS = [name for name, _ in NAMED]


def flat_values(case: Case) -> dict[str, Array]:
    """The case's run-time arrays by input name; a list gives one input each."""
    named: dict[str, Array] = {}
    for parameter, value in case.values.items():
        if isinstance(value, list):
            named |= {f"{parameter}_{index}": item for index, item in enumerate(value)}
        else:
            named[parameter] = value
    return named


def call(case: Case, named: Mapping[str, Any], scalar: type[np.floating[Any]]) -> Any:
    """Build the op on `named` arguments; float parameters become `scalar`."""
    arguments = {
        parameter: [named[f"{parameter}_{i}"] for i in range(len(value))]
        if isinstance(value, list)
        else named[parameter]
        for parameter, value in case.values.items()
    }
    constants = {name: as_type(value, scalar) for name, value in case.parameters.items()}
    if case.op == "cast" and constants["dtype"] == "fp32" and scalar is np.float16:
        constants["dtype"] = "fp16"
    return getattr(mb, case.op)(**arguments, **constants)


def as_type(value: Any, scalar: type[np.floating[Any]]) -> Any:
    if isinstance(value, np.ndarray | np.floating) and value.dtype == np.float32:
        return scalar(value) if value.ndim == 0 else value.astype(scalar)
    return value


def program(case: Case, scalar: type[np.floating[Any]]) -> Any:
    """The op alone as a function. Booleans cannot be inputs or outputs: integers stand for them."""
    named = flat_values(case)
    inputs = {}
    for name, value in named.items():
        dtype = np.int32 if value.dtype == np.bool_ else as_type(value, scalar).dtype
        inputs[name] = mb.placeholder(value.shape, dtype=MIL_TYPES[np.dtype(dtype)])
    if not inputs:
        inputs["unused"] = mb.placeholder((1,), dtype=MIL_TYPES[np.dtype(scalar)])

    def body(**given: Any) -> list[Any]:
        for name, value in named.items():
            if value.dtype == np.bool_:
                given[name] = mb.cast(x=given[name], dtype="bool")
        result = call(case, given, scalar)
        results = list(result) if isinstance(result, list | tuple) else [result]
        return [mb.cast(x=r, dtype="int32") if r.dtype == types.bool else r for r in results]

    return function(inputs, body)


def feed(case: Case, dtype: type[np.floating[Any]]) -> dict[str, Array]:
    named = flat_values(case) or {"unused": np.zeros(1, np.float32)}
    return {
        name: value.astype(np.int32 if value.dtype.kind in "bi" else dtype)
        for name, value in named.items()
    }


def oracle(case: Case) -> list[Array]:
    """What coremltools infers for constant inputs, or the case's own expectation."""
    named = flat_values(case)
    if case.expected is not None:
        result = case.expected(*named.values())
        return [np.array(part) for part in (result if isinstance(result, tuple) else (result,))]
    inferred: list[Array] = []

    def body(unused: Any) -> Any:
        result = call(case, named, np.float32)
        results = list(result) if isinstance(result, list | tuple) else [result]
        inferred.extend(np.array(part.val) for part in results)
        return unused

    with np.errstate(all="ignore"):
        function({"unused": mb.placeholder((1,), dtype=types.fp32)}, body)
    assert all(part.dtype != object for part in inferred), "coremltools infers no value"
    return inferred


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ops")


@pytest.fixture(scope="module")
def single(folder: Path) -> Emulator:
    functions = {i: program(case, np.float32) for i, case in NAMED}
    return Emulator.open(save(functions, folder / "single.mlpackage"))


@pytest.fixture(scope="module")
def half_package(folder: Path) -> Path:
    functions = {i: program(case, np.float16) for i, case in NAMED}
    return save(functions, folder / "half.mlpackage")


@pytest.fixture(scope="module")
def half_in_fp32(half_package: Path) -> Emulator:
    return Emulator.open(half_package, "fp32")


@pytest.fixture(scope="module")
def half_in_fp16(half_package: Path) -> Emulator:
    return Emulator.open(half_package, "fp16")


def test_every_op_that_the_emulator_knows_is_compared() -> None:
    elsewhere = {"read_state", "write_state", "quantize", "dequantize"}  # test_coremltools_ops.py
    assert {case.op for case in ALL_CASES} | elsewhere == set(RULES)


@pytest.mark.parametrize(("name", "case"), NAMED, ids=IDS)
def test_op_equals_coremltools_numpy_semantics(single: Emulator, name: str, case: Case) -> None:
    for repeat in range(2):  # the first run is checked op by op, later ones are not
        outputs = list(single.predict(name, feed(case, np.float32)).values())
        expected = oracle(case)
        assert len(outputs) == len(expected), repeat
        for got, want in zip(outputs, expected, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "case"), NAMED, ids=IDS)
def test_half_precision_rounds_the_float32_result_of_the_same_inputs(
    half_in_fp32: Emulator, half_in_fp16: Emulator, name: str, case: Case
) -> None:
    exact = half_in_fp32.predict(name, feed(case, np.float16))
    rounded = half_in_fp16.predict(name, feed(case, np.float16))
    for output, value in exact.items():
        want = value
        if half_in_fp16.functions[name].outputs[output].dtype == np.float16:
            with np.errstate(all="ignore"):
                want = value.astype(np.float16)
        assert rounded[output].dtype == want.dtype
        np.testing.assert_array_equal(rounded[output], want)
