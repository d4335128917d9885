"""Checkpoint -> drafter artifact: complete, reproducible, refused early, whole or not at all."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ondevice.artifact import (
    DRAFTER_EMBEDDING,
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
)
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.download import fetch_weights
from ondevice.converters.drafter import convert_drafter
from ondevice.converters.mlpackage import folder_bytes
from ondevice.converters.pair import prepare_pair
from ondevice.converters.parity import (
    Replay,
    TokenTree,
    path_logits,
    selected_model,
    stored_model,
)
from ondevice.converters.progress import Reporter
from ondevice.converters.verifier import write_verifier
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package, ops_digest, weights_digest
from ondevice.embeddings import Embedding
from ondevice.errors import ArtifactError, BadRequest, UnsupportedModel
from ondevice.home import downloads_folder
from ondevice.models.drafter_weights import folded
from ondevice.models.pairs import known_pair

SIZES: dict[str, Any] = {"row_counts": (1, 8), "context_sizes": (64, 128)}


@pytest.fixture(scope="module")
def converted(
    tiny_checkpoint: Checkpoint,
    tiny_verifier_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, DrafterManifest]:
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    manifest = convert_drafter(
        tiny_checkpoint, tiny_verifier_folder, folder, layers=[0, 1], **SIZES
    )
    return folder, manifest


def test_the_manifest_describes_the_package_beside_it(
    converted: tuple[Path, DrafterManifest], tiny_checkpoint: Checkpoint
) -> None:
    folder, manifest = converted
    assert DrafterManifest.read(folder / DRAFTER_FILE) == manifest
    package = Package.open(folder / DRAFTER_PACKAGE)
    assert manifest.weights_sha256 == weights_digest(package.path)
    assert manifest.ops_sha256 == ops_digest(package)
    assert manifest.tokenizer_sha256 == tiny_checkpoint.tokenizer_sha256
    assert manifest.sources == tiny_checkpoint.sources
    assert manifest.layers == [0, 1]
    assert (manifest.row_counts, manifest.context_sizes) == ([1, 8], [64, 128])
    assert manifest.logit_rows == [384]  # 264 tokens padded to three chunks
    assert {shape.name for shape in manifest.functions} == set(package.functions)
    for shape in manifest.functions:
        function = package.functions[shape.name]
        assert shape.name == f"t{shape.rows}_s{shape.context}"
        assert shape.inputs == {v.name: list(v.type.shape) for v in function.inputs}
        assert shape.outputs == {
            name: list(function.types[name].shape) for name in function.outputs
        }


def test_the_manifest_states_the_proof(converted: tuple[Path, DrafterManifest]) -> None:
    parity = converted[1].parity
    assert parity is not None
    assert parity.positions >= 40
    assert 0 < parity.max_error_rounded < 1e-3 < parity.max_error_unrounded < 5e-2
    assert parity.first_choice_agreement_fp16 >= 0.9


def test_the_ane_lint_finds_nothing_but_narrow_rows(
    converted: tuple[Path, DrafterManifest],
) -> None:
    # One row a step is one element in the layout's last axis; the angles' and masks' too.
    assert {line.split(":")[0] for line in converted[1].lint} <= {"row-bytes", "row"}


def test_the_embedding_is_the_verifiers_own_when_that_is_the_same(
    converted: tuple[Path, DrafterManifest], tiny_model: tiny.TinyModel, tiny_verifier_folder: Path
) -> None:
    folder, manifest = converted
    assert manifest.embedding_in == "verifier"
    assert sorted(file.name for file in folder.iterdir()) == [DRAFTER_FILE, DRAFTER_PACKAGE]
    files = sorted(tiny_verifier_folder.glob("*.safetensors"))
    embedding = Embedding.open(files, manifest.embedding_tensor, manifest.embedding_sha256)
    expected = tiny_model.tensors["model.embed_tokens.weight"].astype(np.float16)
    assert np.array_equal(embedding.rows(range(264)), expected)


@pytest.mark.parametrize(("dtype", "place"), [("float16", "verifier"), ("bfloat16", "drafter")])
def test_the_embedding_is_stored_once_more_only_when_the_verifiers_differs(
    tiny_checkpoint: Checkpoint,
    tiny_model: tiny.TinyModel,
    tmp_path: Path,
    dtype: Any,
    place: str,
) -> None:
    write_verifier(tiny_checkpoint, tmp_path / "verifier", dtype)
    manifest = convert_drafter(
        tiny_checkpoint, tmp_path / "verifier", tmp_path / "drafter", layers=[1], **SIZES
    )
    assert manifest.embedding_in == place
    own = tmp_path / "drafter" / DRAFTER_EMBEDDING
    assert own.exists() == (place == "drafter")
    files = [own] if own.exists() else sorted((tmp_path / "verifier").glob("*.safetensors"))
    embedding = Embedding.open(files, manifest.embedding_tensor, manifest.embedding_sha256)
    expected = tiny_model.tensors["model.embed_tokens.weight"].astype(np.float16)
    assert np.array_equal(embedding.rows(range(264)), expected)


def test_converting_twice_gives_the_same_recipe_and_weights(
    converted: tuple[Path, DrafterManifest],
    tiny_checkpoint: Checkpoint,
    tiny_verifier_folder: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "drafter"
    steps: list[tuple[int, int]] = []
    for _ in range(2):  # the second takes the first one's place
        again = convert_drafter(
            tiny_checkpoint,
            tiny_verifier_folder,
            folder,
            layers=[0, 1],
            progress=lambda done, total: steps.append((done, total)),
            **SIZES,
        )
    assert again == converted[1]
    assert sorted(file.name for file in folder.parent.iterdir()) == ["drafter"]
    first_run = steps[: len(steps) // 2]
    assert all(earlier < later for earlier, later in pairwise(first_run))
    assert first_run[-1][0] == first_run[-1][1]


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"layers": []}, "from 0 to 1, got"),
    ({"layers": [0, 2]}, "from 0 to 1, got"),
    ({"layers": [-1, 0]}, "from 0 to 1, got"),
    ({"layers": [1, 0]}, "ascending"),
    ({"layers": [0, 0]}, "ascending"),
    ({"layers": [0], "row_counts": ()}, "row counts"),
    ({"layers": [0], "row_counts": (0, 8)}, "row counts"),
    ({"layers": [0], "row_counts": (8, 8)}, "row counts"),
    ({"layers": [0], "context_sizes": ()}, "multiples of 32"),
    ({"layers": [0], "context_sizes": (64, 100)}, "multiples of 32"),
    ({"layers": [0], "context_sizes": (64, 64)}, "multiples of 32"),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
def test_impossible_requests_are_refused_and_leave_nothing(
    tiny_checkpoint: Checkpoint,
    tiny_verifier_folder: Path,
    tmp_path: Path,
    request_: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        convert_drafter(tiny_checkpoint, tiny_verifier_folder, tmp_path / "d", **request_)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_verifier_with_another_tokenizer_is_refused(
    tiny_checkpoint: Checkpoint, tiny_verifier_folder: Path, tmp_path: Path
) -> None:
    manifest = (tiny_verifier_folder / VERIFIER_FILE).read_text(encoding="utf-8")
    changed = manifest.replace(tiny_checkpoint.tokenizer_sha256, "0" * 64)
    assert changed != manifest
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / VERIFIER_FILE).write_text(changed, encoding="utf-8")
    with pytest.raises(ArtifactError, match="tokenizer"):
        convert_drafter(tiny_checkpoint, tmp_path / "verifier", tmp_path / "d", layers=[0])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["verifier"]


def test_a_conversion_that_fails_halfway_keeps_the_old_drafter(
    tiny_verifier_folder: Path, tmp_path: Path
) -> None:
    model = tiny.tiny_model()
    model.tensors["model.layers.1.mlp.gate_proj.weight"][3, 3] = 1e6
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "llama"))
    target = tmp_path / "out" / "drafter"
    convert_drafter(checkpoint, tiny_verifier_folder, target, layers=[0], **SIZES)
    before = {file: file.stat().st_mtime_ns for file in target.rglob("*")}
    with pytest.raises(UnsupportedModel, match="fp16 holds"):
        convert_drafter(checkpoint, tiny_verifier_folder, target, layers=[0, 1], **SIZES)
    assert {file: file.stat().st_mtime_ns for file in target.rglob("*")} == before
    assert sorted(file.name for file in target.parent.iterdir()) == ["drafter"]


def tree_of_text(tokens: list[int], steps: tuple[int, ...], seed: int) -> TokenTree:
    """A tree whose paths read like text: a child continues its parent's place, a branch jumps."""
    shape = TokenTree.random(1, steps, seed, branching=0.07)
    rng = np.random.default_rng(seed)
    places: list[int] = []
    for node, parent in enumerate(shape.parents):
        continues = parent == node - 1 and node > 0
        places.append(places[parent] + 1 if continues else int(rng.integers(len(tokens) - 200)))
    return TokenTree(tuple(tokens[place] for place in places), shape.parents, steps)


