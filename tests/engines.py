"""Engines of the tiny pair whose units live in this process, or are wrapped by the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ondevice.deadline import Deadline
from ondevice.drafter import CoreMLDrafter
from ondevice.engine import Engine, _end_tokens, _load_tokenizer
from ondevice.remote import ProcessDrafter
from ondevice.verifier import MLXVerifier

Wrap = Callable[[Any], Any]


def same(unit: Any) -> Any:
    return unit


def open_here(
    pair: Path,
    verifier: Wrap = same,
    drafter: Wrap = same,
    deadline: Deadline | None = None,
    *,
    process: bool = False,
) -> Engine:
    """verifier, drafter: called with the real unit, on its thread; what they return is used.

    process: the drafter lives in one.
    """
    open_drafter = ProcessDrafter if process else lambda opener, *args: opener(*args)
    folder = pair / "verifier"
    tokenizer = _load_tokenizer(folder)
    return Engine(
        tokenizer,
        _end_tokens(folder, tokenizer),
        lambda: verifier(MLXVerifier.open(folder)),
        lambda: drafter(open_drafter(CoreMLDrafter.open, pair / "drafter", folder)),
        deadline,
    )
