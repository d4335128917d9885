"""Stand-in for coremltools' binding to Core ML (libcoremlpython)."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from standin import Violation, fault

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package


class _MLModelProxy:
    def __init__(self, path: str, units: str, function: str, hints: dict, asset: Any) -> None:
        if fault("tools_load"):
            raise RuntimeError("Error in declaring network.")
        if units != "CPU_AND_NE":
            raise Violation(f"compute units {units}")
        package = Package.open(Path(path) / "copy.mlpackage")
        self._function = function or package.default_function
        self._emulator = Emulator(package, "fp16")
        self._bound: list[weakref.ref[np.ndarray]] = []

    @staticmethod
    def compileModel(source: str, destination: str | None = None) -> str:
        if fault("tools_compile"):
            raise RuntimeError("Error compiling model:\n-14")
        folder = Path(tempfile.mkdtemp()) / "compiled.mlmodelc"
        shutil.copytree(source, folder / "copy.mlpackage")
        return str(folder)

    def predict(self, data: dict[str, np.ndarray], state: None) -> dict[str, Any]:
        if any(ref() is None for ref in self._bound):
            raise Violation("an input was freed while Core ML still referred to it")
        if fault("tools_predict"):
            raise RuntimeError("Unable to compute the prediction")
        for name, array in data.items():
            if array.dtype not in (np.float32, np.int32) or not array.flags.writeable:
                raise Violation(f"{name} is {array.dtype}")
        self._bound = [weakref.ref(array) for array in data.values()]
        specs = self._emulator.functions[self._function].inputs
        halves = {name: array.astype(specs[name].dtype) for name, array in data.items()}
        outputs = self._emulator.predict(self._function, halves)
        single = {name: array.astype(np.float32) for name, array in outputs.items()}
        if fault("tools_garbage"):
            single["k_new"] = single["k_new"].ravel()
        return single
