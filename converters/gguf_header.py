"""Tensor table of a GGUF file: names, types, shapes, and whether the file is whole.

Layout as in ggml's docs/gguf.md, versions 2 and 3, little endian: magic, version, two counts,
key/value metadata, tensor infos, padding to the alignment, tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from ondevice.errors import BadCheckpoint, UnsupportedModel

# ggml type number -> (name, weights a block, bytes a block)
_READABLE_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    39: "MXFP4",
}
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"


Shape = tuple[int, ...]
"""Outputs first: the reverse of ggml's order."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's shape, ggml type, and where its data lie in the file, in bytes."""

    shape: Shape
    type_name: str
    start: int
    size_bytes: int


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Place of every tensor by GGUF name.

    Raises BadCheckpoint for what is no whole GGUF file, UnsupportedModel for a tensor type that is
    not read (all K-quants).
    """
    size_bytes = file.stat().st_size
    if size_bytes == 0:
        raise BadCheckpoint(f"{file}: expected a GGUF file, got 0 bytes; download it again")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Cursor(data, file).table(size_bytes)
        except (struct.error, IndexError) as error:
            raise BadCheckpoint(
                f"{file}: expected a whole GGUF header, got a file that ends inside it after "
                f"{size_bytes} bytes; download it again"
            ) from error


class _Cursor:
    """Reads forward through the header; struct.error past the end of the file."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data, self._file, self._at = data, file, 0
        self._alignment = 32

    def table(self, size_bytes: int) -> dict[str, TensorPlace]:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise BadCheckpoint(
                f"{self._file}: expected a GGUF file, got one that begins with {magic!r}; "
                "give a .gguf file or a Hugging Face folder"
            )
        self._at = 4
        version, tensors, pairs = self._take("<IQQ")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self._file}: GGUF version {version}; supported: 2, 3")
        for _ in range(pairs):
            self._skip_pair()
        relative = dict(self._tensor() for _ in range(tensors))
        needed_bytes = max((at.start + at.size_bytes for at in relative.values()), default=0)
        start = -(-self._at // self._alignment) * self._alignment
        if start + needed_bytes > size_bytes:
            raise BadCheckpoint(
                f"{self._file}: expected {start + needed_bytes} bytes (the header's own sum), got "
                f"{size_bytes}; the file is truncated, download it again"
            )
        return {name: replace(place, start=start + place.start) for name, place in relative.items()}

    def _take(self, layout: str) -> tuple[int, ...]:
        values: tuple[int, ...] = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _text(self) -> str:
        (length,) = self._take("<Q")
        (raw,) = struct.unpack_from(f"<{min(length, len(self._data))}s", self._data, self._at)
        self._at += length
        return bytes(raw).decode("utf-8", errors="replace")

    def _skip_pair(self) -> None:
        key = self._text()
        (kind,) = self._take("<I")
        if key == _ALIGNMENT_KEY and kind == 4:
            (self._alignment,) = self._take("<I")
            self._alignment = max(self._alignment, 1)
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            (length,) = self._take("<Q")
            self._at += length
        elif kind == _ARRAY:
            item, count = self._take("<IQ")
            if item in _SCALAR_BYTES:
                self._at += count * _SCALAR_BYTES[item]
            else:
                for _ in range(count):
                    self._skip_value(item)
        elif kind in _SCALAR_BYTES:
            self._at += _SCALAR_BYTES[kind]
        else:
            raise BadCheckpoint(
                f"{self._file}: metadata value of unknown type {kind} at byte {self._at}; "
                "the file is damaged, download it again"
            )

    def _tensor(self) -> tuple[str, TensorPlace]:
        """Name and place; the start counts from the start of all data."""
        name = self._text()
        (rank,) = self._take("<I")
        dims = self._take(f"<{rank}Q")
        kind, offset = self._take("<IQ")
        if kind not in _READABLE_TYPES:
            got = _OTHER_TYPES.get(kind, f"number {kind}")
            raise UnsupportedModel(
                f"{self._file}: tensor {name} is of type {got}; supported: "
                f"{', '.join(type_name for type_name, _, _ in _READABLE_TYPES.values())}; take a "
                "file of one of these, or the Hugging Face folder"
            )
        type_name, block, block_bytes = _READABLE_TYPES[kind]
        size_bytes = math.prod(dims) // block * block_bytes
        return name, TensorPlace(tuple(reversed(dims)), type_name, offset, size_bytes)
