"""The PyObjC runtime on stand-ins for Apple's frameworks that forgive nothing."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlpackages import function, half, mb, save, single

from ondevice.coreml.apple import Apple
from ondevice.coreml.compiled import compiled_model
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Function, Package, TensorType, Value
from ondevice.coreml.pyobjc import PyObjCRuntime, signature_of
from ondevice.coreml.runtime import TensorSpec
from ondevice.drafter import CoreMLDrafter
from ondevice.errors import CallMismatch, RuntimeUnavailable, UnitFailed, UnknownOp
from ondevice.records import DraftRow, NodeToken
from ondevice.sampling import Law, SamplingParams
from ondevice.units import DraftRequest

pytestmark = pytest.mark.usefixtures("counted")

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Two functions; `wide` has rows of a whole cache line, `narrow` has not, and mixes types."""

    def wide(x, y):
        return mb.add(x=x, y=y, name="sum"), mb.mul(x=x, y=np.float16(2), name="twice")

    def narrow(x, z):
        return mb.add(x=x, y=mb.cast(x=z, dtype="fp16"), name="sum")

    functions = {
        "wide": function({"x": half(1, 3, 2, 32), "y": half(1, 3, 2, 32)}, wide),
        "narrow": function({"x": half(1, 3, 2, 5), "z": single(1, 3, 2, 5)}, narrow),
    }
    return save(functions, tmp_path_factory.mktemp("device") / "two.mlpackage")


@pytest.fixture
def runtime(mac, package):
    opened = open_runtime(package)
    yield opened
    opened.close()


def open_runtime(path: Path, functions: list[str] | None = None) -> PyObjCRuntime:
    return PyObjCRuntime(Package.open(path), compiled_model(path), functions)


def inputs_for(runtime: PyObjCRuntime, name: str, seed: int = 0, own: bool = True) -> Any:
    rng = np.random.default_rng(seed)
    made = {}
    for key, spec in runtime.functions[name].inputs.items():
        made[key] = runtime.buffer(spec) if own else spec.empty()
        made[key][:] = rng.integers(-8, 9, spec.shape)
    return made


@pytest.mark.parametrize("own", [True, False], ids=["bound", "copied"])
@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_it_computes_what_the_emulator_computes(runtime, package, name, own):
    inputs = inputs_for(runtime, name, own=own)
    expected = Emulator.open(package, "fp16").predict(name, inputs)
    for _ in range(3):
        got = runtime.predict(name, inputs)
        assert got.keys() == expected.keys()
        for key, array in expected.items():
            assert np.array_equal(got[key], array)
            assert got[key].dtype == array.dtype
        inputs["x"] += 1
        expected = Emulator.open(package, "fp16").predict(name, inputs)


def test_only_whole_cache_lines_are_surfaces_and_their_padded_rows_are_honoured(runtime):
    wide = runtime.buffer(TensorSpec((1, 3, 2, 32), HALF))
    assert wide.base.on_surface
    assert wide.strides[-2] == 128  # the stand-in pads 64 bytes to 128
    narrow = runtime.buffer(TensorSpec((1, 3, 2, 5), HALF))
    assert not narrow.base.on_surface
    assert narrow.flags.c_contiguous
    assert not runtime.buffer(TensorSpec((1, 32), SINGLE)).base.on_surface
    assert not wide.any()
    assert not narrow.any()
    with pytest.raises(CallMismatch, match="no arrays of float64"):
        runtime.buffer(TensorSpec((4,), np.dtype(np.float64)))


def test_inputs_are_bound_once_for_a_set_of_arrays(runtime, mac):
    provider = mac.module("CoreML").MLDictionaryFeatureProvider
    one, two = inputs_for(runtime, "wide", 1), inputs_for(runtime, "wide", 2)
    before = provider.made
    for _ in range(5):
        for inputs in (one, two):
            got = runtime.predict("wide", inputs)
            assert np.array_equal(got["sum"], inputs["x"] + inputs["y"])
    assert provider.made == before + 2
    mixed = {"x": one["x"], "y": np.ones(one["y"].shape, HALF)}
    assert np.array_equal(runtime.predict("wide", mixed)["sum"], one["x"] + 1)
    assert provider.made == before + 3


def test_what_the_caller_lets_go_of_is_not_held(runtime):
    loaded = runtime._loaded["wide"]
    inputs = inputs_for(runtime, "wide")
    runtime.predict("wide", inputs)
    assert len(loaded._bindings) == 1
    inputs.clear()
    gc.collect()
    assert loaded._bindings == {}


def test_a_part_of_a_buffer_is_copied_not_mistaken_for_the_whole(runtime):
    whole = runtime.buffer(TensorSpec((1, 3, 2, 64), HALF))
    whole[:] = np.arange(64)
    y = runtime.buffer(TensorSpec((1, 3, 2, 32), HALF))
    got = runtime.predict("wide", {"x": whole[..., 32:], "y": y})
    assert np.array_equal(got["sum"][0, 0, 0], np.arange(32, 64))
    got = runtime.predict("wide", {"x": y[..., ::-1], "y": y})
    assert not got["sum"].any()


