"""A Mac to test on: the stand-ins of tests/mac in this process and in those it starts.

While one is lent, the lines of the product's Mac-only code that run in this process are counted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from ondevice.home import HOME_VARIABLE

STANDINS = Path(__file__).parent / "mac"
FAULTS = {
    name
    for file in STANDINS.rglob("*.py")
    for name in re.findall(r'fault\("(\w+)"', file.read_text(encoding="utf-8"))
}
"""What can go wrong on it."""
MODULES = (
    "objc",
    "Foundation",
    "CoreML",
    "Quartz",
    "standin",
    "toolsbinding",
    "zeus_apple_silicon",
)
MAC_ONLY = (
    *(f"coreml/{name}" for name in ("apple", "compiled", "devicearray", "plan", "pyobjc")),
    *("conditions", "energy", "ladder", "power", "probe", "probereport", "reference"),
)
"""Modules that only a Mac uses, or that this suite reaches through the stand-ins alone."""

lines = Coverage(data_file=None, include=[f"*/ondevice/{name}.py" for name in MAC_ONLY])


class AppleMac:
    """The Mac under test; `order` makes things go wrong on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def order(self, **faults: Any) -> None:
        """These faults and no others, from now on."""
        assert faults.keys() <= FAULTS, f"no stand-in knows {faults.keys() - FAULTS}"
        self._patch.setenv("ONDEVICE_TEST_MAC_FAULTS", json.dumps(faults))

    def module(self, name: str) -> Any:
        """One of the stand-ins."""
        return __import__(name)


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]


@pytest.fixture
def counted() -> Iterator[None]:
    """The lines of MAC_ONLY that run in the test are counted."""
    traced = sys.gettrace() is None  # a debugger or another coverage comes first
    if traced:
        lines.start()
    yield
    if traced:
        lines.stop()


@pytest.fixture
def mac(counted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AppleMac]:
    """A Mac with a home of its own."""
    if sys.platform == "darwin":
        pytest.skip("the stand-ins are for machines without Apple's frameworks")
    forget()
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    here = AppleMac(monkeypatch)
    here.order()
    yield here
    here.module("standin").Memory.check_graves()
    forget()


@pytest.fixture
def tools_here(mac: AppleMac, monkeypatch: pytest.MonkeyPatch) -> AppleMac:
    """coremltools that predicts, in this process."""
    import coremltools  # noqa: F401  # its modules are changed

    binding = mac.module("toolsbinding")
    monkeypatch.setitem(sys.modules, "coremltools.libcoremlpython", binding)
    for name in ("_compiled_model", "utils"):
        module = sys.modules[f"coremltools.models.{name}"]
        monkeypatch.setattr(module, "_macos_version", lambda: (27, 0))
    for name in ("_compiled_model", "model"):
        module = sys.modules[f"coremltools.models.{name}"]
        monkeypatch.setattr(module, "_MLModelProxy", binding._MLModelProxy)
    return mac
