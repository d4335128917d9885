"""The trainer against its twin in torch: the same losses, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from distilling import random_texts

from ondevice.converters.distil.corpus import Batcher
from ondevice.converters.distil.student import START_SCALE, Student

torch = pytest.importorskip("torch", reason="the twin is written in torch")

STEPS = 100


def test_a_hundred_losses_are_those_of_the_twin(tmp_path: Path) -> None:
    from torch_student import TorchLearner, TorchStudent

    model = tiny.tiny_model(vocab_size=400)
    rows = sorted(np.random.default_rng(2).permutation(400)[:256].tolist())
    batcher = Batcher(random_texts(40, 400), rows, 400, 0.3)
    student = Student(model.tensors.__getitem__, model.config, (0, 1), rows)
    own = {name: tensor for name, tensor in model.tensors.items() if "embed" not in name}
    own["model.norm.weight"] = own["model.norm.weight"] * np.float32(START_SCALE)
    embedding = model.tensors["model.embed_tokens.weight"]
    config = json.loads((tiny.write_folder(model, tmp_path / "llama") / "config.json").read_text())
    twin = TorchLearner(TorchStudent(own, config, embedding, embedding[rows]))
    order = [places for epoch in range(40) for places in batcher.epoch(0, epoch, 128)][:STEPS]
    losses = []
    for step, places in enumerate(order):
        batch, rate = batcher.batch(places), 1.5e-3 * (1 - step / STEPS)
        losses.append((student.learn([batch], rate).loss, twin.learn([batch], rate).loss))
    found, expected = np.array(losses).T
    assert len(found) == STEPS
    assert found[-10:].mean() < found[:10].mean() - 0.3
    np.testing.assert_allclose(found, expected, atol=1e-3)
