"""The package reader: what it reads, its digests, one line for a broken package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlpackages import ct, function, half, mb, save, shared_weight

from ondevice.coreml.blob import storage_bytes, unpack
from ondevice.coreml.package import (
    Package,
    TensorType,
    listing,
    ops_digest,
    weights_digest,
    weights_file,
)
from ondevice.errors import ArtifactError

rng = np.random.default_rng(5)
FIRST = rng.standard_normal((32, 32, 1, 1)).astype(np.float16)
SECOND = rng.standard_normal((32, 32, 1, 1)).astype(np.float16)


def build(
    path: Path,
    gain: float = 2.0,
    rows: int = 8,
    order: tuple[str, str] = ("first", "second"),
    last: str = "relu",
    inner: str = "layer",
) -> Path:
    """Two layers and a gain, in two functions that share the weights."""
    weights = {"first": FIRST, "second": SECOND}

    def body(x: Any) -> Any:
        known = {name: shared_weight(name, value) for name, value in weights.items()}
        for name in order:
            x = mb.conv(x=x, weight=known[name], name=f"{inner}_{name}")
        x = mb.mul(x=x, y=np.float16(gain))
        return getattr(mb, last)(x=x, name="y")

    functions = {f"t{n}": function({"x": half(1, 32, 1, n)}, body) for n in (1, rows)}
    return save(functions, path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package") / "good.mlpackage")


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy.mlpackage"))


def test_functions_ops_and_constants_are_read(good: Path) -> None:
    package = Package.open(good)
    assert list(package.functions) == ["t1", "t8"]
    assert package.default_function == "t1"
    function = package.functions["t8"]
    assert [(v.name, str(v.type), v.is_state) for v in function.inputs] == [
        ("x", "fp16[1,32,1,8]", False)
    ]
    assert function.outputs == ("y",)
    assert function.types["y"] == TensorType("fp16", (1, 32, 1, 8))
    assert [op.type for op in function.ops if op.type != "const"] == ["conv", "conv", "mul", "relu"]
    weights = [c for c in function.constants.values() if c.blob is not None]
    assert [c.type.dtype for c in weights] == ["fp16", "fp16"]
    np.testing.assert_array_equal(weights[0].read(), FIRST)
    np.testing.assert_array_equal(weights[1].read(), SECOND)
    conv = next(op for op in function.ops if op.type == "conv")
    (pad_type,) = conv.inputs["pad_type"]
    assert isinstance(pad_type, str)
    assert function.constants[pad_type].read() == "valid"


@pytest.mark.parametrize("size", [4, 400])  # immediate in the protobuf, and in the weight file
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8", "int8"])
def test_constants_of_every_type_come_back(tmp_path: Path, dtype: str, size: int) -> None:
    value = (rng.standard_normal(size) * 50 + 60).astype(dtype)

    def body(x: Any) -> Any:
        constant = mb.const(val=value)
        return mb.add(x=mb.cast(x=constant, dtype="fp16"), y=x, name="y")

    package = Package.open(save({"f": function({"x": half(1)}, body)}, tmp_path / "c.mlpackage"))
    constants = package.functions["f"].constants.values()
    (found,) = [c for c in constants if c.type.shape == (size,)]
    assert (found.blob is None) == (size == 4)
    got = found.read()
    assert isinstance(got, np.ndarray)
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 0


@given(st.data(), st.sampled_from(["uint1", "uint2", "uint3", "uint4", "uint6", "int4"]))
@settings(deadline=None, max_examples=60)
def test_elements_under_a_byte_are_packed_least_bit_first(data: Any, dtype: str) -> None:
    bits = int(dtype[-1])
    signed = dtype.startswith("int")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    values = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=40))
    number = sum((value % 2**bits) << (bits * place) for place, value in enumerate(values))
    size = storage_bytes(dtype, (len(values),))
    packed = np.frombuffer(number.to_bytes(size, "little"), np.uint8)
    assert unpack(packed, dtype, (len(values),)).tolist() == values


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_a_long_tensor_of_elements_under_a_byte_is_read_to_its_end(bits: int) -> None:
    count = 150_001
    packed = np.random.default_rng(bits).integers(
        0, 256, storage_bytes(f"uint{bits}", (count,)), np.uint8
    )
    planes = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    expected = np.packbits(planes, axis=1, bitorder="little")[:, 0]
    np.testing.assert_array_equal(unpack(packed, f"uint{bits}", (count,)), expected)


def test_builds_that_differ_in_inner_names_have_one_digest(good: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again.mlpackage", inner="other")
    names = [[op.name for op in Package.open(p).functions["t8"].ops] for p in (good, again)]
    assert names[0] != names[1]
    assert ops_digest(Package.open(again)) == ops_digest(Package.open(good))
    assert weights_digest(again) == weights_digest(good)
    assert weights_file(good).is_file()


CHANGES = {
    "a small constant": {"gain": 3.0},
    "a shape": {"rows": 4},
    "an op": {"last": "tanh"},
    "the weights' places": {"order": ("second", "first")},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_any_change_of_the_program_changes_the_digest(
    good: Path, tmp_path: Path, change: Any
) -> None:
    changed = Package.open(build(tmp_path / "changed.mlpackage", **change))
    assert ops_digest(changed) != ops_digest(Package.open(good))


def test_listing_names_no_offset_and_no_inner_name(good: Path) -> None:
    text = "\n".join(listing(Package.open(good)))
    assert "layer_" not in text
    assert "weight=(fp16[32,32,1,1] blob 1)" in text
    assert "y=(fp16[] 2.0)" in text


def broken(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        Package.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_folder_and_no_manifest(copy: Path, tmp_path: Path) -> None:
    assert "no Core ML package" in broken(tmp_path / "nothing.mlpackage")
    (copy / "Manifest.json").unlink()
    assert "Manifest.json cannot be read" in broken(copy)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rootModelIdentifier": 1}', '"x"', "\x00"])
def test_foreign_manifest(copy: Path, text: str) -> None:
    (copy / "Manifest.json").write_text(text)
    assert "Manifest.json cannot be read" in broken(copy)


def test_missing_model(copy: Path) -> None:
    manifest = json.loads((copy / "Manifest.json").read_text())
    item = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    (copy / "Data" / item).unlink()
    assert "model.mlmodel" in broken(copy)


def test_model_that_is_no_protobuf(copy: Path) -> None:
    (copy / "Data/com.apple.CoreML/model.mlmodel").write_bytes(b"\xff" * 100)
    assert "not a Core ML model" in broken(copy)


def test_empty_model(copy: Path) -> None:
    (copy / "Data/com.apple.CoreML/model.mlmodel").write_bytes(b"")
    assert "expected an ML program" in broken(copy)


@given(keep=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=25)
def test_truncated_model_is_one_line(
    good: Path, tmp_path_factory: pytest.TempPathFactory, keep: float
) -> None:
    path = Path(shutil.copytree(good, tmp_path_factory.mktemp("cut") / "p.mlpackage"))
    model = path / "Data/com.apple.CoreML/model.mlmodel"
    content = model.read_bytes()
    model.write_bytes(content[: int(len(content) * keep)])
    broken(path)


@pytest.mark.parametrize("size", [0, 8, 63, 64, 100, 2000, 4287])
def test_truncated_weights(copy: Path, size: int) -> None:
    weights = weights_file(copy)
    assert weights.stat().st_size == 64 + 2 * (64 + FIRST.nbytes)
    weights.write_bytes(weights.read_bytes()[:size])
    assert "weight" in broken(copy)


def test_missing_weights(copy: Path) -> None:
    weights_file(copy).unlink()
    message = broken(copy)
    assert "no readable weights" in message
    assert message.count(str(copy)) == 1


@pytest.mark.parametrize("place", ["outside", "beside", "above"])
def test_a_constant_in_any_other_file_is_refused(copy: Path, tmp_path: Path, place: str) -> None:
    """Each file holds the very bytes: only the name is wrong, and no digest would cover it."""
    name = {
        "outside": str(tmp_path / "other.bin"),
        "beside": "@model_path/weights/other.bin",
        "above": "@model_path/../../../other.bin",
    }[place]
    weights = weights_file(copy)
    for other in (tmp_path / "other.bin", weights.parent / "other.bin"):
        shutil.copy(weights, other)
    model_path = weights.parent.parent / "model.mlmodel"
    model = ct.proto.Model_pb2.Model.FromString(model_path.read_bytes())
    for program in model.mlProgram.functions.values():
        for op in program.block_specializations[program.opset].operations:
            value = op.attributes["val"] if op.type == "const" else None
            if value is not None and value.WhichOneof("value") == "blobFileValue":
                value.blobFileValue.fileName = name
    model_path.write_bytes(model.SerializeToString())
    assert "other.bin" in broken(copy)


def test_a_model_outside_of_its_package_is_refused(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy / "Data/com.apple.CoreML", tmp_path / "elsewhere")
    manifest = json.loads((copy / "Manifest.json").read_text())
    for path in (tmp_path / "elsewhere/model.mlmodel", "../../elsewhere/model.mlmodel"):
        manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = str(path)
        (copy / "Manifest.json").write_text(json.dumps(manifest))
        assert "outside" in broken(copy)


@pytest.mark.parametrize(
    ("offset", "message"), [(4, "blob version"), (64, "no blob at 64"), (68, "expected fp16"),
                            (72, "bytes in the blob")])  # fmt: skip
def test_foreign_weights(copy: Path, offset: int, message: str) -> None:
    weights = weights_file(copy)
    content = bytearray(weights.read_bytes())
    content[offset] ^= 0x55
    weights.write_bytes(content)
    assert message in broken(copy)


def test_a_value_defined_twice_is_refused(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        mb.relu(x=x, name="twice")
        return mb.abs(x=mb.tanh(x=x, name="twice"), name="y")

    path = save({"f": function({"x": half(2)}, body)}, tmp_path / "p.mlpackage")
    assert "twice is defined twice" in broken(path)


def test_reading_needs_no_import_of_coremltools(good: Path) -> None:
    script = (
        "import sys; from ondevice.coreml.emulator import Emulator; "
        f"Emulator.open({str(good)!r}); "
        "sys.exit(bool({'coremltools', 'mlx', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_package_without_weight_file_has_a_weights_digest(tmp_path: Path) -> None:
    path = save({"f": function({"x": half(2)}, lambda x: mb.relu(x=x, name="y"))},
                tmp_path / "p.mlpackage")  # fmt: skip
    shutil.rmtree(path / "Data/com.apple.CoreML/weights", ignore_errors=True)
    assert weights_digest(path) == weights_digest(path)
    assert Package.open(path).functions["f"].outputs == ("y",)
