"""Exact speculative decoding on a Mac: drafter on the Neural Engine, verifier on the GPU.

Importing this package is light; MLX, coremltools and transformers come with the first engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.engine import Engine
    from ondevice.errors import OnDeviceError, UserError
    from ondevice.prompt import Message
    from ondevice.records import Window
    from ondevice.sampling import SamplingParams
    from ondevice.schedule import Sizes
    from ondevice.session import Answer, Options, Piece, Session
    from ondevice.statistics import Statistics

_HOMES = {
    "Answer": "session",
    "Engine": "engine",
    "Message": "prompt",
    "OnDeviceError": "errors",
    "Options": "session",
    "Piece": "session",
    "SamplingParams": "sampling",
    "Session": "session",
    "Sizes": "schedule",
    "Statistics": "statistics",
    "UserError": "errors",
    "Window": "records",
}

__all__ = [
    "Answer",
    "Engine",
    "Message",
    "OnDeviceError",
    "Options",
    "Piece",
    "SamplingParams",
    "Session",
    "Sizes",
    "Statistics",
    "UserError",
    "Window",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # 20 ms that few need

        return version("ondevice")
    if name in _HOMES:
        return getattr(import_module(f"ondevice.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ondevice' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
