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
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from ondevice.errors import ArtifactError, BadRequest, CacheUnwritable

PAIR_FILE = "pair.json"
VERIFIER_FILE = "ondevice.json"
DRAFTER_FILE = "drafter.json"
DRAFTER_PACKAGE = "drafter.mlpackage"
DRAFTER_EMBEDDING = "embedding.safetensors"


def _different(values: list[int]) -> list[int]:
    if len(set(values)) < len(values):
        raise ValueError(f"expected different values, got {values}")
    return values


def _plain_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"expected the name of a folder inside the pair, got {name!r}")
    return name


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Sizes = Annotated[list[PositiveInt], Field(min_length=1)]
DifferentSizes = Annotated[Sizes, AfterValidator(_different)]
Indices = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_different)]
LayerKind = Literal["global", "local", "unrotated"]
PlainName = Annotated[str, AfterValidator(_plain_name)]


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
            what = first["msg"].removeprefix("Value error, ")
            raise ArtifactError(
                f"{path.name} in {path.parent} is not a valid manifest: {where}: {what}; "
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
    rows: PositiveInt
    context: PositiveInt
    inputs: dict[str, list[int]]
    outputs: dict[str, list[int]]


class RopeManifest(Manifest):
    """What the host needs to compute `cos` and `sin`.

    factor: of a linear scaling, or with the three parameters after it of Llama 3's; None for plain
    RoPE. rotated: dimensions of a head that are rotated, None for all.
    """

    theta: AtLeastOne
    factor: AtLeastOne | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_context: PositiveInt | None = None
    rotated: int | None = Field(default=None, gt=0, multiple_of=2)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        low, high = self.low_freq_factor, self.high_freq_factor
        llama3 = (low, high, self.original_context)
        if llama3.count(None) not in (0, 3) or (self.factor is None and llama3.count(None) == 0):
            raise ValueError("expected all parameters of a scaling or none")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"expected low_freq_factor below high_freq_factor, got {low}, {high}")
        return self


class FunctionParity(Manifest):
    """One function in half precision against mlx-lm with the weights that the package stores.

    max_error: of logits, of the function in fp32. first_choice, top_8: share of positions where
    mlx-lm's first choice is the function's, or among its first eight. divergence: mean KL, in nats.
    """

    positions: int
    max_error: float
    first_choice: float
    top_8: float
    divergence: float


class ParityResult(Manifest):
    """The emulated package against mlx-lm on the same layers, when it was converted.

    rounded: with the weights that the package stores; unrounded: with the checkpoint's.
    first_choice_agreement: of the package in fp32 with the checkpoint, which is what compression
    costs; None in manifests of before.
    """

    positions: int
    max_error_rounded: float
    max_error_unrounded: float
    first_choice_agreement_fp16: float
    first_choice_agreement: float | None = None
    functions: dict[str, FunctionParity] = {}


class MemoryEstimate(Manifest):
    """Bytes that a part takes while it runs; cache_per_token: of keys and values."""

    weights: int
    cache_per_token: int
    cache: int


class DrafterManifest(Manifest):
    """Everything a runtime needs to run a drafter package, and to refuse a wrong one.

    `row_to_token` maps a logit row to a verifier token id; None is the identity. `logit_rows` are
    the rows of each logits output: together `head_rows`, or up to 127 more, which are padding with
    logit -1e4. `embedding_in` says where the host finds the input rows: `embedding_tensor` of the
    verifier's safetensors, or of DRAFTER_EMBEDDING beside this manifest, to be rounded to fp16;
    `embedding_sha256` is that of the tensor's bytes as stored. `window` and `local_rope` describe
    layers that see the newest `window` tokens only, None where there are none; `layer_kinds`,
    `query_scale` and `biases` are those of a ModelConfig. `weights_sha256` is that of weight.bin,
    `ops_sha256` that of the canonical op listing (model.mlmodel differs between identical builds).
    """

    format: Literal["ondevice-drafter-1"] = "ondevice-drafter-1"
    family: str
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: int = Field(gt=0, multiple_of=2)
    vocab_size: PositiveInt
    rope: RopeManifest
    window: PositiveInt | None = None
    local_rope: RopeManifest | None = None
    layer_kinds: list[LayerKind] = []
    query_scale: Positive | None = None
    biases: list[str] = []
    layers: Indices
    row_counts: DifferentSizes
    context_sizes: DifferentSizes
    functions: list[FunctionShape]
    logit_rows: Sizes
    row_to_token: Indices | None = None
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
    memory: MemoryEstimate | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if len(self.layers) != self.num_layers:
            raise ValueError(f"expected {self.num_layers} layers, got {self.layers}")
        if (self.window is None) != (self.local_rope is None):
            raise ValueError("expected window and local_rope together or not at all")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} of keys")
        expected = {(rows, size) for rows in self.row_counts for size in self.context_sizes}
        found = [(function.rows, function.context) for function in self.functions]
        if sorted(expected) != sorted(found):
            raise ValueError(
                "expected one function for each of the row_counts and context_sizes, got (rows, "
                f"context) {found}"
            )
        if max(self.row_to_token or [0]) >= self.vocab_size:
            raise ValueError(f"row_to_token: expected tokens below {self.vocab_size}")
        return self

    @property
    def has_local_layers(self) -> bool:
        """Whether any layer sees a window only."""
        return self.window is not None

    @property
    def head_rows(self) -> int:
        """Logit rows that stand for a token; those after them are padding."""
        return self.vocab_size if self.row_to_token is None else len(self.row_to_token)


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
    verifier: PlainName = "verifier"
    drafter: PlainName | None = "drafter"
    tokenizer_sha256: str


