"""Rotary position embedding on the host, for graphs that take cos and sin as inputs.

The convention is Hugging Face's and MLX's `traditional=False`: dimension i of a head is paired
with dimension i + head_dim / 2 (Su et al. 2021, section 3.4.2, in the halves layout).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ondevice.models.config import Llama3Scaling


class Rotary(Protocol):
    """The part of a ModelConfig that rotary embedding depends on."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""

    @property
    def rope_theta(self) -> float:
        """Base of the frequencies."""

    @property
    def rope_scaling(self) -> Llama3Scaling | None:
        """None for plain RoPE."""


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """A `Rotary` for who has no ModelConfig."""

    head_dim: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None


def inverse_frequencies(config: Rotary) -> npt.NDArray[np.float64]:
    """Angle per position of each dimension pair, shape (head_dim / 2,), in radians."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies: npt.NDArray[np.float64] = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _llama3_scaled(frequencies, config.rope_scaling)


def _llama3_scaled(
    frequencies: npt.NDArray[np.float64], scaling: Llama3Scaling
) -> npt.NDArray[np.float64]:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    scaled: npt.NDArray[np.float64] = frequencies * (smooth + (1 - smooth) / scaling.factor)
    return scaled


def cos_sin(
    positions: npt.NDArray[np.int64], frequencies: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """The `cos` and `sin` inputs of a drafter step, each of shape (1, 1, head_dim, T), fp16.

    positions: (T,) absolute positions. Both halves of a head hold the same angles. Angles are
    taken in float64: at position 8,000 a float32 product is off by 5e-4 radians.
    """
    angles = np.outer(frequencies, positions)
    both = np.concatenate([angles, angles])[None, None]
    return np.cos(both).astype(np.float16), np.sin(both).astype(np.float16)