def test_outputs_go_where_the_caller_says(runtime):
    inputs = inputs_for(runtime, "wide")
    out = {"sum": np.full((1, 3, 2, 32), 9, HALF)}
    got = runtime.predict("wide", inputs, out)
    assert got["sum"] is out["sum"]
    assert np.array_equal(out["sum"], inputs["x"] + inputs["y"])
    assert np.array_equal(got["twice"], 2 * inputs["x"])
    assert runtime.ignored_backings == 0


@pytest.mark.parametrize("strides", ["", "zero"])
def test_an_output_that_core_ml_puts_elsewhere_is_fetched_and_counted(runtime, mac, strides):
    mac.order(backings="ignored", strides=strides)
    for name in ("wide", "narrow"):
        inputs = inputs_for(runtime, name, own=False)
        got = runtime.predict(name, inputs)
        assert np.array_equal(got["sum"], inputs["x"] + inputs.get("y", inputs.get("z")))
    assert runtime.ignored_backings == 3


FAULTS = {
    "an error": ({"predict": "error"}, r"^Core ML failed in wide: Failed to evaluate model 0"),
    "an exception": ({"predict": "exception"}, r"^Core ML failed in wide: NSInternal.* - 0x1d$"),
    "no output": ({"lost": "sum"}, "^Core ML gave no array sum in wide$"),
    "another shape": (
        {"flat": "sum"},
        r"^Core ML returned type 65552 of shape \(192,\), expected float16 \(1, 3, 2, 32\)$",
    ),
    "no provider": ({"provider": 1}, "^the inputs of wide could not be bound: these features"),
    "no array": ({"array": 1}, r"^an array \(1, 3, 2, 5\): out of memory \(com.apple.CoreML 1\)$"),
    "no surface": ({"surface": 1}, "^no IOSurface of 32 x 6 halves: status -6662$"),
    "no lock": ({"lock": 1}, r"^an IOSurface \(1, 3, 2, 32\) could not be locked: -6660$"),
}


@pytest.mark.parametrize(("faults", "line"), FAULTS.values(), ids=FAULTS)
def test_every_failure_is_one_line_and_the_next_call_works(runtime, mac, faults, line):
    mac.order(**faults)
    name = "narrow" if "array" in faults else "wide"
    with pytest.raises(UnitFailed, match=line) as raised:
        runtime.predict(name, inputs_for(runtime, name))
    assert "\n" not in str(raised.value)
    mac.order()
    if "lock" not in faults:
        inputs = inputs_for(runtime, "wide")
        assert np.array_equal(runtime.predict("wide", inputs)["twice"], 2 * inputs["x"])


OPENING = {
    "compile": ({"compile": "error"}, "^Core ML does not compile .*: Failed to compile the model"),
    "compiler": ({"compile": "exception"}, "^Core ML does not compile .*: NSGenericException"),
    "load": (
        {"load": 1},
        r"^Core ML does not load narrow: .*error code: -14 \(com.apple.CoreML -14",
    ),
    "missing": ({"missing": "narrow"}, "^Core ML does not load narrow: The function narrow is not"),
}


@pytest.mark.parametrize(("faults", "line"), OPENING.values(), ids=OPENING)
def test_a_package_that_core_ml_refuses_says_why(mac, package, faults, line):
    mac.order(**faults)
    with pytest.raises(UnitFailed, match=line) as raised:
        open_runtime(package)
    assert "\n" not in str(raised.value)
    assert "wide" in open_runtime(package, ["wide"]).functions if "missing" in faults else True


def test_wrong_calls_are_refused(runtime):
    inputs = inputs_for(runtime, "wide")
    with pytest.raises(CallMismatch, match="no function deep; it has narrow, wide"):
        runtime.predict("deep", inputs)
    with pytest.raises(CallMismatch, match="dtype float32, expected float16"):
        runtime.predict("wide", {**inputs, "x": np.zeros((1, 3, 2, 32), np.float32)})
    runtime.close()
    with pytest.raises(UnitFailed, match="closed"):
        runtime.predict("wide", inputs)


def test_a_function_that_is_not_loaded_costs_nothing(mac, package):
    assert list(open_runtime(package, ["wide"]).functions) == ["wide"]


def test_a_package_with_one_function_has_it_called_main(mac, tmp_path):
    only = {"main": function({"x": half(2, 32)}, lambda x: mb.add(x=x, y=x, name="sum"))}
    runtime = open_runtime(save(only, tmp_path / "one.mlpackage"))
    x = runtime.buffer(TensorSpec((2, 32), HALF))
    x[:] = 3
    assert (runtime.predict("main", {"x": x})["sum"] == 6).all()


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (Value("truth", TensorType("bool", (2,))), r"truth is bool\[2\]"),
        (Value("long", TensorType("fp16", (2, -1))), r"long is fp16\[2,-1\]"),
        (Value("kept", TensorType("fp16", (2,)), is_state=True), "f has Core ML state"),
    ],
)
def test_what_no_array_can_hold_is_refused_by_name(value, line):
    with pytest.raises(UnknownOp, match=line):
        signature_of(Function("f", (value,), (), ()))


