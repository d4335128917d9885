"""The emulator as a Core ML runtime: buffers, errors, precision, sharing."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlpackages import function, half, mb, save, shared_weight, types

from ondevice.coreml.compiler import to_half
from ondevice.coreml.emulator import Emulator
from ondevice.errors import CallMismatch, UnitFailed, UnknownOp

rng = np.random.default_rng(3)
WEIGHT = (rng.standard_normal((24, 16, 1, 1)) / 4).astype(np.float16)
BIAS = rng.standard_normal((1, 24, 1, 1)).astype(np.float16)


def layer(rows: int) -> Any:
    """gain * (WEIGHT x + BIAS), and x itself."""

    def body(x: Any) -> list[Any]:
        product = mb.conv(x=x, weight=shared_weight("weight", WEIGHT), name="product")
        shifted = mb.add(x=product, y=shared_weight("bias", BIAS), name="shifted")
        return [
            mb.mul(x=shifted, y=np.float16(1.5), name="y"),
            mb.identity(x=x, name="same"),
            mb.reshape(x=x, shape=np.int32([16, rows]), name="flat"),
        ]

    return function({"x": half(1, 16, 1, rows)}, body)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulator") / "layer.mlpackage"
    return save({"t1": layer(1), "t8": layer(8)}, path)


@pytest.fixture(scope="module")
def exact(package: Path) -> Emulator:
    return Emulator.open(package)


@pytest.fixture(scope="module")
def faithful(package: Path) -> Emulator:
    return Emulator.open(package, "fp16")


def one(body: Any, inputs: dict[str, Any], path: Path, precision: Any = "fp32") -> Emulator:
    return Emulator.open(save({"f": function(inputs, body)}, path / "one.mlpackage"), precision)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_signature_says_what_costs_no_conversion(exact: Emulator, faithful: Emulator) -> None:
    assert (exact.name, faithful.name) == ("emulator-fp32", "emulator-fp16")
    assert set(exact.functions) == {"t1", "t8"}
    signature = exact.functions["t8"]
    assert signature.inputs["x"].shape == (1, 16, 1, 8)
    assert signature.inputs["x"].dtype == signature.outputs["y"].dtype == np.float32
    assert faithful.functions["t8"].inputs["x"].dtype == np.float16
    assert list(signature.outputs) == ["y", "same", "flat"]
    assert signature.inputs["x"].empty().shape == (1, 16, 1, 8)


def test_functions_of_other_widths_agree_column_by_column(exact: Emulator) -> None:
    x = normal(1, 16, 1, 8)
    together = exact.predict("t8", {"x": x})["y"]
    for row in range(8):
        alone = exact.predict("t1", {"x": x[..., row : row + 1].copy()})["y"]
        np.testing.assert_allclose(alone[..., 0], together[..., row], rtol=1e-5, atol=1e-6)


def test_half_precision_rounds_after_every_op(faithful: Emulator) -> None:
    x = normal(1, 16, 1, 8).astype(np.float16)
    wide = x.astype(np.float32).reshape(16, 8)
    product = (WEIGHT.astype(np.float32).reshape(24, 16) @ wide).astype(np.float16)
    shifted = (product.astype(np.float32) + BIAS.astype(np.float32).reshape(24, 1)).astype("f2")
    scaled = (shifted.astype(np.float32) * np.float32(1.5)).astype(np.float16)
    got = faithful.predict("t8", {"x": x})["y"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got.reshape(24, 8), scaled)


def test_half_precision_overflows_to_infinity(tmp_path: Path) -> None:
    emulator = one(
        lambda x: mb.mul(x=x, y=np.float16(2), name="y"), {"x": half(4)}, tmp_path, "fp16"
    )
    got = emulator.predict("f", {"x": np.float16([32752, 32768, -40000, np.nan])})["y"]
    np.testing.assert_array_equal(got, np.float16([65504, np.inf, -np.inf, np.nan]))


def test_rounding_to_half_is_ieee_for_every_half_midpoint_and_neighbour() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)]).astype(np.float64)
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 500_000).astype(np.uint32)
    values = [halves, middles, np.float32([65519.996, 65520, -65520, 1e-30]), bits.view(np.float32)]
    values += [np.nextafter(middles, np.float32(s)) for s in (np.inf, -np.inf)]
    x = np.concatenate(values)
    with np.errstate(all="ignore"):
        got, want = to_half(x), x.astype(np.float16).astype(np.float32)
    missing = np.isnan(want)
    assert np.array_equal(np.isnan(got), missing)
    assert np.array_equal(got.view(np.uint32)[~missing], want.view(np.uint32)[~missing])


def test_inputs_are_neither_kept_nor_changed_nor_aliased(exact: Emulator) -> None:
    x = normal(1, 16, 1, 8)
    before = x.copy()
    outputs = exact.predict("t8", {"x": x})
    assert np.array_equal(x, before)
    assert x.flags.writeable
    for value in outputs.values():
        assert value.flags.c_contiguous
        assert value.flags.writeable
        assert not np.shares_memory(value, x)
    outputs["same"][:] = 0
    assert np.array_equal(outputs["flat"], before.reshape(16, 8))
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_views_and_read_only_inputs_are_taken(exact: Emulator) -> None:
    x = normal(1, 8, 1, 16).transpose(0, 3, 2, 1)
    x.flags.writeable = False
    got = exact.predict("t8", {"x": x})
    want = exact.predict("t8", {"x": np.ascontiguousarray(x)})
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-6)
    assert np.array_equal(got["same"], x)


def test_outputs_go_into_the_callers_buffers(exact: Emulator, faithful: Emulator) -> None:
    for emulator in (exact, faithful):
        signature = emulator.functions["t8"]
        x = normal(1, 16, 1, 8).astype(signature.inputs["x"].dtype)
        buffer = signature.outputs["y"].empty()
        got = emulator.predict("t8", {"x": x}, out={"y": buffer})
        assert got["y"] is buffer
        assert np.array_equal(buffer, emulator.predict("t8", {"x": x})["y"])


def test_float16_inputs_are_widened_in_fp32(exact: Emulator) -> None:
    x = normal(1, 16, 1, 8).astype(np.float16)
    wide = exact.predict("t8", {"x": x.astype(np.float32)})
    assert np.array_equal(exact.predict("t8", {"x": x})["y"], wide["y"])


X8 = np.zeros((1, 16, 1, 8), np.float32)
MISUSES = {
    "unknown function": ("t9", {"x": X8}, None, "no function t9; it has t1, t8"),
    "missing": ("t8", {}, None, "missing x"),
    "extra": ("t8", {"x": X8, "z": X8}, None, "unknown z"),
    "shape": ("t8", {"x": X8[..., :1]}, None, r"\(1, 16, 1, 1\), expected \(1, 16, 1, 8\)"),
    "dtype": ("t8", {"x": X8.astype(np.float64)}, None, "float64, expected float32"),
    "no array": ("t8", {"x": [0.0]}, None, "no array but a list"),
    "unknown output": ("t8", {"x": X8}, {"q": X8}, "unknown q"),
    "output shape": ("t8", {"x": X8}, {"y": X8}, "output y has shape"),
    "output dtype": ("t8", {"x": X8}, {"same": X8.astype(np.float16)}, "output same has dtype"),
}


@pytest.mark.parametrize(("call", "message"), [(m[:3], m[3]) for m in MISUSES.values()],
                         ids=list(MISUSES))  # fmt: skip
def test_a_wrong_call_is_one_line(exact: Emulator, call: Any, message: str) -> None:
    name, inputs, out = call
    with pytest.raises(CallMismatch, match=message) as caught:
        exact.predict(name, inputs, out)
    assert "\n" not in str(caught.value)


def test_read_only_output_buffers_are_refused(exact: Emulator) -> None:
    frozen = X8.copy()
    frozen.flags.writeable = False
    with pytest.raises(CallMismatch, match="read-only"):
        exact.predict("t8", {"x": X8}, {"same": frozen})


def test_fp16_takes_no_float32(faithful: Emulator) -> None:
    with pytest.raises(CallMismatch, match="float32, expected float16"):
        faithful.predict("t8", {"x": X8})


def test_a_closed_emulator_says_so(package: Path) -> None:
    emulator = Emulator.open(package)
    emulator.close()
    with pytest.raises(UnitFailed, match="closed"):
        emulator.predict("t8", {"x": X8})


def test_an_unknown_op_is_refused_at_open_by_name(tmp_path: Path) -> None:
    known = function({"x": half(4, 4)}, lambda x: mb.relu(x=x, name="y"))
    lengths = np.int32([1, 2, 3, 4])
    odd = function(
        {"x": half(4, 4)},
        lambda x: mb.reverse_sequence(x=x, lengths=lengths, seq_axis=1, name="odd_op"),
    )
    path = save({"good": known, "bad": odd}, tmp_path / "p.mlpackage")
    with pytest.raises(UnknownOp, match=r"reverse_sequence \(odd_op in function bad\)"):
        Emulator.open(path)


def test_an_unknown_use_of_a_known_op_is_refused_at_open(tmp_path: Path) -> None:
    kernel = np.ones((2, 2, 2, 2), np.float16)

    def body(x: Any) -> Any:
        return mb.conv(x=x, weight=kernel, pad_type="same", strides=[2, 2], name="odd_conv")

    with pytest.raises(UnknownOp, match=r"pad_type same.*odd_conv of function f"):
        one(body, {"x": half(1, 2, 6, 6)}, tmp_path)


def test_a_function_with_a_state_needs_one(tmp_path: Path) -> None:
    state = mb.state_tensor_placeholder((2, 32), dtype=types.fp16)
    inputs = {"x": half(2, 32), "kv": state}
    emulator = one(lambda x, kv: mb.add(x=x, y=mb.read_state(input=kv)), inputs, tmp_path)
    with pytest.raises(CallMismatch, match=r"expected the states kv, got none"):
        emulator.predict("f", {"x": np.zeros((2, 32), np.float32)})


def test_a_shape_known_only_at_run_time_is_refused_at_open(tmp_path: Path) -> None:
    def body(x: Any, at: Any) -> Any:
        return mb.slice_by_index(x=x, begin=at, end=mb.add(x=at, y=np.int32([2, 2])), name="cut")

    inputs = {"x": half(4, 5), "at": mb.placeholder((2,), dtype=types.int32)}
    with pytest.raises(UnknownOp, match=r"shape.*cut in function f"):
        one(body, inputs, tmp_path)


def test_a_failure_of_a_run_names_the_function(tmp_path: Path) -> None:
    table = np.zeros((3, 2), np.float16)
    emulator = one(
        lambda i: mb.gather(x=table, indices=i, axis=0, name="row"),
        {"i": mb.placeholder((1,), dtype=types.int32)},
        tmp_path,
    )
    with pytest.raises(UnitFailed, match="failed in f"):
        emulator.predict("f", {"i": np.int32([7])})


def test_functions_share_widened_weights(tmp_path: Path) -> None:
    weight = normal(1024, 1024, 1, 1).astype(np.float16)

    def wide(rows: int) -> Any:
        return function(
            {"x": half(1, 1024, 1, rows)},
            lambda x: mb.conv(x=x, weight=shared_weight("w", weight), name="y"),
        )

    path = save({f"t{rows}": wide(rows) for rows in (1, 2, 4, 8)}, tmp_path / "w.mlpackage")
    weights = path / "Data/com.apple.CoreML/weights/weight.bin"
    assert weights.stat().st_size < weight.nbytes * 1.02
    Emulator.open(path).close()  # brings the imports
    tracemalloc.start()
    try:
        emulator = Emulator.open(path)
        held, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 * weight.nbytes < held < 2.2 * weight.nbytes
    emulator.close()


def test_nan_and_infinity_stay_in_their_column_and_follow_ieee(tmp_path: Path) -> None:
    def body(x: Any, y: Any) -> list[Any]:
        both = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=1)
        normed = mb.layer_norm(x=both, axes=[1], epsilon=np.float16(1e-3))
        return [
            mb.conv(x=normed, weight=np.ones((8, 16, 1, 1), np.float16), name="rows"),
            mb.matmul(x=np.zeros((1, 2), np.float16), y=y, name="zero_times"),
            mb.reduce_max(x=y, axes=[0], keep_dims=True, name="highest"),
        ]

    emulator = one(body, {"x": half(1, 8, 1, 8), "y": half(2, 3)}, tmp_path)
    x = normal(1, 8, 1, 8)
    y = np.float32([[np.inf, np.nan, 1], [1, 2, 3]])
    clean = emulator.predict("f", {"x": x, "y": y})
    x[0, 3, 0, 2], x[0, 5, 0, 6] = np.nan, np.inf
    dirty = emulator.predict("f", {"x": x, "y": y})
    kept = [0, 1, 3, 4, 5, 7]
    assert np.array_equal(dirty["rows"][..., kept], clean["rows"][..., kept])
    assert np.isnan(dirty["rows"][..., [2, 6]]).all()
    np.testing.assert_array_equal(dirty["zero_times"], np.float32([[np.nan, np.nan, 0]]))
    np.testing.assert_array_equal(dirty["highest"], np.float32([[np.inf, np.nan, 3]]))
