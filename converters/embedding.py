"""Where the host finds the drafter's input rows: the verifier's folder, or beside the drafter."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ondevice.artifact import DRAFTER_EMBEDDING

if TYPE_CHECKING:
    import mlx.core as mx

TENSOR = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class EmbeddingPlace:
    """Folder kind, tensor name, sha256 of the tensor's bytes as stored."""

    folder: Literal["verifier", "drafter"]
    tensor: str
    sha256: str


def place_embedding(
    rows: npt.NDArray[np.float16], verifier_folder: Path | None, drafter_folder: Path
) -> EmbeddingPlace:
    """Point at the verifier's embedding when it rounds to `rows`, else write `rows` once.

    rows: (vocab, D). verifier_folder: None for a drafter that is made for itself. A quantised
    verifier holds other values, or the same in another form.
    """
    import mlx.core as mx

    for file in sorted(verifier_folder.glob("*.safetensors")) if verifier_folder else ():
        found = mx.load(str(file))
        assert isinstance(found, dict)
        if TENSOR in found and _rounds_to(found[TENSOR], rows):
            return EmbeddingPlace("verifier", TENSOR, _sha256(found[TENSOR]))
    own = mx.array(rows)
    mx.save_safetensors(str(drafter_folder / DRAFTER_EMBEDDING), {TENSOR: own})
    return EmbeddingPlace("drafter", TENSOR, _sha256(own))


def _rounds_to(tensor: mx.array, rows: npt.NDArray[np.float16]) -> bool:
    import mlx.core as mx

    if tensor.shape != rows.shape or not mx.issubdtype(tensor.dtype, mx.floating):
        return False
    return bool(mx.array_equal(tensor.astype(mx.float16), mx.array(rows)))


def _sha256(tensor: mx.array) -> str:
    import mlx.core as mx

    return hashlib.sha256(np.array(tensor.view(mx.uint8)).tobytes()).hexdigest()
