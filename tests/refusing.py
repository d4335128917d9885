"""How a checkpoint that is no good must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.converters.checkpoint import open_checkpoint
from ondevice.errors import UserError


def assert_refused(kind: type[UserError], source: Path) -> str:
    """Opening `source` raises `kind` in one line that names it; returns the line."""
    with pytest.raises(kind) as caught:
        open_checkpoint(source)
    message = str(caught.value)
    assert "\n" not in message
    assert source.name in message
    return message
