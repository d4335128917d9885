"""What a drafter package computes: some layers of a model, and the rows of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from ondevice.artifact import SourceFile
from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.trained import TrainedDrafter, check_trained
from ondevice.errors import BadRequest
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_weights import Single, Tensors


@dataclass(frozen=True, slots=True)
class Network:
    """Tensors by canonical name of a model `source`, of which the layers `places` are taken.

    layers: which layers of the checkpoint they are, or were before training. row_to_token: as the
    manifest has it; where it is not None, `source` has so many tokens and a head of its own.
    """

    source: ModelConfig
    tensors: Tensors
    places: tuple[int, ...]
    layers: tuple[int, ...]
    row_to_token: list[int] | None
    sources: list[SourceFile]

    @property
    def config(self) -> ModelConfig:
        """The drafter's configuration."""
        return self.source.selected(self.places)

    @classmethod
    def cut(
        cls, checkpoint: Checkpoint, layers: Sequence[int], rows: Sequence[int] | None = None
    ) -> Self:
        """Layers of the checkpoint as they are, with all output rows or those of tokens `rows`.

        Raises BadRequest for layers that the checkpoint has not.
        """
        check_layers(checkpoint.config, layers)
        source, tensors = checkpoint.config, checkpoint.tensor
        if rows is not None:
            tensors = partial(_with_rows, checkpoint, np.asarray(rows))
            source = replace(source, vocab_size=len(rows), tied_embeddings=False)
        return cls(
            source=source,
            tensors=tensors,
            places=tuple(layers),
            layers=tuple(layers),
            row_to_token=None if rows is None else list(rows),
            sources=checkpoint.sources,
        )

    @classmethod
    def trained(cls, checkpoint: Checkpoint, trained: TrainedDrafter) -> Self:
        """A student of the checkpoint; raises what `check_trained` raises."""
        check_trained(trained, checkpoint)
        config = trained.config(checkpoint.config)
        return cls(
            source=config,
            tensors=partial(trained.tensor, checkpoint),
            places=tuple(range(config.num_layers)),
            layers=trained.header.layers,
            row_to_token=list(trained.row_to_token),
            sources=[*checkpoint.sources, trained.source],
        )


def check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    """BadRequest unless `layers` are ascending indices of the model's layers."""
    last = config.num_layers - 1
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] > last:
        raise BadRequest(
            f"drafter layers: expected ascending indices from 0 to {last}, got {list(layers)}"
        )


def _with_rows(checkpoint: Checkpoint, rows: np.ndarray, name: str) -> Single:
    if name == "lm_head.weight":
        tied = checkpoint.config.tied_embeddings
        chosen: Single = checkpoint.tensor("model.embed_tokens.weight" if tied else name)[rows]
        return chosen
    values = checkpoint.tensor(name)
    return values[: len(rows)] if name == "model.embed_tokens.weight" else values
