"""Manifests of what `convert` writes, and the refusal of what does not match them.

PAIR/
  pair.json               PairManifest
  verifier/               an MLX folder that mlx-lm loads, with ondevice.json (VerifierManifest)
  drafter/
    drafter.json          DrafterManifest
    drafter.mlpackage/
    embedding.safetensors   only when the verifier does not store the same embedding
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ondevice.errors import ArtifactError, CacheUnwritable

PAIR_FILE = "pair.json"
VERIFIER_FILE = "ondevice.json"
DRAFTER_FILE = "drafter.json"
DRAFTER_PACKAGE = "drafter.mlpackage"
DRAFTER_EMBEDDING = "embedding.safetensors"


class Manifest(BaseModel):
    """A JSON file that others may have written: every field is checked when it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse the manifest at `path`; raises ArtifactError when missing or malformed."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            # An OSError's text would repeat the path.
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"no readable manifest at {path} ({reason}); convert the pair again"
            ) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ArtifactError(
                f"{path.name} in {path.parent} is not a valid manifest: {where}: {first['msg']}; "
                "convert the pair again"
            ) from error

    def write(self, path: Path) -> None:
        """Write the manifest at `path`, whole or not at all."""
        with replacing(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


class SourceFile(Manifest):
    """A file that an artifact was made from."""

    name: str
    sha256: str


class FunctionShape(Manifest):
    """One drafter function: `rows` tokens a step over `context` slots; names and shapes."""

    name: str
    rows: int
    context: int
    inputs: dict[str, list[int]]
    outputs: dict[str, list[int]]


class RopeManifest(Manifest):
    """What the host needs to compute `cos` and `sin`."""

    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context: int | None = None


class ParityResult(Manifest):
    """The emulated package against mlx-lm on the same layers, when it was converted."""

    positions: int
    max_error_rounded: float
    max_error_unrounded: float
    first_choice_agreement_fp16: float


class DrafterManifest(Manifest):
    """Everything a runtime needs to run a drafter package, and to refuse a wrong one.

    `row_to_token` maps a logit row to a verifier token id; None is the identity. `logit_rows` are
    the rows of each logits output: together `vocab_size`, or up to 127 more, which are padding with
    logit -1e4. `embedding_in` says where the host finds the input rows: `embedding_tensor` of the
    verifier's safetensors, or of DRAFTER_EMBEDDING beside this manifest, to be rounded to fp16;
    `embedding_sha256` is that of the tensor's bytes as stored. `weights_sha256` is that of
    weight.bin, `ops_sha256` that of the canonical op listing (model.mlmodel differs between
    identical builds).
    """

    format: Literal["ondevice-drafter-1"] = "ondevice-drafter-1"
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: RopeManifest
    layers: list[int]
    row_counts: list[int]
    context_sizes: list[int]
    functions: list[FunctionShape]
    logit_rows: list[int]
    row_to_token: list[int] | None = None
    embedding_in: Literal["verifier", "drafter"]
    embedding_tensor: str
    embedding_sha256: str
    compression: str
    weights_sha256: str
    ops_sha256: str
    tokenizer_sha256: str
    sources: list[SourceFile]
    converter_version: str
    parity: ParityResult | None = None
    lint: list[str] = []


class VerifierManifest(Manifest):
    """The MLX folder's own record, beside the files that mlx-lm and transformers read.

    `files_sha256` names every one of them, by its path inside the folder: weights and their index,
    configurations, tokenizer and chat template.
    """

    format: Literal["ondevice-verifier-2"] = "ondevice-verifier-2"
    family: str
    dtype: str
    context: int
    vocab_size: int
    files_sha256: dict[str, str] = Field(min_length=1)
    tokenizer_sha256: str
    sources: list[SourceFile]
    converter_version: str


class PairManifest(Manifest):
    """A verifier and its drafter, by folder name inside the pair."""

    format: Literal["ondevice-pair-1"] = "ondevice-pair-1"
    name: str
    verifier: str = "verifier"
    drafter: str | None = "drafter"
    tokenizer_sha256: str


def file_sha256(path: Path) -> str:
    """Hex digest of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place when the block ends without an error.

    Works for a file and for a folder (an old folder is moved aside first). When the block raises,
    wrote nothing, or its result cannot be moved, the old artifact stays and nothing else is left; a
    full or read-only disk becomes CacheUnwritable.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise unwritable(target, error) from error
    fresh, aside = scratch / "new" / target.name, scratch / "old"
    try:
        fresh.parent.mkdir()
        yield fresh
        _take_place(fresh, target, aside)
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise unwritable(target, error) from error
        raise
    finally:
        # An old artifact that could not be moved back is kept: nothing else has its content.
        stranded = os.path.lexists(aside) and not os.path.lexists(target)
        shutil.rmtree(fresh.parent if stranded else scratch, ignore_errors=True)


def _take_place(fresh: Path, target: Path, aside: Path) -> None:
    try:
        if target.is_dir():
            target.rename(aside)
        os.replace(fresh, target)
    except BaseException as error:
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        if isinstance(error, NotADirectoryError):
            raise unwritable(target, error) from error
        raise


_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_DISK_ERRORS = _FULL_ERRORS | {errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM, errno.EBUSY}
_IN_THE_WAY_ERRORS = {errno.ENOTDIR, errno.EEXIST}


def unwritable(target: Path, error: OSError) -> CacheUnwritable:
    """The one-line error for a cache folder or disk that refuses to be written."""
    reason = error.strerror or str(error)
    advice = "set ONDEVICE_HOME to a folder that can be written"
    in_the_way = next((part for part in (target, *target.parents) if os.path.isfile(part)), None)
    if error.errno in _IN_THE_WAY_ERRORS and in_the_way is not None:
        reason, advice = f"{in_the_way} is a file, not a folder", f"remove it, or {advice}"
    elif error.errno in _FULL_ERRORS:
        advice = f"free space there, or {advice}"
    return CacheUnwritable(f"cannot write {target}: {reason}; {advice}")
