"""Stand-in for PyObjC's core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from standin import Pools


class error(Exception):
    """An Objective-C exception."""


@contextmanager
def autorelease_pool() -> Iterator[None]:
    Pools.local.depth = Pools.depth() + 1
    Pools.total += 1
    try:
        yield
    finally:
        Pools.local.depth -= 1
