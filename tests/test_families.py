"""Demand: every family goes from mlx-lm's own class through reader, graph, package and emulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.mlpackage import write_mlpackage
from ondevice.converters.parity import Replay, TokenTree, path_logits, stored_model
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.lint import lint
from ondevice.coreml.package import Package
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import folded

ROWS = (1, 8, 64)
STEPS = (40, 8, 8, 7, 5, 1, 1, 1)


@dataclass(frozen=True)
class Built:
    """A family's checkpoint, mlx-lm's model of it, and the drafter made of some of its layers."""

    model: Any
    checkpoint: Checkpoint
    package: Package
    embedding: np.ndarray[Any, np.dtype[np.float16]]


@pytest.fixture(scope="module", params=families.CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder: Path = tmp_path_factory.mktemp("family")
    model = families.write_checkpoint(request.param, folder / "source", seed=len(request.param))
    checkpoint = open_checkpoint(folder / "source")
    config = checkpoint.config
    weights = folded(checkpoint.tensor, config, range(config.num_layers))
    sources = [DrafterFunction(config, rows, 128).source(weights) for rows in ROWS]
    write_mlpackage(sources, folder / "d.mlpackage")
    embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float16)
    return Built(model, checkpoint, Package.open(folder / "d.mlpackage"), embedding)


def test_the_emulated_drafter_computes_what_mlx_lm_computes(built: Built) -> None:
    config = built.checkpoint.config
    trees = [TokenTree.random(config.vocab_size, STEPS, seed, branching=0.05) for seed in range(3)]
    rounded = stored_model(built.package, config, built.embedding)
    choices = []
    for seed, tree in enumerate(trees):
        expected = path_logits(rounded, tree)
        exact = Replay(Emulator(built.package), config, 128, built.embedding, seed)
        assert np.abs(exact.logits(tree, ROWS) - expected).max() < 1e-3
        half = Replay(Emulator(built.package, "fp16"), config, 128, built.embedding, seed)
        original = path_logits(built.model, tree)
        assert np.abs(expected - original).max() < 0.03 * original.std()
        choices.append(half.logits(tree, ROWS).argmax(-1) == original.argmax(-1))
    assert np.concatenate(choices).mean() >= 0.98


def test_the_lint_finds_only_narrow_rows_and_small_epsilons(built: Built) -> None:
    assert {finding.rule for finding in lint(built.package)} <= {"row-bytes", "epsilon"}


def test_coremltools_own_loader_takes_the_package(built: Built) -> None:
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto import load

    path = built.package.path
    spec = ct.utils.load_spec(str(path))
    program = load.load(
        spec, spec.specificationVersion, str(path / "Data/com.apple.CoreML/weights")
    )
    for name, function in program.functions.items():
        found = [op.op_type for op in function.operations if op.op_type != "const"]
        ours = [op.type for op in built.package.functions[name].ops if op.type != "const"]
        assert found == ours
