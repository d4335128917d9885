"""Last of all: how much of the code for a Mac this session has executed, on the stand-ins."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import pytest
from applemac import MAC_ONLY, lines

LEAST_PERCENT = 95.0
NEEDED = (  # the modules whose tests do it
    "test_energy",
    "test_fault_matrix",
    "test_on_a_mac",
    "test_probe",
    "test_pyobjc",
    "test_toolsruntime",
)


def test_the_stand_ins_have_made_nearly_every_line_run(capsys):
    """Lines that ran when a module was imported count by that: they are executed once more here."""
    if missing := [name for name in NEEDED if name not in sys.modules]:
        pytest.skip(f"only after {', '.join(missing)} in the same session")
    lines.start()
    for name in MAC_ONLY:
        module = importlib.import_module(f"ondevice.{name.replace('/', '.')}")
        source = Path(module.__file__).read_text(encoding="utf-8")
        exec(compile(source, module.__file__, "exec"), {"__name__": module.__name__})
    lines.stop()
    table = io.StringIO()
    percent = lines.report(file=table, show_missing=True)
    with capsys.disabled():
        print(f"\nlines executed through the stand-ins for macOS:\n{table.getvalue()}")
    assert percent >= LEAST_PERCENT
