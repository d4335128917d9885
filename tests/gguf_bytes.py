"""GGUF files byte by byte, after ggml's docs/gguf.md: quantised blocks and damaged headers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
ALIGNMENT = 32

Blocks = tuple[str, tuple[int, ...], bytes]
"""Type name, shape (outputs first), data."""


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Blocks]) -> Path:
    """Write a version 3 file. Metadata: str, bool, int (uint32), float, or lists of these."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    data = b""
    for name, (type_name, shape, raw) in tensors.items():
        dims = tuple(reversed(shape))
        head += _text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", TYPES[type_name], len(data))
        data += raw + b"\0" * (-len(raw) % ALIGNMENT)
    file.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + data)
    return file


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)


def quantised(
    kind: str, weights: npt.NDArray[np.float32]
) -> tuple[Blocks, npt.NDArray[np.float32]]:
    """Blocks of 32 as ggml lays them out, and the exact float32 value of every weight in them."""
    if kind in ("F32", "F16"):
        stored = weights.astype(np.float32 if kind == "F32" else np.float16)
        return (kind, weights.shape, stored.tobytes()), stored.astype(np.float32)
    raw, values = bytearray(), []
    for block in weights.reshape(-1, 32):
        low, span = float(block.min()), float(np.ptp(block))
        if kind == "Q4_1":
            scale, offset = np.float16(span / 15), np.float16(low)
            codes = np.clip(np.round((block - offset) / scale), 0, 15).astype(np.uint8)
            raw += scale.tobytes() + offset.tobytes() + _nibbles(codes)
            values.append(codes.astype(np.float32) * np.float32(scale) + np.float32(offset))
        elif kind == "Q4_0":
            scale = np.float16(np.abs(block).max() / 8)
            codes = np.clip(np.round(block / scale) + 8, 0, 15).astype(np.uint8)
            raw += scale.tobytes() + _nibbles(codes)
            values.append((codes.astype(np.float32) - 8) * np.float32(scale))
        else:
            scale = np.float16(np.abs(block).max() / 127)
            signed = np.clip(np.round(block / scale), -127, 127).astype(np.int8)
            raw += scale.tobytes() + signed.tobytes()
            values.append(signed.astype(np.float32) * np.float32(scale))
    return (kind, weights.shape, bytes(raw)), np.concatenate(values).reshape(weights.shape)


def _nibbles(codes: npt.NDArray[np.uint8]) -> bytes:
    """Byte i of a block holds code i in its low half and code i + 16 in its high half."""
    return (codes[:16] | (codes[16:] << 4)).astype(np.uint8).tobytes()
