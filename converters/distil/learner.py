"""What the training loop asks of a student, whatever framework computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.converters.distil.corpus import Batch

Single = npt.NDArray[np.float32]
State = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Learned:
    """One optimiser step, or one look: mean loss a target, targets, right first choices."""

    loss: float
    targets: int
    right: int


class Learner(Protocol):
    """A student with its optimiser."""

    def learn(self, batches: Sequence[Batch], rate: float) -> Learned:
        """One optimiser step at learning rate `rate` on the mean loss of all `batches`."""
        ...

    def judge(self, batches: Sequence[Batch]) -> Learned:
        """The same figures, nothing learned."""
        ...

    def weights(self) -> dict[str, Single]:
        """The student's own tensors by Hugging Face name, layers numbered from 0."""
        ...

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Weights and the optimiser's moments: all that `restore` needs to go on exactly."""
        ...

    def restore(self, state: State) -> None:
        """Take back what `state` gave."""
        ...
