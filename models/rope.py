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


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later (Hugging Face `rope_type` "llama3").

    Wavelengths longer than `original_context / low_freq_factor` are stretched by `factor`, those
    shorter than `original_context / high_freq_factor` are kept, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every wavelength stretched by `factor` (`rope_type` "linear")."""

    factor: float


RopeScaling = Llama3Scaling | LinearScaling


class Rotary(Protocol):
    """The part of a ModelConfig that rotary embedding depends on."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""

    @property
    def rope_theta(self) -> float:
        """Base of the frequencies."""

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """None for plain RoPE."""

    @property
    def rotary_dim(self) -> int | None:
        """How many dimensions of a head are rotated, None for all."""


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """A `Rotary` for who has no ModelConfig."""

    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rotary_dim: int | None = None


def inverse_frequencies(config: Rotary) -> npt.NDArray[np.float64]:
    """Angle per position of each dimension pair, shape (head_dim / 2,), in radians.

    Where only some dimensions are rotated, theirs come first and the other pairs have angle 0: the
    rows of queries and keys are stored in that order (`ondevice.models.drafter_weights`).
    """
    rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    frequencies: npt.NDArray[np.float64] = config.rope_theta**-exponents
    if isinstance(config.rope_scaling, Llama3Scaling):
        frequencies = _llama3_scaled(frequencies, config.rope_scaling)
    elif isinstance(config.rope_scaling, LinearScaling):
        frequencies = frequencies / config.rope_scaling.factor
    return np.pad(frequencies, (0, (config.head_dim - rotated) // 2))


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
    cosines, sines = exact_cos_sin(positions, frequencies)
    return cosines.astype(np.float16), sines.astype(np.float16)


def exact_cos_sin(
    positions: npt.NDArray[np.int64], frequencies: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """As `cos_sin`, in double precision."""
    angles = np.outer(frequencies, positions)
    both = np.concatenate([angles, angles])[None, None]
    return np.cos(both), np.sin(both)
