"""Compressing a drafter's matrices: palettes by k-means, or 8-bit integers.

Half precision has 65,536 values, so k-means works on the histogram of a group's values instead of
on the values: an iteration is a search of the palette's midpoints among sorted values and a
difference of running sums, 20 us whatever the group's size, and no value is sampled or left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from ondevice.models.packed import Half, Matrix, Palettised, Scaled

Format = Literal["lut6", "lut4", "int8", "fp16"]
FORMATS: tuple[Format, ...] = ("lut6", "lut4", "int8", "fp16")
_BITS: Mapping[str, int] = MappingProxyType({"lut6": 6, "lut4": 4})

GROUP_ROWS = 16
"""Output channels that share a palette; Apple's guide names 8 to 16 (opt-overview). Palettes of 64
halves for 16 rows of 1,024 weights add 1 % to their 6 bits."""

_MAX_ITERATIONS = 60


@dataclass(frozen=True, slots=True)
class Compression:
    """How the matrices of the layers and of the output head are stored.

    The embedding is no part of a package: the host looks its rows up.
    """

    layers: Format = "fp16"
    head: Format = "fp16"

    def __str__(self) -> str:
        if self.layers == self.head:
            return self.layers
        return f"{self.layers}, head {self.head}"


Pack = Callable[[Half], Matrix]


def packer(form: Format) -> Pack:
    """The function that stores a matrix (out, in) in `form`."""
    if form == "fp16":
        return lambda matrix: matrix
    if form == "int8":
        return scaled
    bits = _BITS[form]
    return lambda matrix: palettised(matrix, bits)


def stored_bytes(rows: int, columns: int, form: Format) -> int:
    """What a matrix takes in weight.bin."""
    if form == "fp16":
        return rows * columns * 2
    if form == "int8":
        return rows * columns + 2 * rows
    bits = _BITS[form]
    palettes: int = rows // group_rows(rows) * 2**bits * 2
    return -(-rows * columns * bits // 8) + palettes


def group_rows(rows: int) -> int:
    """Rows that share a palette: GROUP_ROWS, or what divides `rows`."""
    return math.gcd(rows, GROUP_ROWS)


def scaled(matrix: Half) -> Scaled:
    """Each row as integers of -127 to 127 times a scale, the largest weight exactly at its end."""
    wide = matrix.astype(np.float32)
    largest = np.abs(wide).max(axis=1)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float16)
    scale = np.maximum(scale, np.float16(2.0**-24))
    integers = np.rint(wide / scale.astype(np.float32)[:, None])
    return Scaled(np.clip(integers, -127, 127).astype(np.int8), scale)


def palettised(matrix: Half, bits: int) -> Palettised:
    """The matrix with a palette of 2^bits values for each GROUP_ROWS rows."""
    rows = group_rows(len(matrix))
    groups = matrix.reshape(len(matrix) // rows, -1)
    indices = np.empty(groups.shape, np.uint8)
    palettes = np.zeros((len(groups), 2**bits), np.float16)
    for number, group in enumerate(groups):
        palette, indices[number] = palette_of(group, 2**bits)
        palettes[number, : len(palette)] = palette
        palettes[number, len(palette) :] = palette[-1]
    return Palettised(indices.reshape(matrix.shape), palettes, bits)


def palette_of(values: Half, size: int) -> tuple[Half, npt.NDArray[np.uint8]]:
    """At most `size` ascending halves, and for each value the index of the nearest one.

    values: (n,), finite. Lloyd's algorithm (1957) from quantiles of the cube root of the density,
    where the best quantiser of many levels has its levels (Panter and Dite 1951).
    """
    bits = values.view(np.uint16)
    counts = np.bincount(bits, minlength=65536)
    found = np.flatnonzero(counts)
    levels = found.astype(np.uint16).view(np.float16)
    order = np.argsort(levels, kind="stable")
    levels, weights = levels[order], counts[found[order]].astype(np.float64)
    index_of = np.zeros(65536, np.uint8)
    if len(levels) <= size:
        palette = levels
        index_of[found[order]] = np.arange(len(levels))
    else:
        palette = _lloyd(levels.astype(np.float64), weights, size)
        middles = (palette[1:].astype(np.float64) + palette[:-1]) / 2
        index_of[found[order]] = np.searchsorted(middles, levels.astype(np.float64))
    return palette, index_of[bits]


def _lloyd(levels: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], size: int) -> Half:
    """The palette for ascending `levels` that occur `weights` times, more than `size` of them."""
    total = np.concatenate([[0], np.cumsum(weights)])
    moment = np.concatenate([[0], np.cumsum(weights * levels)])
    centres = _companded(levels, weights, size)
    cuts = np.zeros(size + 1, np.int64)
    for _ in range(_MAX_ITERATIONS):
        inner = np.searchsorted(levels, (centres[1:] + centres[:-1]) / 2)
        new = np.concatenate([[0], inner, [len(levels)]])
        if np.array_equal(new, cuts):
            break
        cuts = new
        mass = np.diff(total[cuts])
        full = mass > 0
        centres[full] = np.diff(moment[cuts])[full] / mass[full]
    rounded: Half = np.unique(centres.astype(np.float16))
    return rounded


def _companded(
    levels: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], size: int
) -> npt.NDArray[np.float64]:
    """First centres: equal shares of the density's cube root, over 256 cells of equal width."""
    edges = np.linspace(levels[0], levels[-1], 257)
    cells = np.clip(np.searchsorted(edges, levels, "right") - 1, 0, 255)
    density = np.cbrt(np.bincount(cells, weights, 256))
    shares = np.concatenate([[0], np.cumsum(density)]) / density.sum()
    centres: npt.NDArray[np.float64] = np.interp((np.arange(size) + 0.5) / size, shares, edges)
    return centres
