"""The real coremltools, made to believe that it is on a Mac: its binding is a stand-in.

A folder above the real one in sys.path; it takes itself out, and the real one's place is taken by
the real one.
"""

import importlib
import sys
from pathlib import Path

sys.path.remove(str(Path(__file__).parent.parent))
del sys.modules["coremltools"]
sys.modules["coremltools.libcoremlpython"] = importlib.import_module("toolsbinding")
importlib.import_module("coremltools")
for _name in ("_compiled_model", "utils"):
    importlib.import_module(f"coremltools.models.{_name}")._macos_version = lambda: (27, 0)
