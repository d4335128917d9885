"""What `bench` compares: sides that answer the same tokens, timed by the same clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Protocol

from ondevice.arbiter import DRAFTING
from ondevice.engine import Engine
from ondevice.records import StepRecord, UnitName, Window
from ondevice.sampling import SamplingParams
from ondevice.schedule import Strategy
from ondevice.session import Answer, Options
from ondevice.units import UnitMemory


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that reached the reader at once: those of one verdict."""

    at_ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """Verdicts over draft tokens, and how many of those there were; none beyond the end counts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def mean_accepted(self) -> float | None:
        """Draft tokens accepted a verdict."""
        return self.accepted / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else None

    def as_json(self) -> dict[str, float | None]:
        """Under the names of `Statistics`."""
        mean = self.mean_accepted
        return {
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "mean_acceptance_length": None if mean is None else 1 + mean,
            "draft_acceptance_rate": self.acceptance_rate,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one side. answer, records, memory: ours, with statistics; none of mlx-lm.

    memory: what our units held in this answer.
    """

    tokens: tuple[int, ...]
    start_ns: int
    arrivals: tuple[Arrival, ...]
    drafting: Drafting = Drafting()
    answer: Answer | None = None
    records: tuple[StepRecord, ...] = ()
    memory: Mapping[UnitName, UnitMemory] = field(default_factory=dict)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first arrival, over the time from the first arrival to the last.

        None where everything came at once.
        """
        if len(self.arrivals) < 2:
            return None
        elapsed_ns = self.arrivals[-1].at_ns - self.arrivals[0].at_ns
        tokens = sum(arrival.tokens for arrival in self.arrivals[1:])
        return tokens / (elapsed_ns / 1e9) if elapsed_ns > 0 else None

    @property
    def ttft_ms(self) -> float | None:
        """From the call to the first token."""
        return (self.arrivals[0].at_ns - self.start_ns) / 1e6 if self.arrivals else None


class Side(Protocol):
    """Answers greedily. name: a row of the table."""

    name: str

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """The answer to `prompt`, up to and with an end token; nothing of it runs on after it."""


class OurSide:
    """One of our schedules; greedy, as `Side` says, unless a benchmark gives it a temperature."""

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        name: str = "",
        children: int | None = None,
        window: Window | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        """children: proposals per node; None lets the strategy choose, 1 makes chains.

        window: of lookahead; None lets the strategy choose. sampling: None is greedy.
        """
        self.name = name or strategy
        self.strategy = strategy
        self._engine = engine
        self._children = children
        self._window = window
        self._sampling = sampling or SamplingParams()

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """See `Side`. Raises as `Session.generate` does."""
        options = Options(
            sampling=self._sampling,
            max_tokens=max_tokens,
            strategy=self.strategy,
            children=self._children,
            window=self._window,
        )
        arrivals: list[Arrival] = []
        records: list[StepRecord] = []
        answer: Answer | None = None
        with self._engine.session() as session:
            start_ns = monotonic_ns()
            for piece in session.stream(prompt, options):
                if piece.tokens:
                    arrivals.append(Arrival(monotonic_ns(), len(piece.tokens)))
                if piece.record is not None:
                    records.append(piece.record)
                answer = piece.answer or answer
            memory = self._engine.memory()
        settle(self._engine)
        assert answer is not None
        stats = answer.stats
        drafting = Drafting(
            stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens
        )
        reached = tuple(arrivals)
        return Run(answer.token_ids, start_ns, reached, drafting, answer, tuple(records), memory)


def why_no_drafter(engine: Engine) -> str:
    """Why nothing can be drafted with this pair; "" where it can."""
    model = engine.model
    return model.no_drafter or (model.shape_reason if model.shape == "plain" else "")


def our_sides(
    engine: Engine, strategies: Sequence[Strategy]
) -> tuple[list[OurSide], dict[str, str]]:
    """A side for each of `strategies` that this pair can run, and why it cannot run the others."""
    why = why_no_drafter(engine)
    sides: list[OurSide] = []
    left_out: dict[str, str] = {}
    for strategy in strategies:
        needs_none = strategy not in DRAFTING and engine.model.shape != "plain"
        if strategy == "plain" or not why or needs_none:
            sides.append(OurSide(engine, strategy))
        else:
            left_out[strategy] = why
    return sides, left_out


def settle(engine: Engine) -> None:
    """Wait until both units are idle: a forward or a drafter step may outlive its answer."""
    engine.session().close()
