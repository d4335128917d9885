"""A pytest plugin: coremltools' own operator tests, their predictions answered by our emulator.

Loaded with `-p emulated_coremltools` (see test_coremltools_ops.py). Cases of other backends than ML
programs are left out; a case whose program the emulator refuses by name is skipped as unclaimed.
What became of each op is written to the file that OPS_REPORT names.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import testing_utils
from coremltools.models import utils

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package
from ondevice.errors import UnitFailed, UnknownOp

_ops: set[str] = set()
_results: dict[str, Counter[str]] = defaultdict(Counter)
_EVERY = int(os.environ.get("OPS_EVERY", "1"))


def _emulator(model: ct.models.MLModel) -> tuple[Emulator, str]:
    if model.package_path is None:
        pytest.skip("a neural network, not an ML program")
    package = Package.open(Path(model.package_path))
    for function in package.functions.values():
        _ops.update(op.type for op in function.ops if op.type != "const")
    name = getattr(model, "function_name", None) or package.default_function
    try:
        return Emulator(package), name
    except UnknownOp as error:
        pytest.skip(f"unclaimed: {error}")


def _predict(model: Any, data: dict[str, Any], state: Any = None) -> dict[str, Any]:
    emulator, name = _emulator(model)
    signature = emulator.functions[name]
    inputs = {
        key: np.asarray(value)
        .astype(signature.inputs[key].dtype)
        .reshape(signature.inputs[key].shape)
        for key, value in data.items()
    }
    try:
        return emulator.predict(name, inputs, state=state)
    except UnitFailed as error:  # Core ML says so, and tests of wrong inputs look for it
        raise RuntimeError(f"Unable to compute the prediction using ML Program: {error}") from error


def _make_state(model: Any) -> dict[str, Any]:
    emulator, name = _emulator(model)
    return emulator.new_state(name)


def pytest_configure(config: pytest.Config) -> None:
    """Make coremltools believe that its models run here."""
    ct.models.MLModel.predict = _predict
    ct.models.MLModel.make_state = _make_state
    testing_utils._IS_MACOS = True
    utils._is_macos = lambda: True
    utils._macos_version = lambda: (15, 0)
    ct.utils._macos_version = lambda: (15, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases of ML programs, every OPS_EVERY-th of them."""
    programs = [item for item in items if "neuralnetwork" not in item.nodeid]
    items[:] = programs[::_EVERY]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every case uses ops of its own."""
    _ops.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Note what became of the case, once for each op in it."""
    outcome = yield
    report = outcome.get_result()
    if report.when != "call":
        return
    kind = report.outcome
    if kind == "skipped":
        kind = "unclaimed" if "unclaimed" in str(report.longrepr) else "other"
    for op in _ops:
        _results[op][kind] += 1
    _results["all cases" if _ops else "cases without a prediction"][kind] += 1


def pytest_sessionfinish() -> None:
    """Write the table."""
    Path(os.environ["OPS_REPORT"]).write_text(json.dumps(_results, indent=1, sort_keys=True))
