"""Checkpoint -> drafter artifact: a Core ML package made of some of the model's layers, proved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ondevice.artifact import (
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
    FunctionShape,
    ParityResult,
    RopeManifest,
    VerifierManifest,
    check_tokenizer,
    replacing,
)
from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.compression import Compression, packer
from ondevice.converters.embedding import TENSOR, EmbeddingPlace, place_embedding
from ondevice.converters.gate import check_parity
from ondevice.converters.memory import drafter_memory
from ondevice.converters.mlpackage import folder_bytes, write_mlpackage
from ondevice.converters.network import Network
from ondevice.converters.options import DrafterOptions
from ondevice.converters.progress import Progress
from ondevice.converters.trained import TrainedDrafter
from ondevice.coreml.lint import lint
from ondevice.coreml.package import Package, ops_digest, weights_digest
from ondevice.errors import RuntimeFailure
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import folded, head_partition
from ondevice.models.packed import Half
from ondevice.models.rope import Llama3Scaling, RotarySettings

MAX_OVERHEAD = 0.02  # of the weights: all that a package may hold besides them
SMALL_GRAPH_BYTES = 1024**2  # a tiny model's graph may take this much whatever its weights


def convert_drafter(
    checkpoint: Checkpoint,
    verifier_folder: Path | None,
    folder: Path,
    *,
    layers: Sequence[int] | None = None,
    trained: TrainedDrafter | None = None,
    rows: Sequence[int] | None = None,
    row_counts: Sequence[int] = (1, 8, 64),
    context_sizes: Sequence[int] = (512, 2048),
    compression: Compression | None = None,
    progress: Progress | None = None,
) -> DrafterManifest:
    """Write the drafter at `folder`, whole or not at all.

    It is made of `layers` of `checkpoint`, or is the one that `trained` holds. One package holds a
    function for each row count (rows a step) and context size (slots). rows: the tokens that it can
    propose, all by default. The embedding is referred to in `verifier_folder` when the verifier
    stores the same values. Raises BadRequest for impossible layers or sizes, ArtifactError for a
    verifier with another tokenizer or a trained drafter of another verifier, UnsupportedModel when
    a weight does not fit fp16, RuntimeFailure when the package does not compute what mlx-lm does.
    """
    options = DrafterOptions(tuple(row_counts), tuple(context_sizes), compression or Compression())
    options.check()
    vocab_size = checkpoint.config.vocab_size
    if verifier_folder is not None:
        verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
        check_tokenizer(
            f"the drafter's source {checkpoint.label}", checkpoint.tokenizer_sha256, verifier
        )
        vocab_size = verifier.vocab_size
    if rows is None and vocab_size != checkpoint.config.vocab_size:
        rows = range(min(vocab_size, checkpoint.config.vocab_size))
    network = (
        Network.cut(checkpoint, layers or (), rows)
        if trained is None
        else Network.trained(checkpoint, trained)
    )
    build = _Build(checkpoint, network, options, vocab_size, progress or _silent)
    with replacing(folder) as scratch:
        scratch.mkdir()
        return build.write(scratch, verifier_folder)


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Build:
    """One conversion. vocab_size: the verifier's, which may be padded otherwise than the source's.

    Its steps: layers folded, then the rest, which takes about as long.
    """

    checkpoint: Checkpoint
    network: Network
    options: DrafterOptions
    vocab_size: int
    progress: Progress

    def write(self, scratch: Path, verifier_folder: Path | None) -> DrafterManifest:
        functions = self.options.functions(self.network.config)
        self._report(0)
        path = scratch / DRAFTER_PACKAGE
        self._write_package(functions, path)
        self._report(1)
        rows = self._embedding()
        place = place_embedding(rows, verifier_folder, scratch)
        self._report(2)
        package = Package.open(path)
        compression = self.options.compression
        parity = check_parity(package, self.network, rows, functions, compression)
        manifest = self._manifest(functions, package, place, parity)
        manifest.write(scratch / DRAFTER_FILE)
        self._report(3)
        return manifest

    def _report(self, stage: int) -> None:
        layers = len(self.network.places)
        self.progress(layers * (1 + stage) if stage else 0, 4 * layers)

    def _write_package(self, functions: Sequence[DrafterFunction], path: Path) -> None:
        compression, layers = self.options.compression, len(self.network.places)
        folded_layers = itertools.count(1)
        weights = folded(
            self.network.tensors,
            self.network.source,
            self.network.places,
            packer(compression.layers),
            packer(compression.head),
            lambda: self.progress(next(folded_layers), 4 * layers),
        )
        write_mlpackage([function.source(weights) for function in functions], path)
        _check_size(folder_bytes(path), weights.nbytes)

    def _embedding(self) -> Half:
        """Input rows for every token of the verifier."""
        rows = self.checkpoint.tensor(TENSOR).astype(np.float16)
        missing = max(0, self.vocab_size - len(rows))
        return np.pad(rows, ((0, missing), (0, 0)))[: self.vocab_size]

    def _manifest(
        self,
        functions: Sequence[DrafterFunction],
        package: Package,
        place: EmbeddingPlace,
        parity: ParityResult,
    ) -> DrafterManifest:
        config, checkpoint = self.network.config, self.checkpoint
        return DrafterManifest(
            family=config.family,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=self.vocab_size,
            rope=_rope(config.rotary),
            window=config.window if config.has_local_layers else None,
            local_rope=_rope(config.local_rotary) if config.has_local_layers else None,
            layer_kinds=list(config.layer_kinds),
            query_scale=config.query_scale,
            biases=list(config.biases),
            layers=list(self.network.layers),
            row_counts=list(self.options.row_counts),
            context_sizes=list(self.options.context_sizes),
            functions=[_shape(package, function) for function in functions],
            logit_rows=head_partition(config.vocab_size),
            row_to_token=self.network.row_to_token,
            embedding_in=place.folder,
            embedding_tensor=place.tensor,
            embedding_sha256=place.sha256,
            compression=str(self.options.compression),
            weights_sha256=weights_digest(package.path),
            ops_sha256=ops_digest(package),
            tokenizer_sha256=checkpoint.tokenizer_sha256,
            sources=self.network.sources,
            converter_version=version("ondevice"),
            parity=parity,
            lint=[str(finding) for finding in lint(package)],
            memory=drafter_memory(config, package, self.options.context_sizes),
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


def _rope(rotary: RotarySettings) -> RopeManifest:
    scaling = rotary.rope_scaling
    if not isinstance(scaling, Llama3Scaling):
        factor = None if scaling is None else scaling.factor
        return RopeManifest(theta=rotary.rope_theta, factor=factor, rotated=rotary.rotary_dim)
    return RopeManifest(
        theta=rotary.rope_theta,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_context=scaling.original_context,
        rotated=rotary.rotary_dim,
    )
