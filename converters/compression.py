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
halves for 16 rows of 1,024 weights add 1 % to their 6 bits.

Fewer rows help little: first choices of an early default drafter equal to those of halves, along
795 tokens of its verifier's text, with 16, 8, 4, 2 rows: 96.5, 96.0, 96.4, 97.4 % (6.1 to 6.8 bits;
int8: 97.9 % of 8.0). Nor did rows scaled to one norm (94.6 % where this has 96.6), nor errors
compensated by GPTQ (Frantar et al. 2023) on 3,475 tokens of our prompts (96.5 %)."""

_ITERATIONS, _MOVES, _ITERATIONS_AFTER_MOVE = 8, 12, 6
_INTERVALS = 8  # of the density's estimate, for each entry of a palette


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
Double = npt.NDArray[np.float64]


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
    where the best quantiser of many levels has its levels (Panter and Dite 1951), then unions and
    cuts: within some percent of the least error there is.
    """
    # Halves in the order of their values are these numbers in the order of theirs.
    signs = values.view(np.int16) >> 15
    places = values.view(np.uint16) ^ (signs.view(np.uint16) | np.uint16(0x8000))
    counts = np.bincount(places, minlength=65536)
    found = np.flatnonzero(counts).astype(np.uint16)
    flips = np.where(found < 0x8000, np.uint16(0xFFFF), np.uint16(0x8000))
    levels = (found ^ flips).view(np.float16)
    if len(levels) <= size:
        palette, chosen = levels, np.arange(len(levels))
    else:
        wide = levels.astype(np.float64)
        palette = _best_palette(wide, counts[found].astype(np.float64), size)
        middles = (palette[1:].astype(np.float64) + palette[:-1]) / 2
        cuts = np.concatenate([[0], wide.searchsorted(middles, side="right"), [len(wide)]])
        chosen = np.repeat(np.arange(len(palette)), np.diff(cuts))
    index_of = np.zeros(65536, np.uint8)
    index_of[found] = chosen
    return palette, index_of[places]


class _Histogram:
    """Ascending levels, (n,), that occur `weights` times; sums over runs of them in no time."""

    def __init__(self, levels: Double, weights: Double) -> None:
        self.levels = levels
        self._sums = np.zeros((3, len(levels) + 1))
        np.cumsum([weights, weights * levels, weights * levels**2], axis=1, out=self._sums[:, 1:])

    def centres(self, cuts: npt.NDArray[np.int64]) -> Double:
        """Mean of each run between two cuts, which are ascending and different."""
        mass, moment, _ = self._sums[:, cuts[1:]] - self._sums[:, cuts[:-1]]
        means: Double = moment / mass
        return means

    def errors(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Double:
        """Sum of squares around its own mean of each run; 0 for an empty one."""
        mass, moment, square = self._sums[:, ends] - self._sums[:, starts]
        around: Double = np.maximum(square - moment**2 / np.maximum(mass, 1), 0)
        return around

    def settled(self, centres: Double, iterations: int) -> npt.NDArray[np.int64]:
        """Cuts after Lloyd's iterations from `centres`: never an empty run between two."""
        cuts = np.zeros(0, np.int64)
        for _ in range(iterations):
            new = np.empty(len(centres) + 1, np.int64)
            new[0], new[-1] = 0, len(self.levels)
            new[1:-1] = self.levels.searchsorted((centres[1:] + centres[:-1]) / 2)
            if not (new[1:] > new[:-1]).all():
                new = np.unique(new)
            if len(new) == len(cuts) and (new == cuts).all():
                break
            cuts, centres = new, self.centres(new)
        return cuts


def _best_palette(levels: Double, weights: Double, size: int) -> Half:
    """The palette for more than `size` levels.

    Lloyd's algorithm ends where no entry wants to move; then, as long as it pays, the two
    neighbours whose union costs least become one and the run that gains most is cut in two.
    """
    histogram = _Histogram(levels, weights)
    cuts = histogram.settled(_companded(levels, weights, size), _ITERATIONS)
    for _ in range(_MOVES):
        moved = _moved(histogram, cuts, size)
        if moved is None:
            break
        cuts = histogram.settled(moved, _ITERATIONS_AFTER_MOVE)
    palette: Half = np.unique(histogram.centres(cuts).astype(np.float16))
    return palette


def _moved(histogram: _Histogram, cuts: npt.NDArray[np.int64], size: int) -> Double | None:
    """Centres after one union and one cut; None when that would not pay."""
    starts, ends = cuts[:-1], cuts[1:]
    errors = histogram.errors(starts, ends)
    middles = np.searchsorted(histogram.levels, histogram.centres(cuts))
    gains = errors - histogram.errors(starts, middles) - histogram.errors(middles, ends)
    cut = int(gains.argmax())
    kept = cuts
    if len(starts) >= size:
        costs = histogram.errors(starts[:-1], ends[1:]) - errors[:-1] - errors[1:]
        costs[max(cut - 1, 0) : cut + 1] = np.inf
        union = int(costs.argmin())
        if not costs[union] < gains[cut]:
            return None
        kept = np.delete(cuts, union + 1)
    if not gains[cut] > 0:
        return None
    return histogram.centres(np.unique(np.append(kept, middles[cut])))


def _companded(levels: Double, weights: Double, size: int) -> Double:
    """First centres: of intervals with equal mass, one as wide as w gets w^(2/3) of them.

    That is the cube root of its density times its width; an outlier's wide interval keeps its own.
    """
    mass = np.concatenate([[0], np.cumsum(weights)])
    middles = (mass[1:] + mass[:-1]) / (2 * mass[-1])
    edges = np.interp(np.linspace(0, 1, _INTERVALS * size + 1), middles, levels)
    shares = np.concatenate([[0], np.cumsum(np.cbrt(np.diff(edges)) ** 2)])
    wanted = (np.arange(size) + 0.5) / size * shares[-1]
    centres: Double = np.interp(wanted, shares, edges)
    return centres
