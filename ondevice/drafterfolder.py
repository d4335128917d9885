"""Opening a drafter folder: everything its manifest states is checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ondevice.artifact import (
    DRAFTER_EMBEDDING,
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
    VerifierManifest,
)
from ondevice.coreml.package import Package, ops_digest, weights_digest
from ondevice.coreml.runtime import CoreMLRuntime, TensorSpec
from ondevice.embeddings import Embedding
from ondevice.errors import ArtifactError
from ondevice.verifierfolder import weight_files

RuntimeFactory = Callable[[Path], CoreMLRuntime]


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that matches its manifest and its verifier."""

    manifest: DrafterManifest
    embedding: Embedding
    runtime: CoreMLRuntime


def load_drafter(
    folder: Path, verifier_folder: Path, open_runtime: RuntimeFactory | None = None
) -> LoadedDrafter:
    """Open the drafter in `folder` (manifest and package) for the verifier in `verifier_folder`.

    open_runtime: opens the package at a path; the emulator in fp32 by default. Raises ArtifactError
    when a hash, the tokenizer, the vocabulary or a function's shape is not what the manifest says.
    """
    manifest = DrafterManifest.read(folder / DRAFTER_FILE)
    verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
    _check_verifier(folder, manifest, verifier)
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
    runtime = (open_runtime or _emulator)(folder / DRAFTER_PACKAGE)
    try:
        _check_functions(folder, manifest, runtime)
    except ArtifactError:
        runtime.close()
        raise
    return LoadedDrafter(manifest, embedding, runtime)


def _emulator(path: Path) -> CoreMLRuntime:
    from ondevice.coreml.emulator import Emulator

    return Emulator.open(path, "fp32")


def _check_verifier(folder: Path, manifest: DrafterManifest, verifier: VerifierManifest) -> None:
    if manifest.tokenizer_sha256 != verifier.tokenizer_sha256:
        raise ArtifactError(
            f"the drafter in {folder} was built for tokenizer {manifest.tokenizer_sha256[:12]}, "
            f"the verifier uses {verifier.tokenizer_sha256[:12]}; convert the drafter again from a "
            "model with the verifier's tokenizer"
        )
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


def _check_functions(folder: Path, manifest: DrafterManifest, runtime: CoreMLRuntime) -> None:
    stated = {(shape.rows, shape.context): shape for shape in manifest.functions}
    for rows in manifest.row_counts:
        for context in manifest.context_sizes:
            shape = stated.get((rows, context))
            signature = None if shape is None else runtime.functions.get(shape.name)
            if shape is None or signature is None:
                raise ArtifactError(
                    f"the drafter in {folder} has no function for {rows} rows and {context} slots "
                    "that its manifest announces; convert the drafter again"
                )
            _check_shapes(folder, shape.name, shape.inputs, signature.inputs)
            _check_shapes(folder, shape.name, shape.outputs, signature.outputs)


def _check_shapes(
    folder: Path, function: str, stated: Mapping[str, list[int]], found: Mapping[str, TensorSpec]
) -> None:
    for name in sorted(stated.keys() | found.keys()):
        expected = stated.get(name)
        got = list(found[name].shape) if name in found else None
        if got != expected:
            raise ArtifactError(
                f"{function} of the drafter in {folder}: the shape of {name} is {got}, its "
                f"manifest says {expected}; convert the drafter again"
            )
