"""Rows of an embedding matrix, read where they lie: a safetensors file, mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ondevice.errors import ArtifactError

_LENGTH_BYTES = 8  # of the header, little-endian, before the header itself
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Embedding:
    """A (vocab, D) tensor in fp32, fp16 or bf16; only the rows that are asked for are read."""

    def __init__(self, stored: npt.NDArray[Any], is_bfloat16: bool) -> None:
        """stored: the tensor as it lies in the file, bfloat16 as its 16-bit words."""
        self._stored = stored
        self._is_bfloat16 = is_bfloat16

    @classmethod
    def open(cls, files: Sequence[Path], tensor: str, sha256: str) -> Self:
        """Map `tensor` from the one of `files` that has it; sha256 is that of its stored bytes.

        Raises ArtifactError when no file has it, or when its bytes or its type are other ones.
        """
        place = _find(files, tensor)
        try:
            stored = np.memmap(place.file, np.uint8, "r", place.start, (place.end - place.start,))
            matrix = stored.view(_DTYPES[place.dtype]).reshape(place.shape[0], place.shape[1])
        except (KeyError, IndexError, ValueError, OSError) as error:
            raise ArtifactError(
                f"{tensor} in {place.file} cannot be used as an embedding: expected a whole matrix "
                f"of {', '.join(_DTYPES)}, got {place.dtype} {list(place.shape)}; "
                "convert the pair again"
            ) from error
        found = hashlib.sha256(stored.data).hexdigest()
        if found != sha256:
            raise ArtifactError(
                f"{tensor} in {place.file} is not the embedding that the drafter was built for: "
                f"sha256 expected {sha256[:12]}, got {found[:12]}; convert the drafter again"
            )
        return cls(matrix, place.dtype == "BF16")

    @property
    def shape(self) -> tuple[int, int]:
        """(vocab, D)."""
        rows, columns = self._stored.shape
        return rows, columns

    def rows(self, tokens: Sequence[int]) -> npt.NDArray[np.float16]:
        """The rows of `tokens`, rounded to fp16, shape (len(tokens), D)."""
        rows = self._stored[np.asarray(tokens, np.int64)]
        if self._is_bfloat16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float16)


def _find(files: Sequence[Path], tensor: str) -> _Place:
    for file in files:
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                header = json.loads(stream.read(min(length, file.stat().st_size)))
            entry = header.get(tensor)
            if entry is None:
                continue
            start, end = (_LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
            return _Place(file, entry["dtype"], tuple(entry["shape"]), start, end)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{file} is no readable safetensors file ({type(error).__name__}); "
                "convert the pair again"
            ) from error
    looked = ", ".join(str(file) for file in files) or "no safetensors file at all"
    raise ArtifactError(f"the embedding {tensor} is missing from {looked}; convert the pair again")
