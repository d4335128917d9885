"""A trained drafter's file, and what the converter and the runtime make of it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny

from ondevice.apps.twin import mlx_twin
from ondevice.artifact import DRAFTER_FILE, DrafterManifest, file_sha256
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.distil.card import Card
from ondevice.converters.distil.evaluation import Passage, drafter_model, evaluate
from ondevice.converters.mlxmodel import mlx_model
from ondevice.converters.pair import write_pair
from ondevice.converters.trained import (
    TrainedDrafter,
    TrainedHeader,
    check_trained,
    read_trained,
    rounded,
    write_trained,
)
from ondevice.drafter import CoreMLDrafter
from ondevice.errors import ArtifactError
from ondevice.models.pairs import DrafterRecipe, models_folder
from ondevice.records import DraftRow, NodeToken
from ondevice.sampling import Law, SamplingParams
from ondevice.units import DraftRequest

VOCABULARY, ROWS = 400, 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model = tiny.tiny_model(vocab_size=VOCABULARY, num_layers=3)
    return open_checkpoint(tiny.write_folder(model, tmp_path_factory.mktemp("three") / "llama"))


@pytest.fixture(scope="module")
def trained(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> TrainedDrafter:
    """Random weights of two layers, some rows of the vocabulary."""
    path = tmp_path_factory.mktemp("trained") / "drafter.safetensors"
    own = tiny.tiny_model(seed=9, vocab_size=VOCABULARY)
    tensors = {name: value for name, value in own.tensors.items() if "embed" not in name}
    rows = sorted(np.random.default_rng(3).permutation(VOCABULARY)[:ROWS].tolist())
    header = TrainedHeader(
        layers=(0, 2),
        verifier="three",
        verifier_sha256=tuple(source.sha256 for source in checkpoint.sources),
        tokenizer_sha256=checkpoint.tokenizer_sha256,
    )
    write_trained(path, header, rows, tensors)
    return read_trained(path)


@pytest.fixture(scope="module")
def pair(
    checkpoint: Checkpoint, trained: TrainedDrafter, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("trained-pair") / "pair"
    recipe = DrafterRecipe(trained=str(trained.path), row_counts=(1, 8), context_sizes=(64,))
    write_pair(checkpoint, folder, name="three", drafter=recipe, quiet=True)
    return folder


def test_rounding_is_within_half_a_level_of_each_channel() -> None:
    values = np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32)
    values[3] = 0
    whole, scale = rounded(values)
    error = np.abs(whole * scale[:, None] - values)
    assert (error <= np.abs(values).max(axis=1, keepdims=True) / 254 + 1e-6).all()
    assert np.abs(whole).max() == 127


def test_the_manifest_says_what_was_learned_from_what(
    pair: Path, trained: TrainedDrafter, checkpoint: Checkpoint
) -> None:
    manifest = DrafterManifest.read(pair / "drafter" / DRAFTER_FILE)
    assert manifest.layers == [0, 2]
    assert manifest.vocab_size == VOCABULARY
    assert manifest.row_to_token == list(trained.row_to_token)
    assert [source.sha256 for source in manifest.sources] == [
        *(source.sha256 for source in checkpoint.sources),
        trained.source.sha256,
    ]


def test_the_runtime_proposes_what_the_student_would(
    pair: Path, trained: TrainedDrafter, checkpoint: Checkpoint
) -> None:
    verifier = mlx_model(
        checkpoint.config, {name: checkpoint.tensor(name) for name in checkpoint.names()}
    )
    student = drafter_model(verifier, trained.row_to_token, trained.tensors)
    twin = mlx_twin(pair / "drafter", pair / "verifier")
    drafter = CoreMLDrafter.open(pair / "drafter", pair / "verifier")
    law, session = Law(SamplingParams(), VOCABULARY), drafter.open_session()
    tokens = np.random.default_rng(1).integers(4, VOCABULARY, 20).tolist()
    for position, token in enumerate(tokens):
        row, node = DraftRow(position, ()), NodeToken(position, token)
        request = DraftRequest(session, 0, (row,), (node,), (), 4, "coupled", law)
        proposals = drafter.draft(request).proposals
        text = mx.array([tokens[: position + 1]])
        logits = np.array(student(text)[0, -1])
        log_q = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = [trained.row_to_token[place] for place in np.argsort(-logits)[:4]]
        assert proposals[0].log_q == pytest.approx(float(log_q.max()), abs=0.02)
        assert {each.token for each in proposals} <= set(trained.row_to_token)
        whole = np.array(twin(text)[0, -1])
        assert whole.shape == (VOCABULARY,)
        assert int(whole.argmax()) == best[0]


def test_a_student_that_is_the_verifier_foretells_everything(checkpoint: Checkpoint) -> None:
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    verifier = mlx_model(checkpoint.config, tensors)
    own = {name: value for name, value in tensors.items() if "embed" not in name}
    rows = list(range(VOCABULARY))
    text = tuple(np.random.default_rng(0).integers(4, VOCABULARY, 50).tolist())
    found = evaluate(verifier, drafter_model(verifier, rows, own), rows, [Passage("a", text, 10)])
    figures = found["all"]["with_loops"]
    assert figures["tokens"] == 40
    assert figures["first_choice"] == 1
    assert figures["overlap"] == pytest.approx(1, abs=1e-4)
    assert figures["accepted_chain_4"] == pytest.approx(4)


def test_a_drafter_of_another_verifier_is_refused(trained: TrainedDrafter, tmp_path: Path) -> None:
    other = tiny.tiny_model(vocab_size=VOCABULARY, hidden_size=96)
    checkpoint = open_checkpoint(tiny.write_folder(other, tmp_path / "llama"))
    with pytest.raises(ArtifactError, match="does not fit"):
        check_trained(trained, checkpoint)


def test_a_damaged_file_is_refused(trained: TrainedDrafter, tmp_path: Path) -> None:
    damaged = tmp_path / "drafter.safetensors"
    damaged.write_bytes(trained.path.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="is no trained drafter"):
        read_trained(damaged)


def test_the_shipped_card_speaks_of_the_shipped_file_and_prompts() -> None:
    card = Card.model_validate_json((models_folder() / "smollm2-drafter.json").read_text("utf-8"))
    drafter = models_folder() / card.file
    assert card.file_sha256 == file_sha256(drafter)
    assert card.file_bytes == drafter.stat().st_size <= 20_000_000
    assert card.heldout_sha256 == file_sha256(models_folder() / "heldout.jsonl")
    assert str(card.heldout_sha256) in (models_folder() / "README.md").read_text("utf-8")
    figures = card.acceptance["Held-out prompts, greedy"]["all"]["with_loops"]
    shown = f"| all | {figures['tokens']:.0f} | {figures['first_choice']:.1%} |"
    assert shown in (models_folder() / "README.md").read_text("utf-8")
