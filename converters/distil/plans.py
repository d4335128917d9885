"""Which conversation comes next: the verifier's own, the user's prompts, the user's texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ondevice.converters.distil.conversation import Conversation, Limits, Phase, Script

QUESTION_TEMPERATURES = (0.6, 0.9)
"""Between these; at 1 a small model's questions are mostly nonsense."""

ANSWER_TEMPERATURES = {0.0: 0.55, 0.7: 0.3, 1.0: 0.15}
"""Share of the conversations that are answered at each."""

_OPEN_END = ("code", "summary", "translation")
PROMPTS, TEXT = "prompts", "text"

Started = tuple[Conversation, np.random.Generator]


class Plan(Protocol):
    """How conversation number `index` is begun: the same at every call, for a resumed run."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """What every conversation begins with."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens that a conversation can come to, prefix included."""
        ...

    @property
    def count(self) -> int | None:
        """How many conversations there are; None for no end of them."""
        ...

    def begin(self, index: int) -> Started | None:
        """Conversation `index` and the source of its chances; None when there are no more."""
        ...


def _source(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, index]))


def _answer_temperature(source: np.random.Generator) -> float:
    choices, shares = list(ANSWER_TEMPERATURES), list(ANSWER_TEMPERATURES.values())
    return float(source.choice(choices, p=shares))


@dataclass(frozen=True, slots=True)
class OwnQuestions:
    """The verifier asks and answers. openings: by domain; shares: of the domains."""

    seed: int
    script: Script
    limits: Limits
    openings: Mapping[str, Sequence[tuple[int, ...]]]
    shares: Mapping[str, float]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The template up to the user's words."""
        return self.script.prefix

    @property
    def longest(self) -> int:
        """Prefix, longest question, turn, longest answer."""
        fixed = len(self.script.prefix) + len(self.script.turn)
        opening = max(len(tokens) for texts in self.openings.values() for tokens in texts)
        return fixed + max(self.limits.question, opening) + self.limits.answer + 1

    @property
    def count(self) -> None:
        """There is no end of them."""
        return None

    def begin(self, index: int) -> Started | None:
        """Conversation `index`."""
        source = _source(self.seed, index)
        names = list(self.shares)
        weights = np.array([self.shares[name] for name in names])
        domain = names[int(source.choice(len(names), p=weights / weights.sum()))]
        openings = self.openings[domain]
        opening = openings[int(source.integers(len(openings)))]
        talk = Conversation(
            index=index,
            domain=domain,
            script=self.script,
            limits=self.limits,
            question_temperature=float(source.uniform(*QUESTION_TEMPERATURES)),
            answer_temperature=_answer_temperature(source),
            tokens=list(self.script.prefix),
            forced=list(opening),
            open_end=domain in _OPEN_END,
        )
        return talk, source


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """The user asks, the verifier answers each prompt `repeats` times, greedily first."""

    seed: int
    script: Script
    limits: Limits
    prompts: Sequence[tuple[int, ...]]
    repeats: int

    @property
    def prefix(self) -> tuple[int, ...]:
        """The template up to the user's words."""
        return self.script.prefix

    @property
    def longest(self) -> int:
        """Prefix, longest prompt, turn, longest answer."""
        fixed = len(self.script.prefix) + len(self.script.turn)
        return fixed + max(map(len, self.prompts)) + self.limits.answer + 1

    @property
    def count(self) -> int:
        """All prompts, `repeats` times."""
        return len(self.prompts) * self.repeats

    def begin(self, index: int) -> Started | None:
        """Conversation `index`: prompt `index` modulo their number."""
        turn, place = divmod(index, len(self.prompts))
        if index >= self.count:
            return None
        source = _source(self.seed, index)
        words = [*self.prompts[place], *self.script.turn]
        start = list(self.script.prefix)
        return Conversation(
            index=index,
            domain=PROMPTS,
            script=self.script,
            limits=self.limits,
            question_temperature=0.0,
            answer_temperature=_answer_temperature(source) if turn else 0.0,
            tokens=start,
            forced=words,
            phase=Phase.ANSWER,
            answer_start=len(start) + len(words),
        ), source


@dataclass(frozen=True, slots=True)
class GivenTexts:
    """Windows of the user's texts, followed from their first token to their last."""

    seed: int
    windows: Sequence[tuple[int, ...]]

    @property
    def prefix(self) -> tuple[int, ...]:
        """Nothing: a text stands for itself."""
        return ()

    @property
    def longest(self) -> int:
        """The longest window."""
        return max(map(len, self.windows)) + 1

    @property
    def count(self) -> int:
        """All windows."""
        return len(self.windows)

    def begin(self, index: int) -> Started | None:
        """Window `index`."""
        if index >= self.count:
            return None
        first, *rest = self.windows[index]
        return Conversation(
            index=index,
            domain=TEXT,
            script=Script((), (), frozenset(), frozenset()),
            limits=Limits(),
            question_temperature=0.0,
            answer_temperature=0.0,
            tokens=[first],
            forced=rest,
            phase=Phase.GIVEN,
            answer_start=1,
        ), _source(self.seed, index)
