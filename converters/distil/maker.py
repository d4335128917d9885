"""The data maker: keeps every row of a decoder busy with a conversation, and stores what is good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ondevice.converters.distil.conversation import Conversation, Phase, Plan
from ondevice.converters.distil.decoding import Decoder, Step
from ondevice.converters.distil.shards import ShardFolder

MIN_QUESTION_TOKENS = 3
_KEY_TOKENS = 14  # two questions that begin with so many equal tokens are one


@dataclass
class Made:
    """What has been made so far, by this process and before."""

    conversations: int = 0
    dropped: int = 0
    answer_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass
class _Row:
    conversation: Conversation
    chances: np.random.Generator


@dataclass
class Maker:
    """Runs conversations of `plan` on `decoder` and writes them to `shards`.

    shard_texts, shard_s: a shard is written when so many texts are finished, or after so many
    seconds: what a kill can cost.
    """

    decoder: Decoder
    plan: Plan
    shards: ShardFolder
    vocab_size: int
    shard_texts: int = 256
    shard_s: float = 90.0
    _kept: list[Conversation] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    def run(self, wanted_tokens: int, report: Callable[[Made], bool]) -> Made:
        """Go on until the shards hold `wanted_tokens` answer tokens or `report` returns False.

        Finished conversations are not made again. What is finished is written whatever ends the
        run; OSError when it cannot be written.
        """
        made = self._resume()
        numbers = self._numbers()
        rows = [self._begin(next(numbers)) for _ in range(self.decoder.rows)]
        start = written = time.monotonic()
        try:
            while made.answer_tokens < wanted_tokens:
                step = self._step(rows)
                made.steps += 1
                for place, row in enumerate(rows):
                    if self._took(row, step, place, made):
                        rows[place] = self._begin(next(numbers))
                now = time.monotonic()
                made.seconds = now - start
                if len(self._kept) >= self.shard_texts or now - written > self.shard_s:
                    self._write()
                    written = now
                if made.steps % 10 == 0 and not report(made):
                    break
        finally:
            self._write()
        return made

    def _resume(self) -> Made:
        made = Made()
        for text in self.shards.texts():
            made.conversations += 1
            made.answer_tokens += len(text.tokens) - text.start
            first = len(self.plan.script.prefix)
            question = text.tokens[first : text.start - len(self.plan.script.turn)]
            self._seen.add(tuple(question[:_KEY_TOKENS].tolist()))
        return made

    def _numbers(self) -> Iterator[int]:
        done = self.shards.finished()
        return (number for number in count() if number not in done)

    def _begin(self, number: int) -> _Row:
        return _Row(*self.plan.begin(number))

    def _step(self, rows: list[_Row]) -> Step:
        talks = [row.conversation for row in rows]
        return self.decoder.step(
            np.array([talk.tokens[-1] for talk in talks], np.int64),
            np.array([len(talk.tokens) - 1 for talk in talks], np.int64),
            np.array([talk.temperature for talk in talks], np.float32),
            np.array([row.chances.random() for row in rows], np.float32),
        )

    def _took(self, row: _Row, step: Step, place: int, made: Made) -> bool:
        """Give row `place` its token; True when its conversation has ended."""
        talk = row.conversation
        asking = talk.phase is Phase.QUESTION
        talk.take(int(step.tokens[place]), step.top_tokens[place], step.top_logprobs[place])
        if asking and talk.phase is Phase.ANSWER and not self._is_new(talk.question):
            talk.phase = Phase.DROPPED
        if talk.phase is Phase.DROPPED:
            self._dropped.append(talk.index)
            made.dropped += 1
        elif talk.phase is Phase.DONE:
            self._kept.append(talk)
            made.conversations += 1
            made.answer_tokens += len(talk.answer)
        return talk.phase in (Phase.DROPPED, Phase.DONE)

    def _is_new(self, question: list[int]) -> bool:
        key = tuple(question[:_KEY_TOKENS])
        if len(question) < MIN_QUESTION_TOKENS or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _write(self) -> None:
        if self._kept:
            self.shards.write(self._kept, self._dropped, self.vocab_size)
            self._kept, self._dropped = [], []
