"""The training loop: steps, validation, checkpoints; goes on where a killed run was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ondevice.converters.distil.checkpoints import load_checkpoint, save_checkpoint
from ondevice.converters.distil.corpus import Batch, Batcher
from ondevice.converters.distil.learner import Learned, Learner
from ondevice.converters.distil.schedule import Schedule

STATE_FILE = "training.safetensors"
MOST_STEPS_IN_ONE = 20
"""Usual steps that one may take; a validation takes about ten."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run is done: after `tokens` input tokens or `seconds` of training, what comes first.

    A run measured in tokens is the same on every machine; one measured in seconds fits an evening.
    """

    tokens: int | None = None
    seconds: float | None = None

    def progress(self, tokens: int, seconds: float) -> float:
        """Share of the run that is done, 0 to 1."""
        done = 0.0
        if self.tokens is not None:
            done = max(done, tokens / self.tokens)
        if self.seconds is not None:
            done = max(done, seconds / self.seconds)
        return min(done, 1.0)


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run is cut: padded tokens of a batch, batches of a step, seconds between checkpoints.

    validate_tokens: input tokens between two validations. patience: validations at the level rate
    without a better first choice after which the descent begins at once, so that the run ends
    early; 0 never does that.
    """

    batch_tokens: int = 512
    step_batches: int = 2
    checkpoint_s: float = 120.0
    validate_tokens: int = 100_000
    patience: int = 20
    seed: int = 0


@dataclass
class Position:
    """Where a run is; everything that a checkpoint notes besides tensors.

    skipped: share of the run that was left out because validation had stalled.
    """

    epoch: int = 0
    batch: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    skipped: float = 0.0
    validations: list[dict[str, float]] = field(default_factory=list)

    @property
    def validation(self) -> float | None:
        """Share of right first choices at the last validation."""
        return self.validations[-1]["first_choice"] if self.validations else None


@dataclass
class Training:
    """Trains `learner` on `batcher`'s texts; `folder` keeps the checkpoint.

    validation: batches that are never trained on.
    """

    learner: Learner
    batcher: Batcher
    validation: Sequence[Batch]
    schedule: Schedule
    budget: Budget
    pace: Pace
    folder: Path
    position: Position = field(default_factory=Position)

    def resume(self) -> bool:
        """Take up the checkpoint if there is one."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return False
        tensors, notes = load_checkpoint(path)
        self.learner.restore(tensors)
        self.position = Position(**notes["position"])
        if notes["texts"] != len(self.batcher):  # more were made: the epoch's order is another
            self.position.epoch += 1
            self.position.batch = 0
        return True

    def run(self, report: Callable[[Position, Learned], None]) -> Position:
        """Train until the budget is spent; `report` is told of every step.

        The state is saved every `checkpoint_s` seconds, at the end, and when anything interrupts.
        """
        saved = time.monotonic()
        batches = self._batches()
        try:
            while self.progress() < 1:
                begun = time.monotonic()
                step, after = self._next_step(batches)
                learned = self.learner.learn(step, self.schedule.at(self.progress()))
                self._advance(step, after, learned)
                self._validate_if_due()
                self._spend(time.monotonic() - begun)
                report(self.position, learned)
                if time.monotonic() - saved > self.pace.checkpoint_s:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()
        return self.position

    def save(self) -> None:
        """Write the checkpoint."""
        notes: dict[str, Any] = {"position": asdict(self.position), "texts": len(self.batcher)}
        save_checkpoint(self.folder / STATE_FILE, self.learner.state(), notes)

    def progress(self) -> float:
        """Share of the run that is done."""
        position = self.position
        spent = self.budget.progress(position.tokens, position.seconds)
        return min(spent + position.skipped, 1.0)

    def _spend(self, elapsed_s: float) -> None:
        """Count a step's time; one that took far longer than others was a process that was stopped.

        Else a machine that slept would have spent the hours.
        """
        position = self.position
        usual_s = position.seconds / (position.steps - 1) if position.steps > 1 else elapsed_s
        position.seconds += min(elapsed_s, MOST_STEPS_IN_ONE * usual_s)

    def _batches(self) -> Iterator[tuple[int, int, list[int]]]:
        """Epoch, place of the batch after it, texts: from the present position on."""
        epoch, first = self.position.epoch, self.position.batch
        while True:
            order = self.batcher.epoch(self.pace.seed, epoch, self.pace.batch_tokens)
            for place in range(first, len(order)):
                yield epoch, place + 1, order[place]
            epoch, first = epoch + 1, 0

    def _next_step(
        self, batches: Iterator[tuple[int, int, list[int]]]
    ) -> tuple[list[Batch], tuple[int, int]]:
        """Batches of one step, and the epoch and batch at which the next one begins."""
        step: list[Batch] = []
        after = (self.position.epoch, self.position.batch)
        while len(step) < self.pace.step_batches:
            epoch, batch, places = next(batches)
            after = (epoch, batch)
            step.append(self.batcher.batch(places))
        return step, after

    def _advance(self, step: Sequence[Batch], after: tuple[int, int], learned: Learned) -> None:
        position = self.position
        position.epoch, position.batch = after
        position.steps += 1
        position.tokens += sum(batch.seen for batch in step)
        keep = 0.95 if position.steps > 1 else 0.0
        position.loss = keep * position.loss + (1 - keep) * learned.loss

    def _validate_if_due(self) -> None:
        position = self.position
        last = position.validations[-1]["tokens"] if position.validations else 0
        if position.tokens - last < self.pace.validate_tokens and self.progress() < 1:
            return
        judged = self.learner.judge(self.validation)
        position.validations.append(
            {
                "tokens": position.tokens,
                "first_choice": judged.right / judged.targets,
                "loss": judged.loss,
            }
        )
        level = 1 - self.schedule.descent
        if self._stalled() and self.progress() < level:
            position.skipped += level - self.progress()

    def _stalled(self) -> bool:
        patience = self.pace.patience
        choices = [entry["first_choice"] for entry in self.position.validations]
        if not patience or len(choices) <= patience:
            return False
        return max(choices[-patience:]) <= max(choices[:-patience])
