"""A training run on disk: one file, replaced whole, from which the run goes on exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ondevice.artifact import replacing
from ondevice.errors import ArtifactError

_NOTES = "notes"


def save_checkpoint(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, Any]
) -> None:
    """Replace `path` with `tensors` and `notes` (JSON); CacheUnwritable when the disk is full.

    The old checkpoint stays until the new one is on the disk.
    """
    with replacing(path) as scratch:
        save_file(
            {name: np.ascontiguousarray(value) for name, value in tensors.items()},
            scratch,
            {_NOTES: json.dumps(notes, sort_keys=True)},
        )
        with scratch.open("rb") as file:
            os.fsync(file.fileno())


def load_checkpoint(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """What `save_checkpoint` wrote; ArtifactError when the file is not whole."""
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            notes: dict[str, Any] = json.loads(file.metadata()[_NOTES])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path} is no checkpoint of a distillation ({error}); take it away to begin again"
        ) from error
    return tensors, notes
