"""Ops on Core ML states: arrays that live from one prediction to the next."""

from __future__ import annotations

import numpy as np

from ondevice.coreml.blob import Array
from ondevice.coreml.ops.base import Lowered, Operands, rule


@rule("read_state", moves=True)
def _read_state(op: Operands) -> Lowered:
    return Lowered(np.copy, ("input",))


@rule("write_state", moves=True)
def _write_state(op: Operands) -> Lowered:
    def kernel(state: Array, data: Array) -> tuple[()]:
        np.copyto(state, data)
        return ()

    return Lowered(kernel, ("input", "data"))
