"""The weight file of an .mlpackage: MIL blob storage, version 2.

A 64-byte header {u32 count, u32 version} is followed by blobs. A program names a blob by the offset
of its 64-byte metadata {u32 sentinel, u32 type, u64 size_bytes, u64 data_offset, u64 padding_bits};
the data lie at data_offset, aligned to 64 bytes, so a memory map is enough to read them.
Layout: coremltools, mlmodel/src/MILBlob/Blob/StorageFormat.hpp.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.errors import ArtifactError

Array = np.ndarray[Any, np.dtype[Any]]

_VERSION = 2
_SENTINEL = 0xDEADBEEF
_HEADER = struct.Struct("<II")
_METADATA = struct.Struct("<IIQQQ")

# MIL element type -> numpy type that holds it. Types under a byte are unpacked into whole bytes.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "int4": np.dtype(np.int8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint1": np.dtype(np.uint8),
    "uint2": np.dtype(np.uint8),
    "uint3": np.dtype(np.uint8),
    "uint4": np.dtype(np.uint8),
    "uint6": np.dtype(np.uint8),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
}
_SUB_BYTE_BITS = {"int4": 4, "uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6}
_BLOB_CODES = {
    "fp16": 1,
    "fp32": 2,
    "uint8": 3,
    "int8": 4,
    "int16": 6,
    "uint16": 7,
    "int4": 8,
    "uint1": 9,
    "uint2": 10,
    "uint4": 11,
    "uint3": 12,
    "uint6": 13,
    "int32": 14,
    "uint32": 15,
}


def element_bits(dtype: str) -> int:
    """Bits that one element of the MIL type takes in storage."""
    return _SUB_BYTE_BITS.get(dtype, NUMPY_TYPES[dtype].itemsize * 8)


def storage_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes in storage, elements under a byte packed without gaps."""
    return -(-math.prod(shape) * element_bits(dtype) // 8)


def unpack(packed: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Elements from raw bytes (N,) uint8; those under a byte are packed least bit first.

    Raises ValueError when there are too few bytes.
    """
    bits = _SUB_BYTE_BITS.get(dtype)
    if bits is None:
        return packed.view(NUMPY_TYPES[dtype]).reshape(shape)
    values = _fields(packed, bits, math.prod(shape))
    if dtype.startswith("int"):
        # Shifted up and down again as signed bytes, which extends the sign.
        values = (values << (8 - bits)).view(np.int8) >> (8 - bits)
    return values.reshape(shape)


_GROUPS_AT_ONCE = 16384  # of fields that end on a byte together: what a cache holds


def _fields(packed: Array, bits: int, count: int) -> Array:
    """`count` unsigned fields of 1 to 7 bits, least bit first: a shift and a mask for each place.

    3.5 ns a field of 6 bits; by way of single bits (`np.unpackbits`) it takes 25.
    """
    places = 8 // math.gcd(8, bits)
    width = places * bits // 8
    groups = -(-count // places)
    if len(packed) * 8 < count * bits:
        raise ValueError(f"{len(packed)} bytes for {count} elements of {bits} bits")
    values = np.empty((groups, places), np.uint8)
    for first in range(0, groups, _GROUPS_AT_ONCE):
        block = values[first : first + _GROUPS_AT_ONCE]
        taken = packed[first * width : (first + len(block)) * width]
        missing = len(block) * width - len(taken)
        if missing:
            taken = np.pad(taken, (0, missing))
        _split(taken.reshape(-1, width), bits, block)
    return values.reshape(-1)[:count]


def _split(taken: Array, bits: int, values: Array) -> None:
    """Fields of whole groups, (groups, bytes) uint8, into `values` (groups, places)."""
    mask = np.uint8(2**bits - 1)
    for place in range(values.shape[1]):
        byte, shift = divmod(place * bits, 8)
        field = taken[:, byte] >> np.uint8(shift)
        if shift + bits > 8:
            field |= taken[:, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(field, mask, out=values[:, place])


class BlobFile:
    """A weight file, memory-mapped; raises ArtifactError when it is missing, foreign or short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: Array = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            # An OSError's text would repeat the path.
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(
                f"no readable weights at {path} ({reason}); convert the model again"
            ) from error
        if self._bytes.size < 64:
            raise self._broken(f"has {self._bytes.size} bytes, expected a header of 64")
        _count, version = _HEADER.unpack(self._bytes[: _HEADER.size].tobytes())
        if version != _VERSION:
            raise self._broken(f"has blob version {version}, expected {_VERSION}")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """The blob whose metadata lie at `offset`: a read-only view of the file where it can be."""
        start, size = self.locate(offset, dtype, shape)
        return unpack(self._bytes[start : start + size].view(np.ndarray), dtype, shape)

    def locate(self, offset: int, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """(start, size) in bytes of a blob's data, after checking that all of it is there."""
        if offset + 64 > self._bytes.size:
            raise self._broken(f"ends at {self._bytes.size}, before the blob at {offset}")
        metadata = self._bytes[offset : offset + _METADATA.size].tobytes()
        sentinel, code, size, start, _padding = _METADATA.unpack(metadata)
        if sentinel != _SENTINEL:
            raise self._broken(f"has no blob at {offset} (sentinel {sentinel:#x})")
        if code != _BLOB_CODES.get(dtype):
            raise self._broken(f"has type {code} in the blob at {offset}, expected {dtype}")
        expected = storage_bytes(dtype, shape)
        if size != expected:
            raise self._broken(f"has {size} bytes in the blob at {offset}, expected {expected}")
        if start + size > self._bytes.size:
            raise self._broken(f"ends at {self._bytes.size}, inside the blob at {offset}")
        return start, size

    def _broken(self, what: str) -> ArtifactError:
        return ArtifactError(f"weight file {self.path} {what}; convert the model again")
