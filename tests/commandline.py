"""Running the command line: in this process for speed, in another for signals and pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from ondevice.apps.cli import main

Result = tuple[int, str, str]
Run = Callable[..., Result]
COMMAND = [sys.executable, "-c", "from ondevice.apps.cli import main; raise SystemExit(main())"]


def runner(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs the command line and returns its status, stdout and stderr."""

    def run(*arguments: object, stdin: str = "") -> Result:
        read, write = os.pipe()
        with os.fdopen(write, "w") as pipe:
            pipe.write(stdin)
        with os.fdopen(read) as file:
            monkeypatch.setattr(sys, "stdin", file)
            status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


def assert_one_line(result: Result, status: int, *words: str) -> None:
    """Nothing on stdout, one line with all the words on stderr, no traceback."""
    code, out, err = result
    assert (code, out) == (status, ""), err
    assert err.startswith("ondevice: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err
