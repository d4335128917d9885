"""Arrays to a .safetensors file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from ondevice.artifact import replacing


def write_tensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]
) -> None:
    """Put `tensors` and the header's `notes` at `path`; what was there stays until they are safe.

    Raises CacheUnwritable when the disk is full or cannot be written to. (The library's own writer
    hides the error's number.)
    """
    whole = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    content = save(whole, dict(notes))
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
