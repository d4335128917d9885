"""Checkpoint -> drafter artifact: a Core ML package made of some of the model's layers, proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np

from ondevice.artifact import (
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
    FunctionShape,
    ParityResult,
    RopeManifest,
    SourceFile,
    VerifierManifest,
    check_tokenizer,
    replacing,
)
from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.embedding import TENSOR, EmbeddingPlace, place_embedding
from ondevice.converters.mlpackage import folder_bytes, write_mlpackage
from ondevice.converters.parity import check_parity
from ondevice.converters.progress import Progress
from ondevice.converters.trained import TrainedDrafter, check_trained
from ondevice.coreml.lint import lint
from ondevice.coreml.package import Package, ops_digest, weights_digest
from ondevice.errors import BadRequest, RuntimeFailure
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import Tensors, folded, head_partition

CONTEXT_MULTIPLE = 32  # slots; a cache's last axes must be multiples of 32 on the Neural Engine
MAX_OVERHEAD = 0.02  # of the weights: all that a package may hold besides them
SMALL_GRAPH_BYTES = 1024**2  # a tiny model's graph may take this much whatever its weights

_STEPS = 4


def convert_drafter(
    checkpoint: Checkpoint,
    verifier_folder: Path,
    folder: Path,
    *,
    layers: Sequence[int] | None = None,
    trained: TrainedDrafter | None = None,
    row_counts: Sequence[int] = (1, 8, 64),
    context_sizes: Sequence[int] = (512, 2048),
    progress: Progress | None = None,
) -> DrafterManifest:
    """Write the drafter at `folder`, whole or not at all.

    It is made of `layers` of `checkpoint`, or is the one that `trained` holds. One package holds a
    function for each row count (rows a step) and context size (slots). The embedding is referred to
    in `verifier_folder` when the verifier stores the same values. Raises BadRequest for impossible
    layers or sizes, ArtifactError for a verifier with another tokenizer or a trained drafter of
    another verifier, UnsupportedModel when a weight does not fit fp16, RuntimeFailure when the
    package does not compute what mlx-lm does.
    """
    network = _Network.trained(checkpoint, trained) if trained else _Network.cut(checkpoint, layers)
    _check_sizes(row_counts, context_sizes)
    verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
    check_tokenizer(
        f"the drafter's source {checkpoint.label}", checkpoint.tokenizer_sha256, verifier
    )
    functions = [
        DrafterFunction(network.config, rows, context)
        for rows in row_counts
        for context in context_sizes
    ]

    def report(done: int) -> None:
        if progress is not None:
            progress(done, _STEPS)

    with replacing(folder) as scratch:
        scratch.mkdir()
        report(0)
        weights = folded(network.tensors, network.config, network.places)
        report(1)
        path = scratch / DRAFTER_PACKAGE
        write_mlpackage([function.source(weights) for function in functions], path)
        _check_size(folder_bytes(path), weights.nbytes)
        report(2)
        rows = checkpoint.tensor(TENSOR).astype(np.float16)
        place = place_embedding(rows, verifier_folder, scratch)
        report(3)
        package = Package.open(path)
        parity = check_parity(
            package, network.tensors, network.config, network.places, rows, functions
        )
        manifest = _manifest(checkpoint, network, functions, package, place, parity)
        manifest.write(scratch / DRAFTER_FILE)
        report(4)
    return manifest


@dataclass(frozen=True, slots=True)
class _Network:
    """What the package computes.

    tensors by Hugging Face name, of which the layers `places` are taken; `layers` of the checkpoint
    they are, or were before training; row_to_token: as the manifest has it.
    """

    config: ModelConfig
    tensors: Tensors
    places: tuple[int, ...]
    layers: tuple[int, ...]
    row_to_token: list[int] | None
    sources: list[SourceFile]

    @classmethod
    def cut(cls, checkpoint: Checkpoint, layers: Sequence[int] | None) -> Self:
        """Layers of the checkpoint as they are."""
        chosen = tuple(layers or ())
        _check_layers(checkpoint.config, chosen)
        config = checkpoint.config.with_layers(len(chosen))
        return cls(config, checkpoint.tensor, chosen, chosen, None, checkpoint.sources)

    @classmethod
    def trained(cls, checkpoint: Checkpoint, trained: TrainedDrafter) -> Self:
        """A student of the checkpoint."""
        check_trained(trained, checkpoint)
        config = trained.config(checkpoint.config)
        return cls(
            config=config,
            tensors=partial(trained.tensor, checkpoint),
            places=tuple(range(config.num_layers)),
            layers=trained.header.layers,
            row_to_token=list(trained.row_to_token),
            sources=[*checkpoint.sources, trained.source],
        )


def _manifest(
    checkpoint: Checkpoint,
    network: _Network,
    functions: Sequence[DrafterFunction],
    package: Package,
    place: EmbeddingPlace,
    parity: ParityResult,
) -> DrafterManifest:
    config = network.config
    return DrafterManifest(
        family=config.family,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=checkpoint.config.vocab_size,
        rope=_rope(config),
        layers=list(network.layers),
        row_counts=list(dict.fromkeys(function.rows for function in functions)),
        context_sizes=list(dict.fromkeys(function.context for function in functions)),
        functions=[_shape(package, function) for function in functions],
        logit_rows=head_partition(config.vocab_size),
        row_to_token=network.row_to_token,
        embedding_in=place.folder,
        embedding_tensor=place.tensor,
        embedding_sha256=place.sha256,
        compression="fp16",
        weights_sha256=weights_digest(package.path),
        ops_sha256=ops_digest(package),
        tokenizer_sha256=checkpoint.tokenizer_sha256,
        sources=network.sources,
        converter_version=version("ondevice"),
        parity=parity,
        lint=[str(finding) for finding in lint(package)],
    )


def _check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    last = config.num_layers - 1
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] > last:
        raise BadRequest(
            f"drafter layers: expected ascending indices from 0 to {last}, got {list(layers)}"
        )


def _check_sizes(row_counts: Sequence[int], context_sizes: Sequence[int]) -> None:
    if not row_counts or min(row_counts) < 1 or len(set(row_counts)) < len(row_counts):
        raise BadRequest(
            f"drafter row counts: expected different counts from 1 on, got {list(row_counts)}"
        )
    wrong = [size for size in context_sizes if size < 1 or size % CONTEXT_MULTIPLE]
    if not context_sizes or wrong or len(set(context_sizes)) < len(context_sizes):
        raise BadRequest(
            f"drafter context sizes: expected different multiples of {CONTEXT_MULTIPLE}, "
            f"got {list(context_sizes)}"
        )


def _check_size(package_bytes: int, weight_bytes: int) -> None:
    """RuntimeFailure when weights are stored twice: coremltools shares them by a private call."""
    allowed = max(MAX_OVERHEAD * weight_bytes, SMALL_GRAPH_BYTES)
    if package_bytes - weight_bytes > allowed:
        raise RuntimeFailure(
            f"the drafter package takes {package_bytes} bytes for {weight_bytes} bytes of weights, "
            f"expected at most {MAX_OVERHEAD:.0%} more; check the coremltools version"
        )


def _shape(package: Package, function: DrafterFunction) -> FunctionShape:
    """Names and shapes as the package has them; coremltools renames what it takes for unsafe."""
    built = package.functions[function.name]
    inputs = {value.name: value.type.shape for value in built.inputs}
    outputs = {name: built.types[name].shape for name in built.outputs}
    if inputs != function.inputs() or outputs != function.outputs():
        raise RuntimeFailure(
            f"{function.name} of the drafter package has other inputs or outputs than it was built "
            "with; check the coremltools version"
        )
    return FunctionShape(
        name=function.name,
        rows=function.rows,
        context=function.context,
        inputs={name: list(shape) for name, shape in inputs.items()},
        outputs={name: list(shape) for name, shape in outputs.items()},
    )


def _rope(config: ModelConfig) -> RopeManifest:
    scaling = config.rope_scaling
    if scaling is None:
        return RopeManifest(theta=config.rope_theta)
    return RopeManifest(
        theta=config.rope_theta,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_context=scaling.original_context,
    )
