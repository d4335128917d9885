"""A distillation from beginning to end; each stage goes on where a killed run was."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ondevice.artifact import replacing
from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.distil.conversation import Limits
from ondevice.converters.distil.corpus import Batch, Batcher, token_weights
from ondevice.converters.distil.maker import Made, Maker
from ondevice.converters.distil.material import Material, read_prompts, text_windows
from ondevice.converters.distil.plans import GivenPrompts, GivenTexts, OwnQuestions, Plan
from ondevice.converters.distil.recipe import Identity, Recipe
from ondevice.converters.distil.repetition import echoes, loop_gone_on
from ondevice.converters.distil.schedule import Schedule
from ondevice.converters.distil.script import chat_script, opening_tokens
from ondevice.converters.distil.shards import ShardFolder, Text
from ondevice.converters.distil.training import Budget, Pace, Position, Training
from ondevice.converters.distil.vocabulary import choose_rows
from ondevice.converters.distil.watch import Watch
from ondevice.converters.distil.workers import Workers
from ondevice.converters.trained import TrainedDrafter
from ondevice.converters.vocabulary import always
from ondevice.errors import BadRequest

if TYPE_CHECKING:
    from mlx_lm.models.llama import Model

    from ondevice.converters.distil.learner import Learned
    from ondevice.converters.distil.student import Student

_ROWS_FILE = "rows.json"
_OWN_PART = 3  # with material of the user's: own conversations for one token in so many
_PROMPT_ANSWERS = 3  # of each prompt of the user's
_VALIDATION_TOKENS = 40_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work: hours in all, or tokens to learn from and input tokens to train on.

    Hours are those that the work took, whatever day they were on: a run that was killed goes on
    with what is left of them.
    """

    hours: float | None = None
    data_tokens: int | None = None
    train_tokens: int | None = None

    def checked(self) -> Effort:
        """Itself; BadRequest when there is nothing to do, or no end of it."""
        for name in ("hours", "data_tokens", "train_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadRequest(f"{name}: expected a finite number above 0, got {value}")
        if self.hours is None and (self.data_tokens is None or self.train_tokens is None):
            raise BadRequest("expected hours, or tokens to make and to train on; got neither")
        return self


@dataclass(frozen=True)
class Distillation:
    """Teaches a student of `checkpoint` in the folder `work`.

    start: a drafter of the same verifier to begin with, whose rows and layers are kept. workers:
    among which the computing is shared out.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    material: Material
    work: Path
    start: TrainedDrafter | None = None
    quiet: bool = False
    workers: Workers = field(default_factory=Workers)

    def check(self) -> None:
        """Check all that can be checked before any work; nothing is written."""
        self.recipe.chosen_layers(self.checkpoint.config.num_layers)
        if self.start is None:
            self._choose_rows(np.zeros(self.checkpoint.config.vocab_size))
        assert self.plans

    def claim(self) -> None:
        """Take the work folder, or take it up; BadRequest when it is another run's."""
        Identity(
            recipe=self.recipe,
            verifier_sha256=tuple(source.sha256 for source in self.checkpoint.sources),
            tokenizer_sha256=self.checkpoint.tokenizer_sha256,
            texts_sha256=self.material.sha256(),
            start_sha256=None if self.start is None else self.start.source.sha256,
        ).claim(self.work)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The verifier's layers that the student begins as."""
        if self.start is not None:
            return self.start.header.layers
        return self.recipe.chosen_layers(self.checkpoint.config.num_layers)

    @cached_property
    def verifier(self) -> Model:
        """The verifier as mlx-lm runs it; half precision where a GPU computes it."""
        import mlx.core as mx

        from ondevice.converters.mlxmodel import mlx_model

        config = self.checkpoint.config
        names = self.checkpoint.names()
        model: Model = mlx_model(config, {name: self.checkpoint.tensor(name) for name in names})
        if mx.default_device() == mx.Device(mx.gpu):
            model.set_dtype(mx.bfloat16)
        mx.eval(model.parameters())  # the workers' threads can only use what is there
        return model

    @cached_property
    def windows(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Windows of the user's texts to train on, and held out."""
        return text_windows(self.material.texts, self.checkpoint.tokenizer)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Where conversations come from, by the name of their folder of shards."""
        found: dict[str, Plan] = {}
        tokenizer, recipe = self.checkpoint.tokenizer, self.recipe
        limits = Limits(recipe.question_tokens, recipe.answer_tokens)
        script = None
        if not self.material.texts or tokenizer.chat_template:
            stops = self.checkpoint.eos_token_ids
            script = chat_script(tokenizer, stops, self.checkpoint.label)
        if self.material.texts:
            found["text"] = GivenTexts(recipe.seed, self.windows[0])
        if script is not None and self.material.prompts:
            texts = [line for path in self.material.prompts for line in read_prompts(path)]
            encoded = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
            found["prompts"] = GivenPrompts(recipe.seed, script, limits, encoded, _PROMPT_ANSWERS)
        if script is not None:
            openings, shares = opening_tokens(tokenizer)
            found["own"] = OwnQuestions(recipe.seed, script, limits, openings, shares)
        return found

    def make_data(self, effort: Effort) -> list[Text]:
        """Make what is not made yet; all texts."""
        given = 0
        for name, plan in self.plans.items():
            wanted = effort.data_tokens
            if name == "own" and given:
                wanted = min(wanted or given, -(-given // (_OWN_PART - 1)))
            made = self._make(name, plan, wanted, self._data_seconds(effort))
            given += made.learned_tokens
        return self.texts()

    def texts(self) -> list[Text]:
        """What has been made so far."""
        return [text for name in self.plans for text in self.shards(name).texts()]

    def data_seconds(self) -> float:
        """How long the making of all shards took."""
        return sum(self.shards(name).seconds() for name in self.plans)

    def shards(self, name: str) -> ShardFolder:
        """The shards of one plan."""
        return ShardFolder(self.work / name, {"verifier": self.checkpoint.tokenizer_sha256})

    def _data_seconds(self, effort: Effort) -> float | None:
        return None if effort.hours is None else effort.hours * 3600 * self.recipe.data_share

    def _make(self, name: str, plan: Plan, tokens: int | None, seconds: float | None) -> Made:
        others = self.data_seconds() - self.shards(name).seconds()

        def progress(made: Made) -> float:
            by_tokens = made.learned_tokens / tokens if tokens else 0.0
            by_seconds = (made.seconds + others) / seconds if seconds else 0.0
            return max(by_tokens, by_seconds)

        with Watch(f"Writing texts ({name})", self.quiet) as watch:

            def report(made: Made) -> None:
                pace = made.written_tokens / made.seconds if made.seconds else 0
                words = f"{made.written_tokens:,} tokens, {made.conversations:,} texts finished, "
                watch.update(min(progress(made), 1.0), words + f"{pace:.0f} tok/s")

            maker = Maker(
                decoder=_LazyDecoder(self, plan),
                plan=plan,
                shards=self.shards(name),
                vocab_size=self.checkpoint.config.vocab_size,
                shard_s=self.recipe.shard_s,
            )
            return maker.run(lambda made: progress(made) < 1, report)

    def rows(self, texts: Sequence[Text]) -> list[int]:
        """The student's output rows: those of the start, or chosen once and kept."""
        if self.start is not None:
            return list(self.start.row_to_token)
        path = self.work / _ROWS_FILE
        if path.exists():
            kept: list[int] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        weights = token_weights(self._split(texts)[0], self.checkpoint.config.vocab_size)
        chosen = self._choose_rows(weights)
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(chosen), encoding="utf-8")
        return chosen

    def _choose_rows(self, weights: npt.NDArray[np.float64]) -> list[int]:
        """By the weights (vocab,) of the tokens; BadRequest for a number that cannot be."""
        fixed = {*always(self.checkpoint.tokenizer), *self.checkpoint.eos_token_ids}
        return choose_rows(weights, fixed, self.recipe.chosen_rows(len(weights)))

    def _split(self, texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
        """Texts to train on and for validation."""
        held = [text for text in texts if text.index % self.recipe.held_out == 0]
        trained = [text for text in texts if text.index % self.recipe.held_out]
        if not held or not trained:
            raise BadRequest(
                f"only {len(texts)} texts were made: too few to train on (one in "
                f"{self.recipe.held_out} is held out); half an hour makes hundreds: "
                "give more hours or text"
            )
        return trained, held

    def train(self, texts: Sequence[Text], effort: Effort) -> tuple[Student, Position]:
        """Train until the effort is spent; the student and where it stands."""
        limit = self.recipe.answer_tokens
        trained, held = self._split([loop_gone_on(text, limit) for text in texts])
        held = [text.answer_only() for text in held]  # what acceptance is about
        trained += echoes(trained, self.recipe.echo_share, self.recipe.seed)
        rows, vocab = self.rows(texts), self.checkpoint.config.vocab_size
        share = self.recipe.first_choice_weight
        batcher = Batcher(trained, rows, vocab, share)
        student = self._student(rows)
        seconds = None
        if effort.hours is not None:
            seconds = max(effort.hours * 3600 - self.data_seconds(), 1.0)
        training = Training(
            student,
            batcher,
            self._validation(Batcher(held, rows, vocab, share)),
            Schedule(self.recipe.rate, descent=self.recipe.descent),
            Budget(effort.train_tokens, seconds),
            self._pace(),
            self.work,
        )
        training.resume()
        with Watch(f"Training {len(self.layers)} layers", self.quiet) as watch:

            def report(position: Position, _: Learned) -> None:
                watch.update(training.progress(), _words(position))

            return student, training.run(report)

    def _pace(self) -> Pace:
        recipe = self.recipe
        return Pace(
            batch_tokens=recipe.batch_tokens,
            step_batches=recipe.step_batches,
            checkpoint_s=recipe.checkpoint_s,
            seed=recipe.seed,
        )

    def _validation(self, batcher: Batcher) -> list[Batch]:
        batches: list[Batch] = []
        for places in batcher.epoch(self.recipe.seed, 0, self.recipe.batch_tokens):
            batches.append(batcher.batch(places))
            if sum(batch.seen for batch in batches) > _VALIDATION_TOKENS:
                break
        return batches

    def _student(self, rows: Sequence[int]) -> Student:
        from ondevice.converters.distil.student import Student

        config = self.checkpoint.config
        student = Student(self.checkpoint.tensor, config, self.layers, rows, self.workers)
        if self.start is not None:
            student.begin_as(self.start.tensors)
        return student


class _LazyDecoder:
    """A decoder that is built when the first step is due: nothing is loaded for finished data."""

    def __init__(self, run: Distillation, plan: Plan) -> None:
        self._run, self._plan = run, plan
        workers, rows = run.workers.count, run.recipe.decode_rows
        if plan.count is not None:
            rows = min(rows, -(-plan.count // workers))
        self.rows = rows * workers
        self.slots = -(-plan.longest // 32) * 32 + 32

    @cached_property
    def _decoder(self) -> Any:
        from ondevice.converters.distil.decoder import RowDecoder, SplitDecoder

        model, workers = self._run.verifier, self._run.workers
        rows = self.rows // workers.count
        make = partial(RowDecoder, model, rows, self.slots, self._plan.prefix)
        return SplitDecoder(make, workers)

    def step(self, *arguments: Any) -> Any:
        """See `Decoder.step`."""
        return self._decoder.step(*arguments)


def _words(position: Position) -> str:
    pace = position.tokens / position.seconds if position.seconds else 0
    words = f"{position.tokens:,} tokens, {pace:.0f} tok/s, loss {position.loss:.3f}"
    if position.validation is not None:
        words += f", first choice {position.validation:.1%}"
    return words
