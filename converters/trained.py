"""A trained drafter as a file: int8 per output channel, its rows, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from ondevice.artifact import SourceFile, file_sha256
from ondevice.converters.checkpoint import Checkpoint, tensor_shapes
from ondevice.converters.tensorfile import write_tensors
from ondevice.errors import ArtifactError
from ondevice.models.config import ModelConfig

Single = npt.NDArray[np.float32]

_HEADER = "ondevice"
_ROWS = "row_to_token"
_SCALE = ".scale"
_LEVELS = 127
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TrainedHeader(BaseModel):
    """What the file says of itself.

    layers: those of the verifier that the student began as. verifier_sha256: of the verifier's
    weight files. config: sizes of the student.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str = "ondevice-trained-drafter-1"
    layers: tuple[int, ...]
    verifier: str
    verifier_sha256: tuple[str, ...]
    tokenizer_sha256: str
    licence: str | None = None


@dataclass(frozen=True)
class TrainedDrafter:
    """A student's own tensors, rounded as the file stores them, by Hugging Face name."""

    header: TrainedHeader
    row_to_token: tuple[int, ...]
    tensors: Mapping[str, Single]
    path: Path

    @cached_property
    def source(self) -> SourceFile:
        """The file, with its sha256."""
        return SourceFile(name=self.path.name, sha256=file_sha256(self.path))

    def config(self, verifier: ModelConfig) -> ModelConfig:
        """Sizes of the student, which has a head of its own with a row for each of its tokens."""
        return replace(
            verifier.selected(self.header.layers),
            vocab_size=len(self.row_to_token),
            tied_embeddings=False,
        )

    def tensor(self, checkpoint: Checkpoint, name: str) -> Single:
        """The student's tensor `name`; head and embedding are rows of the verifier's.

        The embedding is cut to as many rows as the head has, so that it is a model of its own.
        """
        rows = list(self.row_to_token)
        if name == _HEAD:
            tied = checkpoint.config.tied_embeddings
            return checkpoint.tensor(_EMBEDDING if tied else _HEAD)[rows]
        if name == _EMBEDDING:
            return checkpoint.tensor(name)[: len(rows)]
        return self.tensors[name]


def rounded(values: Single) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """int8 and a scale for each output channel: values (out, in) ~ int8 * scale[:, None]."""
    largest = np.abs(values).max(axis=1)
    scale = np.where(largest > 0, largest / _LEVELS, 1).astype(np.float32)
    return np.rint(values / scale[:, None]).astype(np.int8), scale


def write_trained(
    path: Path, header: TrainedHeader, row_to_token: Sequence[int], tensors: Mapping[str, Single]
) -> None:
    """Write a student, whole or not at all; matrices in int8, norms as they are."""
    stored: dict[str, npt.NDArray[np.generic]] = {_ROWS: np.array(row_to_token, np.int32)}
    for name, values in tensors.items():
        if values.ndim == 1:
            stored[name] = values.astype(np.float32)
        else:
            stored[name], stored[name + _SCALE] = rounded(values)
    write_tensors(path, stored, {_HEADER: header.model_dump_json()})


def read_trained(path: Path) -> TrainedDrafter:
    """Read what `write_trained` wrote; ArtifactError for anything else."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = TrainedHeader.model_validate_json((file.metadata() or {})[_HEADER])
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows = tuple(stored.pop(_ROWS).tolist())
    except (OSError, SafetensorError, KeyError, ValidationError) as error:
        raise ArtifactError(
            f"{path} is no trained drafter ({error}); make one with ondevice distil"
        ) from error
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    tensors = {
        name: values.astype(np.float32) * scales[name + _SCALE][:, None]
        if values.dtype == np.int8
        else values.astype(np.float32)
        for name, values in stored.items()
    }
    return TrainedDrafter(header, rows, tensors, path)


def check_trained(trained: TrainedDrafter, checkpoint: Checkpoint) -> None:
    """ArtifactError unless `trained` was taught on `checkpoint` and has all its tensors."""
    if trained.header.tokenizer_sha256 != checkpoint.tokenizer_sha256:
        raise ArtifactError(
            f"{trained.path} was trained for the tokenizer "
            f"{trained.header.tokenizer_sha256[:12]}, {checkpoint.label} has "
            f"{checkpoint.tokenizer_sha256[:12]}; train one for this verifier with ondevice distil"
        )
    config = trained.config(checkpoint.config)
    wanted = {
        name: shape
        for name, shape in tensor_shapes(config).items()
        if name not in (_EMBEDDING, _HEAD)
    }
    found = {name: values.shape for name, values in trained.tensors.items()}
    if found != wanted or max(trained.row_to_token) >= checkpoint.config.vocab_size:
        raise ArtifactError(
            f"{trained.path} does not fit {checkpoint.label}: other layers, sizes or tokens; "
            "train one for this verifier with ondevice distil"
        )
