"""The choices of a distillation, and what a work folder must be of to be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from ondevice.artifact import replacing
from ondevice.converters.distil.vocabulary import ROW_MULTIPLE, check_row_count
from ondevice.errors import BadRequest

RECIPE_FILE = "recipe.json"
MOST_ROWS = 16384
"""One output of the drafter graph holds so many. 97.4 to 98.9 % of greedy tokens are among them."""


class Recipe(BaseModel):
    """Every choice with its default; models/README.md has the experiment behind each.

    layers: of the verifier, that the student begins as; None takes the first three. rows: output
    rows; None takes 16,384, or nearly all of a small vocabulary. first_choice_weight: share of the
    loss that is cross-entropy on the verifier's first choice. echo_share: tokens of passages said
    again, which teach to copy, over those of the texts. batch_tokens: computed at a time, padding
    included; step_batches: of one step, which two workers compute side by side. data_share: of the
    hours, for making data. decode_rows: texts that a worker makes side by side. held_out: one text
    in so many is for validation.
    shard_s, checkpoint_s: seconds of data making and of training that a kill can cost.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: tuple[int, ...] | None = None
    rows: int | None = Field(default=None, gt=0)
    first_choice_weight: float = Field(default=0.3, ge=0, le=1)
    echo_share: float = Field(default=0.2, ge=0, le=1)
    rate: float = Field(default=2e-3, gt=0)
    descent: float = Field(default=0.4, gt=0, le=1)
    batch_tokens: int = Field(default=512, gt=0)
    step_batches: int = Field(default=2, gt=0)
    data_share: float = Field(default=0.45, gt=0, lt=1)
    question_tokens: int = Field(default=160, gt=0)
    answer_tokens: int = Field(default=256, gt=0)
    decode_rows: int = Field(default=64, gt=0)
    held_out: int = Field(default=40, gt=1)
    shard_s: float = Field(default=60.0, gt=0)
    checkpoint_s: float = Field(default=120.0, gt=0)
    seed: int = Field(default=0, ge=0)

    def chosen_rows(self, vocab_size: int) -> int:
        """The student's output rows; BadRequest for an impossible number."""
        if self.rows is None:
            return min(MOST_ROWS, vocab_size // ROW_MULTIPLE * ROW_MULTIPLE)
        if min(self.rows, vocab_size) > MOST_ROWS:
            raise BadRequest(
                f"rows: expected at most {MOST_ROWS}, what the drafter's output holds, "
                f"got {self.rows}"
            )
        check_row_count(self.rows, vocab_size)
        return self.rows

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """The student's layers for a verifier of `num_layers`; BadRequest for impossible ones."""
        if self.layers is None:
            return tuple(range(min(3, num_layers)))
        if sorted(set(self.layers)) != list(self.layers) or not self.layers:
            raise BadRequest(f"layers: expected ascending indices, got {list(self.layers)}")
        if self.layers[0] < 0 or self.layers[-1] >= num_layers:
            raise BadRequest(
                f"layers: expected indices from 0 to {num_layers - 1}, got {list(self.layers)}"
            )
        return self.layers


class Identity(BaseModel):
    """What a work folder belongs to: another verifier, recipe or text is another run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Recipe
    verifier_sha256: tuple[str, ...]
    tokenizer_sha256: str
    texts_sha256: tuple[str, ...] = ()
    start_sha256: str | None = None

    def claim(self, folder: Path) -> Self:
        """Make `folder` this run's, or go on with it; BadRequest when it is another's."""
        path = folder / RECIPE_FILE
        mine: dict[str, Any] = json.loads(self.model_dump_json())
        if path.exists():
            try:
                theirs = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                theirs = None
            if theirs != mine:
                raise BadRequest(
                    f"{folder} holds another distillation (verifier, seed, recipe or texts "
                    "differ); give another folder with --work, or take this one away"
                )
            return self
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")
        return self
