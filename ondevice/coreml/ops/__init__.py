"""The emulator's ops by MIL type: `RULES` for those that run, `CONSTEXPR` for packed weights."""

from ondevice.coreml.ops import (  # noqa: F401  fill RULES
    channelwise,
    elementwise,
    linear,
    reduction,
    scatter,
    shape,
    state,
    windows,
)
from ondevice.coreml.ops.base import RULES
from ondevice.coreml.ops.constexpr import CONSTEXPR

__all__ = ["CONSTEXPR", "RULES"]
