"""What a drafter folder must be to be opened, and where its embedding is read from."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from drafter_oracle import NumpyRuntime
from tiny import TinyModel

from ondevice.artifact import DRAFTER_FILE, DRAFTER_PACKAGE, VERIFIER_FILE
from ondevice.coreml.package import weights_file
from ondevice.drafter import CoreMLDrafter
from ondevice.embeddings import Embedding
from ondevice.errors import ArtifactError, UserError

TENSOR = "model.embed_tokens.weight"


@pytest.fixture
def pair(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


def opened(pair: Path) -> CoreMLDrafter:
    return CoreMLDrafter.open(pair / "drafter", pair / "verifier")


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    assert changes.keys() <= content.keys()
    file.write_text(json.dumps(content | changes))


def refused(pair: Path, *words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        opened(pair)
    message = str(caught.value)
    assert "\n" not in message
    assert "convert" in message
    assert isinstance(caught.value, UserError)
    for word in words:
        assert word in message


def test_a_converted_pair_opens_with_the_emulator(tiny_pair: Path) -> None:
    drafter = opened(tiny_pair)
    assert drafter.name == "drafter"
    assert drafter.runtime_name == "emulator-fp32"
    drafter.close()


def test_weights_that_changed_are_refused(pair: Path) -> None:
    weights = weights_file(pair / "drafter" / DRAFTER_PACKAGE)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(pair, "weights", "expected", "got")


def test_ops_that_changed_are_refused(pair: Path) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, ops_sha256="0" * 64)
    refused(pair, "ops", "000000000000")


def test_another_tokenizer_is_refused(pair: Path) -> None:
    edit(pair / "verifier" / VERIFIER_FILE, tokenizer_sha256="ab" * 32)
    refused(pair, "tokenizer", "abababababab")


def test_another_vocabulary_is_refused(pair: Path) -> None:
    edit(pair / "verifier" / VERIFIER_FILE, vocab_size=7)
    refused(pair, "7")


def test_an_embedding_that_changed_is_refused(pair: Path) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, embedding_sha256="cd" * 32)
    refused(pair, TENSOR, "cdcdcdcdcdcd")


@pytest.mark.parametrize(
    ("key", "value"), [("embedding_tensor", "no.such"), ("embedding_in", "drafter")]
)
def test_an_embedding_that_is_not_there_is_refused(pair: Path, key: str, value: str) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, **{key: value})
    refused(pair)


def test_a_function_that_is_missing_is_refused(pair: Path) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, row_counts=[1, 8, 16])
    refused(pair, "row_counts")
    edit(pair / "drafter" / DRAFTER_FILE, row_counts=[1, 8])
    functions = json.loads((pair / "drafter" / DRAFTER_FILE).read_text())["functions"]
    functions[0]["name"] = "no_such"
    edit(pair / "drafter" / DRAFTER_FILE, functions=functions)
    refused(pair, "no_such")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context_sizes", []),
        ("row_counts", []),
        ("context_sizes", [64, 64, 256]),
        ("row_counts", [1, -8]),
        ("functions", []),
        ("num_layers", 0),
        ("num_layers", 2),
        ("layers", [0, 1]),
        ("num_heads", 3),
        ("num_kv_heads", 4),
        ("num_kv_heads", 0),
        ("head_dim", 16),
        ("head_dim", 33),
        ("hidden_size", 128),
        ("logit_rows", []),
        ("logit_rows", [128]),
        ("logit_rows", [128, 256]),
        ("logit_rows", [383]),
        ("row_to_token", []),
        ("row_to_token", [0, 1]),
        ("row_to_token", [7, 7]),
        ("row_to_token", [0, 10**6]),
        ("row_to_token", [-1]),
        ("rope", {"theta": 0}),
        ("rope", {"theta": -10000.0}),
        ("rope", {"theta": 1e-300}),
        ("rope", {"theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}),
        (
            "rope",
            {
                "theta": 1e4,
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 1,
                "original_context": 64,
            },
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_when_the_folder_is_opened(
    pair: Path, key: str, value: Any
) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, **{key: value})
    refused(pair)


def test_layers_that_manifest_and_functions_agree_on_must_be_in_the_package(pair: Path) -> None:
    edit(pair / "drafter" / DRAFTER_FILE, num_layers=2, layers=[0, 1])
    refused(pair, "k_1")


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_shapes_that_differ_from_the_manifest_are_refused(pair: Path, part: str) -> None:
    file = pair / "drafter" / DRAFTER_FILE
    functions = json.loads(file.read_text())["functions"]
    name = sorted(functions[0][part])[0]
    functions[0][part][name][-1] += 1
    edit(file, functions=functions)
    refused(pair, name)
    functions[0][part]["surplus"] = functions[0][part].pop(name)
    edit(file, functions=functions)
    refused(pair)


def test_a_runtime_that_does_not_fit_is_closed_again(pair: Path, tiny_model: TinyModel) -> None:
    runtime = NumpyRuntime(tiny_model, (1, 8), (64, 256))  # two layers, the package has one
    with pytest.raises(ArtifactError, match="k_1"):
        CoreMLDrafter.open(pair / "drafter", pair / "verifier", lambda path: runtime)
    assert runtime.closed


def test_files_that_are_missing_or_no_package_are_refused(pair: Path) -> None:
    package = pair / "drafter" / DRAFTER_PACKAGE
    shutil.rmtree(package)
    refused(pair)
    (pair / "drafter" / DRAFTER_FILE).write_text("{}")
    refused(pair, DRAFTER_FILE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embedding_rows_are_those_of_the_file_rounded_to_half(tmp_path: Path, dtype: str) -> None:
    matrix = mx.random.normal((50, 24), key=mx.random.key(1)).astype(getattr(mx, dtype))
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    mx.save_safetensors(str(files[0]), {"x": mx.zeros((3,))})
    mx.save_safetensors(str(files[1]), {"odd": mx.zeros((1,), mx.uint8), TENSOR: matrix})
    stored = np.array(matrix.view(mx.uint8)).tobytes()
    embedding = Embedding.open(files, TENSOR, hashlib.sha256(stored).hexdigest())
    assert embedding.shape == (50, 24)
    rows = embedding.rows([49, 0, 7, 7])
    assert rows.dtype == np.float16
    assert np.array_equal(rows, np.array(matrix.astype(mx.float16))[[49, 0, 7, 7]])


def test_an_embedding_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for array in (mx.zeros((4, 4), mx.int32), mx.zeros((4,))):
        mx.save_safetensors(str(file), {TENSOR: array})
        with pytest.raises(ArtifactError, match="embedding"):
            Embedding.open([file], TENSOR, "")
    data = file.read_bytes()
    for cut in (data[:5], data[:40], data[:-8], b"\xff" * 64):
        file.write_bytes(cut)
        with pytest.raises(ArtifactError):
            Embedding.open([file], TENSOR, "")
    with pytest.raises(ArtifactError, match="missing"):
        Embedding.open([], TENSOR, "")
