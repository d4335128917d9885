"""A matrix as a package stores it: half precision, a palette, or 8-bit integers with a scale.

The engine reads palettes compressed from memory on every chip (4 bits from M1 on), which is why
they are the default; 8-bit integers are as small on disk, and from M2 on in memory too
(coreai-model-zoo, ane-silicon-reference 7; coremltools guide, opt-quantization-perf).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Half = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Palettised:
    """Indices (out, in) into palettes (groups, 2^bits); a group is out / groups consecutive rows.

    Core ML: constexpr_lut_to_dense.
    """

    indices: npt.NDArray[np.uint8]
    palettes: Half
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.indices.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """What it takes in weight.bin."""
        return -(-self.indices.size * self.bits // 8) + self.palettes.nbytes

    def dense(self) -> Half:
        """The matrix that it stands for."""
        groups = len(self.palettes)
        rows = self.indices.reshape(groups, -1)
        picked = np.take_along_axis(self.palettes, rows.astype(np.intp), axis=1)
        return picked.reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Integers (out, in) times a scale (out,) for each row.

    Core ML: constexpr_blockwise_shift_scale.
    """

    integers: npt.NDArray[np.int8]
    scale: Half

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.integers.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """What it takes in weight.bin."""
        return self.integers.nbytes + self.scale.nbytes

    def dense(self) -> Half:
        """The matrix that it stands for."""
        product = self.integers.astype(np.float32) * self.scale.astype(np.float32)[:, None]
        return product.astype(np.float16)


Matrix = Half | Palettised | Scaled


def dense(matrix: Matrix) -> Half:
    """The matrix in half precision."""
    return matrix if isinstance(matrix, np.ndarray) else matrix.dense()
