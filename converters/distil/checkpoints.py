"""A training run on disk: one file, replaced whole, from which the run goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ondevice.converters.tensorfile import write_tensors
from ondevice.errors import ArtifactError

_NOTES = "notes"


def save_checkpoint(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, Any]
) -> None:
    """Replace `path` with `tensors` and `notes` (JSON); CacheUnwritable when the disk is full.

    The old checkpoint stays until the new one is on the disk.
    """
    write_tensors(path, tensors, {_NOTES: json.dumps(notes, sort_keys=True)})


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