def check_tokenizer(what: str, tokenizer_sha256: str, verifier: VerifierManifest) -> None:
    """Raise ArtifactError unless `what`, made for one tokenizer, fits the verifier's.

    what: "the drafter in FOLDER", the message's first words. tokenizer_sha256: the tokenizer that
    it was made for, as `tokenizer_digest` has it.
    """
    if tokenizer_sha256 != verifier.tokenizer_sha256:
        raise ArtifactError(
            f"{what} is for tokenizer {tokenizer_sha256[:12]}, expected the verifier's, "
            f"{verifier.tokenizer_sha256[:12]}; convert the pair again from models that share one"
        )


def file_sha256(path: Path) -> str:
    """Hex digest of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SCRATCH = (
    ".ondevice-new"  # ends the name of a scratch folder, so that no other one is taken for it
)
_ASIDE = "old"


def refuse_occupied(folder: Path, mark: str) -> None:
    """BadRequest unless `folder` is free, empty, or an artifact of the same kind, to be replaced.

    mark: the manifest's name, which tells the kind.
    """
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / mark).is_file():
            return
        kinds = {PAIR_FILE: "a pair", VERIFIER_FILE: "a verifier", DRAFTER_FILE: "a drafter"}
        found = next((kind for each, kind in kinds.items() if (folder / each).is_file()), None)
        what = f"holds {found}" if found else "is not empty and is no artifact of ours"
        raise BadRequest(
            f"{folder} {what}; expected {kinds[mark]} to replace, or a new or empty folder"
        )
    if folder.exists() and not folder.is_dir():
        raise BadRequest(f"{folder} is a file, not a folder; give a new folder")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place when the block ends without an error.

    Works for a file and for a folder (an old folder is moved aside first). When the block raises,
    wrote nothing, or its result cannot be moved, the old artifact stays and nothing else is left; a
    full or read-only disk becomes CacheUnwritable.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(_SCRATCH, f".{target.name}.", target.parent))
    except OSError as error:
        raise unwritable(target, error) from error
    fresh, aside = scratch / "new" / target.name, scratch / _ASIDE
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


def sweep(target: Path) -> None:
    """Take away what killed runs of `replacing` left beside `target`.

    An old artifact that a kill left only there goes back to its place. The caller holds a lock:
    nobody else is writing `target`.
    """
    for name in os.listdir(target.parent):
        if name.startswith(f".{target.name}.") and name.endswith(_SCRATCH):
            scratch = target.parent / name
            if os.path.lexists(scratch / _ASIDE) and not os.path.lexists(target):
                (scratch / _ASIDE).rename(target)
            shutil.rmtree(scratch, ignore_errors=True)


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
OTHER_HOME = "choose another folder (ONDEVICE_HOME, or the option of the command)"


def unwritable(target: Path, error: OSError, advice: str = OTHER_HOME) -> CacheUnwritable:
    """The one-line error for a cache folder or disk that refuses to be written."""
    reason = error.strerror or str(error)
    in_the_way = next((part for part in (target, *target.parents) if os.path.isfile(part)), None)
    if error.errno in _IN_THE_WAY_ERRORS and in_the_way is not None:
        reason, advice = f"{in_the_way} is a file, not a folder", f"remove it, or {advice}"
    elif error.errno in _FULL_ERRORS:
        advice = f"free space there, or {advice}"
    return CacheUnwritable(f"cannot write {target}: {reason}; {advice}")
