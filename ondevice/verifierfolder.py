"""What an MLX folder that we wrote must hold: the files of its manifest, all of them, no other.

mlx-lm loads every `model*.safetensors` it finds, transformers every template: a file too many
changes the text as surely as a file that was edited. Hidden files at the top (.DS_Store) are
nobody's input and may come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ondevice.artifact import VERIFIER_FILE, VerifierManifest, file_sha256
from ondevice.errors import ArtifactError

_WEIGHTS_SUFFIX = ".safetensors"
_ADVICE = "convert the pair again"


def files_sha256(folder: Path) -> dict[str, str]:
    """Hex sha256 of every file of `folder` but the manifest, by its path inside the folder."""
    return {name: file_sha256(folder / name) for name in _names(folder)}


def check_verifier_folder(folder: Path) -> VerifierManifest:
    """The manifest of `folder`, after checking its files: their names, and all bytes but weights.

    Takes a few milliseconds; `check_verifier_weights` does the rest. Raises ArtifactError when the
    manifest cannot be read, or a file is missing, is not in it, or is not what it says.
    """
    manifest = VerifierManifest.read(folder / VERIFIER_FILE)
    stated, found = manifest.files_sha256.keys(), _names(folder)
    for name in sorted(stated - found):
        raise ArtifactError(f"{folder / name} is missing, its manifest names it; {_ADVICE}")
    for name in sorted(found - stated):
        raise ArtifactError(
            f"{folder / name} is not in the manifest of its folder; take it away, or {_ADVICE}"
        )
    _check_bytes(folder, manifest, found - _weights(manifest))
    return manifest


def check_verifier_weights(folder: Path, manifest: VerifierManifest) -> None:
    """Raise ArtifactError unless the weight files have the bytes that `manifest` states."""
    _check_bytes(folder, manifest, _weights(manifest))


def weight_files(folder: Path, manifest: VerifierManifest) -> list[Path]:
    """The weight files that `manifest` states, in order."""
    return [folder / name for name in sorted(_weights(manifest))]


def _names(folder: Path) -> set[str]:
    """Every file below `folder` but the manifest. A link to a folder counts: readers follow it."""
    names = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    return {name for name in names if name != VERIFIER_FILE and not _is_hidden_at_top(name)}


def _is_hidden_at_top(name: str) -> bool:
    return name.startswith(".") and "/" not in name


def _weights(manifest: VerifierManifest) -> set[str]:
    return {name for name in manifest.files_sha256 if name.endswith(_WEIGHTS_SUFFIX)}


def _check_bytes(folder: Path, manifest: VerifierManifest, names: Iterable[str]) -> None:
    for name in sorted(names):
        path, expected = folder / name, manifest.files_sha256[name]
        try:
            found = file_sha256(path)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read ({error.strerror}); {_ADVICE}") from error
        if found != expected:
            raise ArtifactError(
                f"{path} does not match its manifest: sha256 expected {expected[:12]}, "
                f"got {found[:12]}; {_ADVICE}"
            )
