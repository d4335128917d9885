"""An OpenBLAS is found, loaded in time, and held to one thread; without one things still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ondevice import blas
from ondevice.blas import BlasReport

SCRIPT = """
import json, os, sys
{first}
from ondevice import blas
report = blas.prepare()
assert blas.prepare() is report
import mlx.core as mx
product = mx.ones((64, 64)) @ mx.ones((64, 64))
print(json.dumps([report.library, report.threads, report.in_time, product[0, 0].item(),
                  os.environ.get("OPENBLAS_NUM_THREADS")]))
"""


def prepared(first: str = "", **environment: str) -> list[object]:
    """What `prepare` reports in a fresh interpreter."""
    clean = {key: value for key, value in os.environ.items() if key != blas.THREADS_VARIABLE}
    command = [sys.executable, "-c", SCRIPT.format(first=first)]
    output = subprocess.run(
        command, check=True, capture_output=True, env={**clean, **environment}, text=True
    ).stdout
    result: list[object] = json.loads(output)
    return result


needs_openblas = pytest.mark.skipif(
    blas.prepare().library is None, reason="no OpenBLAS on this machine"
)


@needs_openblas
def test_it_is_loaded_before_mlx_with_one_thread():
    library, threads, in_time, product, variable = prepared()
    assert (threads, in_time, product, variable) == (1, True, 64.0, "1")
    assert "openblas" in str(library)


@needs_openblas
def test_the_users_own_thread_count_is_kept():
    assert prepared(OPENBLAS_NUM_THREADS="2")[1] in (1, 2)  # 1 where there is one core
    assert prepared(OPENBLAS_NUM_THREADS="2")[4] == "2"


@needs_openblas
def test_loading_after_mlx_is_reported():
    assert prepared(first="import mlx.core")[2] is False


def test_without_a_library_mlx_still_works_and_the_report_says_so():
    hide = "import ctypes\ndef cdll(*a, **k): raise OSError\nctypes.CDLL = cdll"
    library, _, in_time, product, _ = prepared(first=hide)
    assert (library, in_time, product) == (None, True, 64.0)


@pytest.mark.parametrize(
    ("report", "fast", "advice"),
    [
        (BlasReport(needed=False), True, "this platform's own BLAS"),
        (BlasReport(needed=True), False, "apt-get install libopenblas0-pthread"),
        (BlasReport(True, "libopenblas.so.0", 1, in_time=False), False, "has no effect"),
        (BlasReport(True, "libopenblas.so.0", 1), True, "with 1 thread"),
    ],
)
def test_a_report_says_what_it_means(report, fast, advice):
    assert report.fast is fast
    assert advice in report.advice
