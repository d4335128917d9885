"""Tensors in memory that Core ML takes without copying, seen as numpy arrays.

Half-precision tensors whose rows fill whole cache lines live in an IOSurface (a CVPixelBuffer of
one 16-bit component: width is the last axis), which the Neural Engine reads and writes in place.
The others, whose rows such a buffer would pad, are plain MLMultiArrays. Either may have padded
rows: strides are Core ML's to choose, and the numpy view has them.

A pixel buffer that the host has locked must not be predicted on, and one that is not locked must
not be touched by the host. So the host holds the lock, but for the time of a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ondevice.coreml.apple import Apple
from ondevice.coreml.runtime import Array, TensorSpec
from ondevice.errors import UnitFailed

ROW_BYTES = 64
"""The Neural Engine's rows begin at multiples of this."""

_CODES: dict[np.dtype[Any], int] = {
    np.dtype(np.float16): 0x10000 | 16,
    np.dtype(np.float32): 0x10000 | 32,
    np.dtype(np.int32): 0x20000 | 32,
}
"""MLMultiArrayDataType."""
_TYPES = {code: dtype for dtype, code in _CODES.items()}


class DeviceArray:
    """One tensor: `np.asarray` of it is a view that keeps it alive.

    feature: the MLFeatureValue to bind. multi_array: the MLMultiArray in it.
    """

    def __init__(self, apple: Apple, spec: TensorSpec) -> None:
        """Zeros of `spec`. Raises UnitFailed when Core ML gives no such array."""
        self._apple, self._spec = apple, spec
        self._pixels = _surface(apple, spec) if _fills_rows(spec) else None
        self.multi_array = self._make()
        self.feature = apple.core_ml.MLFeatureValue.featureValueWithMultiArray_(self.multi_array)
        self.lock()
        # The address is asked for under the lock, and holds as long as the array does.
        self._memory, self.__array_interface__ = _interface(self.multi_array, spec)
        np.asarray(self)[...] = 0

    def _make(self) -> Any:
        shape, what = self._apple.array(self._spec.shape), f"an array {self._spec.shape}"
        empty = self._apple.core_ml.MLMultiArray.alloc()
        with self._apple.explained(what):
            if self._pixels is not None:
                array = empty.initWithPixelBuffer_shape_(self._pixels, shape)
                return self._apple.must((array, None), what)
            code = _CODES[self._spec.dtype]
            return self._apple.must(empty.initWithShape_dataType_error_(shape, code, None), what)

    @property
    def on_surface(self) -> bool:
        """Whether it is an IOSurface."""
        return self._pixels is not None

    def lock(self) -> None:
        """The host may read and write from now on. Raises UnitFailed."""
        self._check("locked", self._apple.core_video.CVPixelBufferLockBaseAddress)

    def unlock(self) -> None:
        """Core ML may read and write from now on. Raises UnitFailed."""
        self._check("unlocked", self._apple.core_video.CVPixelBufferUnlockBaseAddress)

    def _check(self, done: str, function: Any) -> None:
        if self._pixels is None:
            return
        status = function(self._pixels, 0)
        if status != 0:
            raise UnitFailed(f"an IOSurface {self._spec.shape} could not be {done}: {status}")


@contextmanager
def lent(surfaces: Iterable[DeviceArray]) -> Iterator[None]:
    """Core ML may read and write `surfaces` in the block, the host may not. Raises UnitFailed."""
    unlocked = []
    try:
        for surface in surfaces:
            surface.unlock()
            unlocked.append(surface)
        yield
    finally:
        for surface in unlocked:
            surface.lock()


def owner(array: Array) -> DeviceArray | None:
    """The DeviceArray whose whole memory `array` is; None for any other array."""
    base = array.base
    if not isinstance(base, DeviceArray):
        return None
    whole = base.__array_interface__
    same = array.__array_interface__["data"] == whole["data"] and array.shape == whole["shape"]
    return base if same and array.strides == whole["strides"] else None


def copy_out(multi_array: Any, spec: TensorSpec, out: Array) -> None:
    """Copy what Core ML put into an array of its own to `out`. Raises UnitFailed."""
    dtype = _TYPES.get(multi_array.dataType())
    shape = tuple(int(size) for size in multi_array.shape())
    if dtype is None or shape != spec.shape:
        raise UnitFailed(
            f"Core ML returned type {multi_array.dataType()} of shape {shape}, expected "
            f"{spec.dtype} {spec.shape}"
        )
    holder = _Borrowed()
    memory, holder.__array_interface__ = _interface(multi_array, TensorSpec(shape, dtype))
    np.copyto(out, np.asarray(holder), casting="same_kind")
    del memory


def supported(dtype: np.dtype[Any]) -> bool:
    """Whether an MLMultiArray can hold it."""
    return dtype in _CODES


class _Borrowed:
    __array_interface__: dict[str, Any]


def _fills_rows(spec: TensorSpec) -> bool:
    row_bytes = spec.shape[-1] * spec.dtype.itemsize if spec.shape else 0
    return spec.dtype == np.float16 and row_bytes > 0 and row_bytes % ROW_BYTES == 0


def _surface(apple: Apple, spec: TensorSpec) -> Any:
    video = apple.core_video
    height = int(np.prod(spec.shape[:-1], dtype=np.int64))
    key = video.kCVPixelBufferIOSurfacePropertiesKey
    status, pixels = video.CVPixelBufferCreate(
        None,
        spec.shape[-1],
        height,
        video.kCVPixelFormatType_OneComponent16Half,
        apple.dictionary({key: apple.dictionary({})}),
        None,
    )
    if status != 0 or pixels is None:
        raise UnitFailed(f"no IOSurface of {spec.shape[-1]} x {height} halves: status {status}")
    return pixels


def _interface(multi_array: Any, spec: TensorSpec) -> tuple[Any, dict[str, Any]]:
    """What keeps the memory's address valid, and numpy's description of the memory."""
    strides = _strides([int(stride) for stride in multi_array.strides()], spec)
    span = sum((size - 1) * stride for size, stride in zip(spec.shape, strides, strict=True))
    memory = multi_array.dataPointer().as_buffer(span + spec.dtype.itemsize)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return memory, {
        "version": 3,
        "shape": spec.shape,
        "strides": strides,
        "typestr": spec.dtype.str,
        "data": (address, False),
    }


def _strides(elements: Sequence[int], spec: TensorSpec) -> tuple[int, ...]:
    """Strides in bytes. Where Core ML's cannot be true ([0, 0, 0] has been seen), dense ones."""
    dense, step = [], 1
    for size in reversed(spec.shape):
        dense.append(step)
        step *= size
    dense.reverse()
    # Rows may be padded, but no axis may run into the next one.
    least, plausible = 1, len(elements) == len(spec.shape)
    for size, stride in zip(reversed(spec.shape), reversed(elements), strict=False):
        plausible = plausible and (size == 1 or stride >= least)
        least = max(least, stride * size)
    chosen = elements if plausible else dense
    return tuple(stride * spec.dtype.itemsize for stride in chosen)
