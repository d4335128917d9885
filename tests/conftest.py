"""Tiny models shared by the whole suite; read-only: a test that changes files copies them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.verifier import write_verifier


@pytest.fixture(scope="session")
def tiny_model() -> tiny.TinyModel:
    return tiny.tiny_model()


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny_model: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return open_checkpoint(tiny.write_folder(tiny_model, folder))


@pytest.fixture(scope="session")
def tiny_verifier_folder(
    tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tiny-verifier") / "verifier"
    write_verifier(tiny_checkpoint, folder)
    return folder
