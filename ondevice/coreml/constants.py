"""Values that a program knows before it runs: widened once and shared, or unpacked at every use."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from ondevice.coreml.blob import Array
from ondevice.coreml.package import Constant

_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)

LARGE_ELEMENTS = 2**18
"""Constants from this size on are not kept where memory is short."""


class Known:
    """A value known before the run: as stored, and as the emulator computes with it.

    kept: whether it is made once; otherwise each look at it makes it anew.
    """

    def __init__(self, make: Callable[[], Array | str], key: Hashable, kept: bool = True) -> None:
        self.key, self.kept = key, kept
        self._make = make
        self._both: tuple[Array | str, Array | str] | None = None

    @property
    def stored(self) -> Array | str:
        """As the package has it."""
        return self._look()[0]

    @property
    def value(self) -> Array | str:
        """Half precision is widened, the array read-only."""
        return self._look()[1]

    def _look(self) -> tuple[Array | str, Array | str]:
        if self._both is not None:
            return self._both
        stored = self._make()
        both = stored, stored if isinstance(stored, str) else _widened(stored)
        if self.kept:
            self._both = both
        return both


def _widened(stored: Array) -> Array:
    value = np.asarray(stored)
    if value.dtype == _HALF:
        value = value.astype(_SINGLE)
    value = value.view()
    value.flags.writeable = False
    return value


class ConstantPool:
    """Constants shared by all functions of a package.

    keep_large: hold all of them widened; without it large ones take memory only while an op needs
    them.
    """

    def __init__(self, keep_large: bool = True) -> None:
        self._keep_large = keep_large
        self._known: dict[Hashable, Known] = {}

    def of(self, constant: Constant, elements: int) -> Known:
        """A constant of the program."""
        if constant.blob is not None:
            key: Hashable = (str(constant.blob.file.path), constant.blob.offset, constant.type)
        else:
            value = constant.read()
            key = value if isinstance(value, str) else (constant.type, value.tobytes())
        return self.get(key, constant.read, elements)

    def get(self, key: Hashable, make: Callable[[], Array | str], elements: int) -> Known:
        """The value of `key`, which `make` gives; it has so many elements."""
        if key not in self._known:
            kept = self._keep_large or elements < LARGE_ELEMENTS
            self._known[key] = Known(make, key, kept)
        return self._known[key]
