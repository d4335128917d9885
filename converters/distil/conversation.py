"""One conversation that the verifier has with itself, a token at a time.

The user's turn is left open and the verifier writes it; then the turn is closed as the chat
template does and the verifier answers. Template tokens are forced, so that question and answer are
one run through one row of the cache. A text of the user's is forced from end to end. What the
verifier would have written is recorded at every token, whoever wrote it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ondevice.converters.distil.decoding import Floats, Ints
from ondevice.converters.distil.loops import loop_period, without_loop

LOOP_CHECK = 8  # tokens between two looks for a loop


class Phase(enum.Enum):
    """Who writes the next token that is not forced; in a given text all are."""

    QUESTION = enum.auto()
    ANSWER = enum.auto()
    GIVEN = enum.auto()
    DONE = enum.auto()
    DROPPED = enum.auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest question and answer in tokens."""

    question: int = 160
    answer: int = 256


@dataclass(frozen=True, slots=True)
class Script:
    """The chat template as tokens.

    prefix: up to where the user's words begin; turn: from their end to where the answer begins;
    stops: end a turn; special: never part of a turn.
    """

    prefix: tuple[int, ...]
    turn: tuple[int, ...]
    stops: frozenset[int]
    special: frozenset[int]


@dataclass(slots=True)
class Conversation:
    """The state of one row.

    tokens: all that is in the row or will be fed to it next; `forced` follow them. top_tokens and
    top_logprobs: one entry for each token taken, of the verifier's distribution in its place.
    open_end: a question may end because it is long. looped: the answer was cut at a loop.
    """

    index: int
    domain: str
    script: Script
    limits: Limits
    question_temperature: float
    answer_temperature: float
    tokens: list[int]
    forced: list[int]
    phase: Phase = Phase.QUESTION
    open_end: bool = False
    answer_start: int = 0
    looped: bool = False
    top_tokens: list[Ints] = field(default_factory=list)
    top_logprobs: list[Floats] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        """Of the next draw."""
        answering = self.phase is Phase.ANSWER
        return self.answer_temperature if answering else self.question_temperature

    @property
    def question(self) -> list[int]:
        """The user's words so far, opening included."""
        end = self.answer_start - len(self.script.turn) if self.answer_start else None
        return self.tokens[len(self.script.prefix) : end]

    @property
    def learned_start(self) -> int:
        """The first token whose distribution is recorded."""
        return len(self.tokens) - len(self.top_tokens)

    @property
    def answer(self) -> list[int]:
        """The answer's tokens, the stop token included."""
        return self.tokens[self.answer_start :] if self.answer_start else []

    def take(self, token: int, top_tokens: Ints, top_logprobs: Floats) -> None:
        """What was drawn after `tokens`; a forced token takes its place."""
        self.top_tokens.append(top_tokens)
        self.top_logprobs.append(top_logprobs)
        if self.forced:
            self.tokens.append(self.forced.pop(0))
            if self.phase is Phase.GIVEN and not self.forced:
                self.phase = Phase.DONE
        elif self.phase is Phase.QUESTION:
            self._ask(token)
        elif self.phase is Phase.ANSWER:
            self._reply(token)

    def break_off(self) -> bool:
        """End it where it is, when nothing more is wanted; whether there is something to keep."""
        if self.phase in (Phase.ANSWER, Phase.GIVEN) and self.answer:
            self.phase = Phase.DONE
        return self.phase is Phase.DONE

    def _ask(self, token: int) -> None:
        length = len(self.tokens) - len(self.script.prefix)
        if token in self.script.stops or (self.open_end and length >= self.limits.question):
            self._close_turn()
        elif token in self.script.special or length >= self.limits.question:
            self.phase = Phase.DROPPED
        else:
            self.tokens.append(token)
            if length % LOOP_CHECK == 0 and loop_period(self.question) is not None:
                self.phase = Phase.DROPPED

    def _close_turn(self) -> None:
        first, *rest = self.script.turn
        self.tokens.append(first)
        self.forced = rest
        self.answer_start = len(self.tokens) + len(rest)
        self.phase = Phase.ANSWER

    def _reply(self, token: int) -> None:
        self.tokens.append(token)
        length = len(self.tokens) - self.answer_start
        if token in self.script.stops or length >= self.limits.answer:
            self.phase = Phase.DONE
        elif token in self.script.special:
            self.phase = Phase.DROPPED
        elif length % LOOP_CHECK == 0:
            self._cut_loop()

    def _cut_loop(self) -> None:
        kept = without_loop(self.answer)
        cut = len(self.answer) - kept
        if cut:
            del self.tokens[-cut:], self.top_tokens[-cut:], self.top_logprobs[-cut:]
            self.looped = True
            self.phase = Phase.DONE
