"""What an artifact on disk is, as plain values: its manifest, its files, its graph."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ondevice.artifact import (
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    PAIR_FILE,
    VERIFIER_FILE,
    DrafterManifest,
    PairManifest,
    VerifierManifest,
)
from ondevice.coreml import package as coreml
from ondevice.coreml.lint import lint
from ondevice.coreml.ops import CONSTEXPR
from ondevice.errors import ArtifactError
from ondevice.home import pairs_folder
from ondevice.ladder import known_anywhere
from ondevice.models.pairs import pair_names
from ondevice.verifierfolder import check_verifier_folder, check_verifier_weights

Facts = dict[str, Any]

_WITHOUT_DATA = frozenset({"const", *CONSTEXPR})


def locate(artifact: str) -> Path:
    """The folder that is meant: a path, or the name of a known pair that has been converted."""
    path = Path(artifact).expanduser()
    if path.is_dir():
        return path
    if artifact in pair_names():
        converted = pairs_folder() / artifact
        if converted.is_dir():
            return converted
        raise ArtifactError(
            f"the pair {artifact} has not been converted yet; run `ondevice chat {artifact}` first"
        )
    found = f"{artifact} is a file, not a folder" if path.exists() else f"no folder {artifact}"
    raise ArtifactError(f"{found}; give the folder of a pair, verifier, drafter or .mlpackage")


def facts(path: Path) -> Facts:
    """All that can be said of the artifact in `path`; `kind` says what it is.

    Raises ArtifactError when it is none of the known kinds, or damaged.
    """
    if (path / PAIR_FILE).is_file():
        return _pair(path)
    if (path / VERIFIER_FILE).is_file():
        return _verifier(path)
    if (path / DRAFTER_FILE).is_file():
        return _drafter(path)
    if (path / coreml.MANIFEST).is_file():
        return _package(path)
    raise ArtifactError(
        f"{path} is no artifact: expected {PAIR_FILE}, {VERIFIER_FILE}, {DRAFTER_FILE} or "
        f"{coreml.MANIFEST} in it"
    )


def _pair(path: Path) -> Facts:
    manifest = PairManifest.read(path / PAIR_FILE)
    drafter = None if manifest.drafter is None else _drafter(path / manifest.drafter)
    return {
        "kind": "pair",
        "path": str(path),
        "manifest": manifest.model_dump(),
        "verifier": _verifier(path / manifest.verifier),
        "drafter": drafter,
    }


def _verifier(path: Path) -> Facts:
    manifest = VerifierManifest.read(path / VERIFIER_FILE)
    return {
        "kind": "verifier",
        "path": str(path),
        "manifest": manifest.model_dump(),
        "bytes": _bytes(path),
        "matches_manifest": _is_whole(path, manifest),
    }


def _is_whole(path: Path, manifest: VerifierManifest) -> bool:
    try:
        check_verifier_folder(path)
        check_verifier_weights(path, manifest)
    except ArtifactError:
        return False
    return True


def _drafter(path: Path) -> Facts:
    manifest = DrafterManifest.read(path / DRAFTER_FILE)
    package = _package(path / DRAFTER_PACKAGE)
    found = (package["weights_sha256"], package["ops_sha256"])
    return {
        "kind": "drafter",
        "path": str(path),
        "manifest": manifest.model_dump(),
        "bytes": _bytes(path),
        "matches_manifest": found == (manifest.weights_sha256, manifest.ops_sha256),
        "examinations": [each.model_dump(mode="json") for each in known_anywhere(path)],
        "package": package,
    }


def _package(path: Path) -> Facts:
    package = coreml.Package.open(path)
    weights = coreml.weights_file(path)
    in_order = sorted(package.functions, key=_numbers_by_value)
    return {
        "kind": "package",
        "path": str(path),
        "specification_version": package.specification_version,
        "bytes": _bytes(path),
        "weights_bytes": weights.stat().st_size if weights.is_file() else 0,
        "weights_sha256": coreml.weights_digest(path),
        "ops_sha256": coreml.ops_digest(package),
        "functions": {name: _function(package.functions[name]) for name in in_order},
        "lint": [asdict(finding) for finding in lint(package)],
    }


def _numbers_by_value(name: str) -> list[tuple[int, str]]:
    """A sort key: t8_s512 before t64_s512."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in _PARTS.split(name)]


_PARTS = re.compile(r"(\d+)")


def _function(function: coreml.Function) -> Facts:
    counts = Counter(op.type for op in function.ops if op.type not in _WITHOUT_DATA)
    return {
        "inputs": {value.name: str(value.type) for value in function.inputs},
        "outputs": {name: str(function.types[name]) for name in function.outputs},
        "ops": dict(sorted(counts.items())),
    }


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