@pytest.mark.slow
def test_the_default_drafter_computes_its_layers_on_500_positions_of_text() -> None:
    folder = prepare_pair("smollm2", quiet=True)
    source = known_pair("smollm2").source
    checkpoint = open_checkpoint(fetch_weights(source, downloads_folder(), Reporter(quiet=True)))
    manifest = DrafterManifest.read(folder / "drafter" / DRAFTER_FILE)
    package = Package.open(folder / "drafter" / DRAFTER_PACKAGE)
    config = checkpoint.config.with_layers(manifest.num_layers)
    embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float16)
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    tokens: list[int] = checkpoint.tokenizer.encode(text)
    steps = (64, 20, 8, 8, 8, 7, 5, 1, 1, 1, 1, 1)

    rounded = stored_model(package, config, embedding)
    unrounded = selected_model(checkpoint.tensor, checkpoint.config, manifest.layers)
    exact, half = Emulator(package), Emulator(package, "fp16")
    errors, unrounded_errors, choices = [], [], []
    for seed in range(4):
        tree = tree_of_text(tokens, steps, seed)
        context = manifest.context_sizes[seed % len(manifest.context_sizes)]
        expected = path_logits(rounded, tree)
        replays = [Replay(run, config, context, embedding, seed) for run in (exact, half)]
        logits, half_logits = (replay.logits(tree, manifest.row_counts) for replay in replays)
        errors.append(np.abs(logits - expected).max())
        unrounded_errors.append(np.abs(logits - path_logits(unrounded, tree)).max())
        choices.append(half_logits.argmax(1) == expected.argmax(1))
    agreement = np.concatenate(choices)
    print(
        f"rounded {max(errors):.2g}, unrounded {max(unrounded_errors):.2g}, "
        f"fp16 first choice {agreement.mean():.1%} of {agreement.size}"
    )
    assert agreement.size >= 500
    assert max(errors) < 1e-3
    assert max(unrounded_errors) < 5e-2
    assert agreement.mean() >= 0.98


@pytest.mark.slow
def test_the_default_drafters_six_functions_cost_two_percent_over_its_weights() -> None:
    folder = prepare_pair("smollm2", quiet=True)
    source = known_pair("smollm2").source
    checkpoint = open_checkpoint(fetch_weights(source, downloads_folder(), Reporter(quiet=True)))
    manifest = DrafterManifest.read(folder / "drafter" / DRAFTER_FILE)
    weights = folded(checkpoint.tensor, checkpoint.config, manifest.layers)
    assert len(manifest.functions) == 6
    assert folder_bytes(folder / "drafter" / DRAFTER_PACKAGE) <= 1.02 * weights.nbytes
