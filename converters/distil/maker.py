"""The data maker: keeps every row of a decoder busy with a conversation, stores what is good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ondevice.converters.distil.conversation import Conversation, Phase
from ondevice.converters.distil.decoding import Decoder, Step
from ondevice.converters.distil.plans import Plan, Started
from ondevice.converters.distil.shards import ShardFolder

MIN_QUESTION_TOKENS = 3
_KEY_TOKENS = 14  # two questions that begin with so many equal tokens are one


@dataclass
class Made:
    """What has been made so far, by this process and before; `seconds` too.

    learned_tokens: of what is finished; written_tokens: of what is not, too.
    """

    conversations: int = 0
    dropped: int = 0
    learned_tokens: int = 0
    written_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Row:
    talk: Conversation
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
    shard_s: float = 60.0
    _kept: list[Conversation] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _unwritten_s: float = 0.0

    def run(self, wanted: Callable[[Made], bool], report: Callable[[Made], None]) -> Made:
        """Go on while `wanted(made)` and there are conversations; `report` is told of every step.

        Finished conversations are not made again. What is finished is written whatever ends the
        run; CacheUnwritable when it cannot be. Answers and given texts that are under way when
        enough is made are kept as they are.
        """
        self.shards.sweep()
        made = self._resume()
        numbers = self._numbers()
        rows: list[_Row | None] = [self._begin(numbers) for _ in range(self.decoder.rows)]
        try:
            while wanted(made) and any(rows):
                begun = time.monotonic()
                step = self._step(rows)
                made.written_tokens += len(rows) - rows.count(None)
                for place, row in enumerate(rows):
                    if row is not None and self._took(row.talk, step, place, made):
                        rows[place] = self._begin(numbers)
                elapsed = time.monotonic() - begun
                made.seconds += elapsed
                self._unwritten_s += elapsed
                if len(self._kept) >= self.shard_texts or self._unwritten_s > self.shard_s:
                    self._write()
                report(made)
            self._break_off(rows, made)
        finally:
            self._write()
        return made

    def _resume(self) -> Made:
        made = Made(seconds=self.shards.seconds())
        for text in self.shards.texts():
            made.conversations += 1
            made.learned_tokens += len(text.top_tokens)
            question = text.tokens[len(self.plan.prefix) : text.answer]
            self._seen.add(tuple(question[:_KEY_TOKENS].tolist()))
        made.written_tokens = made.learned_tokens
        return made

    def _numbers(self) -> Iterator[int]:
        done = self.shards.finished()
        return (number for number in count() if number not in done)

    def _begin(self, numbers: Iterator[int]) -> _Row | None:
        started: Started | None = self.plan.begin(next(numbers))
        return None if started is None else _Row(*started)

    def _step(self, rows: list[_Row | None]) -> Step:
        """One token in every row; an idle one feeds its last slot, which nobody will see."""
        tokens = np.zeros(len(rows), np.int64)
        positions = np.full(len(rows), self.decoder.slots - 1, np.int64)
        temperatures = np.zeros(len(rows), np.float32)
        chances = np.zeros(len(rows), np.float32)
        for place, row in enumerate(rows):
            if row is not None:
                tokens[place] = row.talk.tokens[-1]
                positions[place] = len(row.talk.tokens) - 1
                temperatures[place] = row.talk.temperature
                chances[place] = row.chances.random()
        return self.decoder.step(tokens, positions, temperatures, chances)

    def _took(self, talk: Conversation, step: Step, place: int, made: Made) -> bool:
        """Give row `place` its token; True when its conversation has ended."""
        asking = talk.phase is Phase.QUESTION
        talk.take(int(step.tokens[place]), step.top_tokens[place], step.top_logprobs[place])
        if asking and talk.phase is Phase.ANSWER and not self._is_new(talk):
            talk.phase = Phase.DROPPED
        if talk.phase is Phase.DROPPED:
            self._dropped.append(talk.index)
            made.dropped += 1
        elif talk.phase is Phase.DONE:
            self._keep(talk, made)
        return talk.phase in (Phase.DROPPED, Phase.DONE)

    def _keep(self, talk: Conversation, made: Made) -> None:
        self._kept.append(talk)
        made.conversations += 1
        made.learned_tokens += len(talk.top_tokens)

    def _break_off(self, rows: Sequence[_Row | None], made: Made) -> None:
        for row in rows:
            if row is not None and row.talk.break_off():
                self._keep(row.talk, made)

    def _is_new(self, talk: Conversation) -> bool:
        """Whether the question, with the template's turn after it, was not asked before."""
        words = [*talk.question, *talk.script.turn]
        key = tuple(words[:_KEY_TOKENS])
        if len(talk.question) < MIN_QUESTION_TOKENS or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _write(self) -> None:
        if self._kept:
            self.shards.write(self._kept, self._dropped, self.vocab_size, self._unwritten_s)
            self._kept, self._dropped, self._unwritten_s = [], [], 0.0
