"""The drafter's package in MLX gives what it gives in the emulator, and refuses what it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from mlpackages import function, half, mb, save

from ondevice.coreml.emulator import Emulator
from ondevice.coreml.mlxruntime import MLXRuntime
from ondevice.coreml.package import Package
from ondevice.drafter import CoreMLDrafter
from ondevice.errors import CallMismatch, UnitFailed, UnknownOp


def random_inputs(runtime, name, seed):
    rng = np.random.default_rng(seed)
    made = {
        key: rng.normal(0, 0.5, spec.shape).astype(spec.dtype)
        for key, spec in runtime.functions[name].inputs.items()
    }
    made["mask"] = np.where(made["mask"] > 0, 0, -1e4).astype(made["mask"].dtype)
    return made


def test_every_function_agrees_with_the_emulator(tiny_pair):
    path = tiny_pair / "drafter" / "drafter.mlpackage"
    runtime, emulator = MLXRuntime(Package.open(path)), Emulator.open(path)
    assert runtime.name == "mlx on the CPU"
    assert runtime.functions.keys() == emulator.functions.keys()
    for seed, name in enumerate(runtime.functions):
        inputs = random_inputs(runtime, name, seed)
        got, expected = runtime.predict(name, inputs), emulator.predict(name, inputs)
        for key, array in expected.items():
            assert got[key].dtype == np.float16
            assert np.allclose(got[key], array, rtol=2e-3, atol=2e-3 * np.abs(array).max())


def test_it_drafts_for_a_session(tiny_pair):
    folders = tiny_pair / "drafter", tiny_pair / "verifier"
    drafter = CoreMLDrafter.open(*folders, lambda path: MLXRuntime(Package.open(path)))
    session = drafter.open_session()
    assert drafter.prefill(session, list(range(4, 30)), lambda: False) == 26
    drafter.close()


def test_outputs_go_where_the_caller_says(tiny_pair):
    runtime = MLXRuntime(Package.open(tiny_pair / "drafter" / "drafter.mlpackage"), ["t1_s64"])
    inputs = random_inputs(runtime, "t1_s64", 0)
    out = {"k_new": runtime.functions["t1_s64"].outputs["k_new"].empty()}
    got = runtime.predict("t1_s64", inputs, out)
    assert got["k_new"] is out["k_new"]
    assert out["k_new"].any()
    with pytest.raises(CallMismatch, match="no function t8_s64"):
        runtime.predict("t8_s64", inputs)
    runtime.close()
    with pytest.raises(UnitFailed, match="closed"):
        runtime.predict("t1_s64", inputs)


REFUSED = {
    "sqrt": lambda x: mb.sqrt(x=x),
    "conv": lambda x: mb.conv(x=x, weight=np.ones((4, 4, 1, 3), np.float16)),
    "concat": lambda x: mb.concat(values=[x, x], axis=1, interleave=True),
}


@pytest.mark.parametrize("op", REFUSED)
def test_ops_that_no_drafter_has_are_refused_by_name(op, tmp_path):
    path = save({"main": function({"x": half(1, 4, 1, 8)}, REFUSED[op])}, tmp_path / "p.mlpackage")
    with pytest.raises(UnknownOp, match=op):
        MLXRuntime(Package.open(path))