def test_without_pyobjc_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "CoreML", None)
    with pytest.raises(RuntimeUnavailable, match="pip install pyobjc-framework-CoreML"):
        Apple()


def test_a_package_is_compiled_once_for_a_machine(mac, package, monkeypatch):
    from ondevice.coreml import compiled

    first = compiled_model(package)
    mac.order(compile="error")
    assert compiled_model(package) == first
    monkeypatch.setattr(compiled, "machine_digest", lambda: "another-build")
    with pytest.raises(UnitFailed, match="does not compile"):
        compiled_model(package)
    mac.order()
    second = compiled_model(package)
    assert second.is_dir()
    assert not first.exists()


def test_the_stand_in_enforces_what_apple_does(runtime, mac):
    """Each rule is broken on purpose; without its enforcement the other tests would prove less."""
    violation = mac.module("standin").Violation
    inputs = inputs_for(runtime, "wide")
    loaded = runtime._loaded["wide"]
    with pytest.raises(violation, match="outside an autorelease pool"):
        loaded.run(inputs)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            runtime.predict("wide", inputs)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert isinstance(caught[0], violation)
    assert "off its thread" in str(caught[0])
    device = inputs["x"].base
    device.unlock()
    inputs["x"][:] = 5
    with pytest.raises(violation, match="written to by the host"):
        device.lock()
    device._pixels.seal = None
    device.lock()
    device.unlock = lambda: None
    with pytest.raises(UnitFailed, match="base address is locked"):
        runtime.predict("wide", {**inputs, "x": np.asarray(device)})
    with pytest.raises(violation, match="proxy"):
        runtime._apple.dictionary({"x": [1, 2]})


def test_an_input_changed_while_a_prediction_runs_is_noticed(runtime, mac):
    mac.order(slow_s=0.3)
    inputs = inputs_for(runtime, "narrow")

    def change() -> None:
        inputs["x"][:] += 1

    timer = threading.Timer(0.1, change)
    timer.start()
    with pytest.raises(mac.module("standin").Violation, match="changed while"):
        runtime.predict("narrow", inputs)
    timer.join()


def test_a_write_through_a_view_of_freed_memory_is_noticed(runtime, mac):
    array = runtime.buffer(TensorSpec((1, 5), HALF))
    address = array.__array_interface__["data"][0]
    del array
    gc.collect()
    standin = mac.module("standin")
    standin.Memory.check_graves()
    standin._at(address, 1)[0] = 1
    with pytest.raises(standin.Violation, match="freed"):
        standin.Memory.check_graves()
    standin.Memory.graves.clear()


def draft(drafter: CoreMLDrafter, seed: int) -> list[tuple[int, float]]:
    session = drafter.open_session()
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, 200, 90).tolist()
    assert drafter.prefill(session, tokens[:-1], lambda: False) == 89
    law = Law(SamplingParams(), 264, len(tokens))
    rows = [DraftRow(0, ())]
    rows += [DraftRow(node, (NodeToken(node, tokens[node]),)) for node in range(1, 5)]
    last = (NodeToken(0, tokens[-1]),)
    got = []
    for step, count in enumerate((1, 5, 3)):
        request = DraftRequest(session, step, tuple(rows[:count]), last, (), 3, "coupled", law)
        got += [(each.token, each.log_q) for each in drafter.draft(request).proposals]
        last = ()
    drafter.close_session(session)
    return got


def test_the_drafter_drafts_on_it_what_it_drafts_in_the_emulator(mac, tiny_pair):
    folders = tiny_pair / "drafter", tiny_pair / "verifier"
    here = CoreMLDrafter.open(*folders, open_runtime)
    there = CoreMLDrafter.open(*folders, lambda path: Emulator.open(path, "fp16"))
    for seed in range(2):
        assert draft(here, seed) == draft(there, seed)
    assert here._runtime.ignored_backings == 0
    assert here.runtime_name == "pyobjc"


def test_steady_state_allocates_nothing(runtime):
    """Of the product: what the stand-in allocates is taken out by where it was allocated."""
    inputs = inputs_for(runtime, "narrow")
    out = {"sum": np.zeros((1, 3, 2, 5), HALF)}
    for _ in range(20):
        runtime.predict("narrow", inputs, out)
    only = tracemalloc.Filter(True, "*/coreml/*")
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot().filter_traces([only])
        for _ in range(1000):
            runtime.predict("narrow", inputs, out)
        after = tracemalloc.take_snapshot().filter_traces([only])
    finally:
        tracemalloc.stop()
    grown = sum(each.size_diff for each in after.compare_to(before, "filename"))
    print(f"grew by {grown} bytes in 1,000 steps")
    assert grown < 64 * 1024
