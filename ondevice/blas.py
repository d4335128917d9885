"""A fast BLAS for MLX on Linux.

The MLX wheel for x86 Linux brings a reference BLAS: one thread, 4 GFLOP/s. An OpenBLAS in the
global symbol scope takes its place if it is there before `mlx.core` is first imported, and makes
float32 products 25 to 50 times faster (512 x 2048 x 2048: 1057 -> 33 ms). A Mac has Accelerate and
Metal and needs nothing of this.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What `prepare` found.

    needed: this platform's MLX wheel has a slow BLAS. library: the OpenBLAS that was loaded.
    threads: how many it uses for one product. in_time: it was loaded before MLX; without that it
    has no effect.
    """

    needed: bool
    library: str | None = None
    threads: int | None = None
    in_time: bool = True

    @property
    def fast(self) -> bool:
        """Whether MLX computes float32 products at full speed."""
        return not self.needed or (self.library is not None and self.in_time)

    @property
    def advice(self) -> str:
        """One line for `doctor`: what this means and what to do about it."""
        if not self.needed:
            return "MLX uses this platform's own BLAS"
        if self.library is None:
            return (
                "no OpenBLAS found: MLX uses its reference BLAS, about 30 times slower; "
                "install one (apt-get install libopenblas0-pthread)"
            )
        if not self.in_time:
            return (
                f"{self.library} was loaded after MLX and has no effect; "
                "import ondevice's engine before mlx"
            )
        count = "its own number of" if self.threads is None else self.threads
        return f"MLX uses {self.library} with {count} thread{'s' if self.threads != 1 else ''}"


@cache
def prepare() -> BlasReport:
    """Load an OpenBLAS for MLX where one helps, with one thread unless the user set more.

    To be called before `mlx.core` is first imported; later calls return the first one's report. One
    thread because each unit computes on its own: two threads made a verifier's small products
    slower.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return BlasReport(needed=False)
    in_time = "mlx.core" not in sys.modules
    threads = os.environ.setdefault(THREADS_VARIABLE, "1")  # read by numpy's own copy too
    for name in _candidates():
        library = _load(name)
        if library is not None:
            return BlasReport(True, name, _limit_threads(library, threads), in_time)
    return BlasReport(needed=True, in_time=in_time)


def _candidates() -> Iterator[str]:
    yield from ("libopenblas.so.0", "libopenblas.so")
    for folder in (Path(sys.prefix) / "lib", Path("/usr/lib64"), Path("/opt/OpenBLAS/lib")):
        yield from (str(path) for path in sorted(folder.glob("libopenblas*.so*")))
    found = ctypes.util.find_library("openblas")  # last: it may start a compiler to find out
    if found is not None:
        yield found


def _load(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return library if hasattr(library, "cblas_sgemm") else None


def _limit_threads(library: ctypes.CDLL, threads: str) -> int | None:
    """Set the thread count; the variable alone is too late for a library that is loaded already."""
    try:
        library.openblas_set_num_threads(ctypes.c_int(int(threads)))
        return int(library.openblas_get_num_threads())
    except (AttributeError, ValueError):
        return None
