"""What the stand-ins for Apple's frameworks share: faults to order, rules that are enforced.

A rule of Apple's that the product breaks raises `Violation`, or comes back as Core ML would have
it: an NSError, an Objective-C exception. Faults are ordered through the environment, so that they
reach the processes that the product starts.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, ClassVar

import numpy as np

FAULTS_VARIABLE = "ONDEVICE_TEST_MAC_FAULTS"
FREED = 0xAB


class Violation(AssertionError):
    """The product did what Apple forbids."""


def fault(name: str, default: Any = None) -> Any:
    """What was ordered to go wrong under this name."""
    return json.loads(os.environ.get(FAULTS_VARIABLE, "{}")).get(name, default)


class Pools:
    """Autorelease pools open on this thread, and how many there ever were."""

    local = threading.local()
    total = 0

    @classmethod
    def depth(cls) -> int:
        return getattr(cls.local, "depth", 0)


def in_a_pool(what: str) -> None:
    if not Pools.depth():
        raise Violation(f"{what} outside an autorelease pool")


class Owned:
    """An object for the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def _on_its_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise Violation(f"{type(self).__name__} was called off its thread")


class Memory:
    """Bytes that are poisoned, not given back, when their owner is gone."""

    graves: ClassVar[list[np.ndarray]] = []

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0x7E, np.uint8)  # never zero: who wants zeros writes them

    def __del__(self) -> None:
        self.bytes[:] = FREED
        self.graves.append(self.bytes)

    @classmethod
    def check_graves(cls) -> None:
        """Nobody wrote through a view of memory that was freed."""
        for grave in cls.graves:
            if not (grave == FREED).all():
                raise Violation("a freed array was written to")


class VarList:
    """objc.varlist: an address without a length."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def as_buffer(self, count: int) -> memoryview:
        if count > self._memory.bytes.size:
            raise Violation(f"{count} bytes asked for of {self._memory.bytes.size}")
        address = self._memory.bytes.__array_interface__["data"][0]
        return _at(address, count)


def _at(address: int, count: int) -> memoryview:
    """Memory by its address alone, which keeps nobody alive."""
    import ctypes

    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
