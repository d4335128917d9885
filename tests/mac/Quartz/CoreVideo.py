"""Stand-in for CoreVideo's pixel buffers: IOSurfaces of halves with padded rows."""

from __future__ import annotations

import zlib
from typing import Any

from Foundation import NSMutableDictionary
from standin import Memory, Violation, fault

kCVPixelBufferIOSurfacePropertiesKey = "IOSurfaceProperties"
kCVPixelFormatType_OneComponent16Half = 1278226536
ROW_BYTES = 128
"""Rows are padded to these, so that a view with dense strides reads rubbish."""


class CVPixelBuffer:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.bytes_per_row = -(-width * 2 // ROW_BYTES) * ROW_BYTES
        self.memory = Memory(self.bytes_per_row * height)
        self.locks = 0
        self.seal: int | None = None

    def checksum(self) -> int:
        return zlib.crc32(self.memory.bytes)


def CVPixelBufferCreate(
    allocator: None, width: int, height: int, code: int, attributes: Any, out: None
) -> tuple[int, CVPixelBuffer | None]:
    if fault("surface"):
        return -6662, None
    if code != kCVPixelFormatType_OneComponent16Half:
        raise Violation(f"pixel format {code}")
    if not isinstance(attributes, NSMutableDictionary):
        raise Violation("attributes are no NSDictionary")
    if attributes.objectForKey_(kCVPixelBufferIOSurfacePropertiesKey) is None:
        raise Violation("a pixel buffer without an IOSurface")
    return 0, CVPixelBuffer(width, height)


def CVPixelBufferLockBaseAddress(pixels: CVPixelBuffer, flags: int) -> int:
    """The host may touch the memory; nobody but Core ML has while it was not locked."""
    if fault("lock"):
        return -6660
    if pixels.seal is not None and pixels.seal != pixels.checksum():
        raise Violation("an unlocked pixel buffer was written to by the host")
    pixels.seal = None
    pixels.locks += 1
    return 0


def CVPixelBufferUnlockBaseAddress(pixels: CVPixelBuffer, flags: int) -> int:
    if not pixels.locks:
        raise Violation("a pixel buffer was unlocked that is not locked")
    pixels.locks -= 1
    if not pixels.locks:
        pixels.seal = pixels.checksum()
    return 0
