"""This machine, as far as it decides how long a step takes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Machine:
    """cpu: the processor's or SoC's model. cores: of the machine; usable: for this process.

    system: name, version and build of the operating system. apple_silicon: whether there are a GPU
    that MLX uses and a Neural Engine.
    """

    cpu: str
    cores: int
    usable_cores: int
    memory_bytes: int
    system: str
    apple_silicon: bool


@cache
def this_machine() -> Machine:
    """What the operating system says of itself; "unknown" and 0 for what it does not say."""
    on_mac = sys.platform == "darwin"
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Machine(
        cpu=(_sysctl("machdep.cpu.brand_string") if on_mac else _linux_cpu()) or "unknown",
        cores=cores,
        usable_cores=usable,
        memory_bytes=_memory_bytes(),
        system=_mac_system() if on_mac else _linux_system(),
        apple_silicon=on_mac and platform.machine() == "arm64",
    )


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _mac_system() -> str:
    return f"macOS {platform.mac_ver()[0]} ({_sysctl('kern.osversion')})"


def _linux_cpu() -> str:
    """The first processor's "model name"; ARM kernels give none."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _linux_system() -> str:
    name = platform.system()
    with suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    return f"{name}, kernel {platform.release()}"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0
