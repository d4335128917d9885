"""Opening a drafter folder: everything its manifest states is checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ondevice.artifact import (
    DRAFTER_EMBEDDING,
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
    VerifierManifest,
    check_tokenizer,
)
from ondevice.coreml.package import Package, ops_digest, weights_digest
from ondevice.coreml.runtime import CoreMLRuntime
from ondevice.embeddings import Embedding
from ondevice.errors import ArtifactError
from ondevice.models.drafter_graph import input_shapes, output_shapes
from ondevice.models.drafter_weights import head_partition
from ondevice.verifierfolder import weight_files

RuntimeFactory = Callable[[Path], CoreMLRuntime]


@dataclass(frozen=True, slots=True)
class Functions:
    """Which of a drafter's functions are used: those of these row counts and contexts."""

    row_counts: tuple[int, ...]
    context_sizes: tuple[int, ...]

    @classmethod
    def all_of(cls, manifest: DrafterManifest) -> Self:
        """Every function."""
        return cls(tuple(manifest.row_counts), tuple(manifest.context_sizes))

    def names(self, manifest: DrafterManifest) -> list[str]:
        """Their names in the package."""
        return [function.name for function in self.of(manifest).functions]

    def of(self, manifest: DrafterManifest) -> DrafterManifest:
        """The manifest of a drafter that has no others."""
        kept = [
            function
            for function in manifest.functions
            if function.rows in self.row_counts and function.context in self.context_sizes
        ]
        sizes = {"row_counts": list(self.row_counts), "context_sizes": list(self.context_sizes)}
        return manifest.model_copy(update={"functions": kept, **sizes})


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that matches its manifest and its verifier. weights_bytes: in its package."""

    manifest: DrafterManifest
    embedding: Embedding
    runtime: CoreMLRuntime
    weights_bytes: int = 0


def load_drafter(
    folder: Path,
    verifier_folder: Path,
    open_runtime: RuntimeFactory | None = None,
    functions: Functions | None = None,
) -> LoadedDrafter:
    """Open the drafter in `folder` (manifest and package) for the verifier in `verifier_folder`.

    open_runtime: opens the package at a path; the emulator in fp32 by default. functions: those to
    use, None for all. Raises ArtifactError when a hash, the tokenizer, the vocabulary or a
    function's shape is not what the manifest says.
    """
    manifest = DrafterManifest.read(folder / DRAFTER_FILE)
    verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
    _check_verifier(folder, manifest, verifier)
    _check_sizes(folder, manifest)
    _check_package(folder / DRAFTER_PACKAGE, manifest)
    files = weight_files(verifier_folder, verifier)
    if manifest.embedding_in == "drafter":
        files = [folder / DRAFTER_EMBEDDING]
    embedding = Embedding.open(files, manifest.embedding_tensor, manifest.embedding_sha256)
    expected = (manifest.vocab_size, manifest.hidden_size)
    if embedding.shape != expected:
        raise ArtifactError(
            f"{folder}: the embedding {manifest.embedding_tensor} has shape {embedding.shape}, "
            f"expected {expected}; convert the drafter again"
        )
    if functions is not None:
        manifest = functions.of(manifest)
    runtime = (open_runtime or _emulator)(folder / DRAFTER_PACKAGE)
    try:
        _check_functions(folder, manifest, runtime)
    except ArtifactError:
        runtime.close()
        raise
    weights = (folder / DRAFTER_PACKAGE).rglob("weight.bin")
    weights_bytes = sum(path.stat().st_size for path in weights)
    return LoadedDrafter(manifest, embedding, runtime, weights_bytes)


def _emulator(path: Path) -> CoreMLRuntime:
    from ondevice.coreml.emulator import Emulator

    return Emulator.open(path, "fp32")


def _check_verifier(folder: Path, manifest: DrafterManifest, verifier: VerifierManifest) -> None:
    check_tokenizer(f"the drafter in {folder}", manifest.tokenizer_sha256, verifier)
    if manifest.vocab_size != verifier.vocab_size:
        raise ArtifactError(
            f"the drafter in {folder} has {manifest.vocab_size} tokens, the verifier "
            f"{verifier.vocab_size}; convert the drafter again for this verifier"
        )


def _check_package(path: Path, manifest: DrafterManifest) -> None:
    package = Package.open(path)
    for what, expected, found in (
        ("weights", manifest.weights_sha256, weights_digest(path)),
        ("ops", manifest.ops_sha256, ops_digest(package)),
    ):
        if found != expected:
            raise ArtifactError(
                f"{path} does not match its manifest: sha256 of its {what} expected "
                f"{expected[:12]}, got {found[:12]}; convert the drafter again"
            )


def _check_sizes(folder: Path, manifest: DrafterManifest) -> None:
    """The functions as the manifest describes them have the shapes that its own sizes give."""
    expected = head_partition(manifest.head_rows)
    if manifest.logit_rows != expected:
        raise ArtifactError(
            f"the drafter in {folder} states logit_rows {manifest.logit_rows}, expected {expected} "
            f"for {manifest.head_rows} rows; convert the drafter again"
        )
    for shape in manifest.functions:
        inputs = input_shapes(manifest, shape.rows, shape.context)
        outputs = output_shapes(manifest, shape.rows, expected)
        _check_shapes(folder, shape.name, shape.inputs, inputs, "its sizes give")
        _check_shapes(folder, shape.name, shape.outputs, outputs, "its sizes give")


def _check_functions(folder: Path, manifest: DrafterManifest, runtime: CoreMLRuntime) -> None:
    for shape in manifest.functions:
        signature = runtime.functions.get(shape.name)
        if signature is None:
            raise ArtifactError(
                f"the drafter in {folder} has no function {shape.name} for {shape.rows} rows and "
                f"{shape.context} slots that its manifest announces; convert the drafter again"
            )
        inputs = {name: spec.shape for name, spec in signature.inputs.items()}
        outputs = {name: spec.shape for name, spec in signature.outputs.items()}
        _check_shapes(folder, shape.name, shape.inputs, inputs, "its package has")
        _check_shapes(folder, shape.name, shape.outputs, outputs, "its package has")


def _check_shapes(
    folder: Path,
    function: str,
    stated: Mapping[str, list[int]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    for name in sorted(stated.keys() | found.keys()):
        got = list(found[name]) if name in found else None
        if got != stated.get(name):
            raise ArtifactError(
                f"{function} of the drafter in {folder}: the shape of {name} is "
                f"{stated.get(name)} in its manifest, {where} {got}; convert the drafter again"
            )
