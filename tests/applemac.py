"""A Mac to test on: the stand-ins of tests/mac in this process and in those it starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.home import HOME_VARIABLE

STANDINS = Path(__file__).parent / "mac"
MODULES = (
    "objc",
    "Foundation",
    "CoreML",
    "Quartz",
    "standin",
    "toolsbinding",
    "zeus_apple_silicon",
)


class AppleMac:
    """The Mac under test; `order` makes things go wrong on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def order(self, **faults: Any) -> None:
        """These faults and no others, from now on."""
        self._patch.setenv("ONDEVICE_TEST_MAC_FAULTS", json.dumps(faults))

    def module(self, name: str) -> Any:
        """One of the stand-ins."""
        return __import__(name)


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AppleMac]:
    """A Mac with a home of its own."""
    forget()
    monkeypatch.syspath_prepend(str(STANDINS))
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    here = AppleMac(monkeypatch)
    here.order()
    yield here
    here.module("standin").Memory.check_graves()
    forget()
