"""A conversation: prompts in, text out, both caches kept from turn to turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Self

from ondevice.acceptance import MOST_CHILDREN
from ondevice.arbiter import DRAFTING
from ondevice.driver import Driver
from ondevice.errors import BadRequest, ContextOverflow
from ondevice.policy import Experience
from ondevice.power import Power
from ondevice.prompt import Message, Prompt, PromptReader
from ondevice.records import (
    AcceptanceRule,
    AnswerLimits,
    EmittedToken,
    FinishReason,
    StepRecord,
    Stop,
    Window,
)
from ondevice.sampling import Law, SamplingParams
from ondevice.schedule import (
    DEFAULT_CHILDREN,
    STRATEGIES,
    WEIGHTLESS,
    Schedule,
    Sizes,
    Strategy,
)
from ondevice.statistics import Statistics, Tally
from ondevice.text import TextStream
from ondevice.units import TreeShape
from ondevice.windows import checked as check_window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer.

    max_tokens: at least 1; the verifier's context limits it too. stop: strings that end the answer
    and are not part of it. strategy: changes the speed, never the text; `auto` chooses by what it
    measures. rule: `coupled` gives the same text for the same seed with any strategy; `rejection`
    the same distribution, in chains. children: proposals per node, None chooses; 1 makes chains.
    sizes: of every round, for experiments; None chooses them by what pays, which may be nothing.
    window: of lookahead, in every forward of a strategy that uses it; None chooses it, as above.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    strategy: Strategy = "auto"
    rule: AcceptanceRule = "coupled"
    children: int | None = None
    sizes: Sizes | None = None
    window: Window | None = None

    def checked(self) -> Self:
        """The same options; raises BadRequest for a value out of range.

        One stop string need not be put into a tuple.
        """
        if not isinstance(self.sampling, SamplingParams):
            raise BadRequest(f"sampling must be SamplingParams, got {self.sampling!r}")
        _require_count("max tokens", self.max_tokens, None)
        if self.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise BadRequest(f"strategy must be one of {known}, got {self.strategy!r}")
        if self.rule not in ("coupled", "rejection"):
            raise BadRequest(f"rule must be coupled or rejection, got {self.rule!r}")
        if self.children is not None:
            _require_count("children", self.children, MOST_CHILDREN)
        if self.sizes is not None:
            if not isinstance(self.sizes, Sizes):
                raise BadRequest(f"sizes must be ondevice.Sizes, got {self.sizes!r}")
            if self.strategy == "auto":
                raise BadRequest("sizes need a strategy to be set; auto chooses its own")
            for name, size in asdict(self.sizes).items():
                _require_count(name.replace("_", " "), size, MOST_SIZE)
        if self.window is not None:
            if not isinstance(self.window, Window):
                raise BadRequest(f"window must be a Window, got {self.window!r}")
            check_window(self.window)
        if not isinstance(self.stop, str | list | tuple):
            raise BadRequest(f"stop must be text or a tuple of texts, got {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"a stop string must be text and not empty, got {text!r}")
        return replace(self, stop=stop)


MOST_SIZE = 96
"""Rows or steps of a round."""


def _require_count(name: str, value: object, most: int | None) -> None:
    right = isinstance(value, int) and not isinstance(value, bool)
    if not (right and value >= 1 and (most is None or value <= most)):  # type: ignore[operator]
        expected = "1 or more" if most is None else f"1 to {most}"
        raise BadRequest(f"{name} must be a whole number, {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. token_ids include the end-of-sequence token, `text` does not show it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tokens: tuple[EmittedToken, ...]
    stats: Statistics


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain, and the tokens just committed; the last piece carries the answer.

    record: of the round that committed them.
    """

    text: str
    tokens: tuple[EmittedToken, ...]
    answer: Answer | None = None
    record: StepRecord | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What a session needs to know of the pair. no_drafter: why there is none, "" if there is."""

    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    context: int
    vocab_size: int
    shape: TreeShape
    shape_reason: str
    no_drafter: str


class Session:
    """One answer at a time; `cancel` may be called from any thread."""

    def __init__(
        self,
        model: Model,
        driver: Driver,
        system: str | None = None,
        on_close: Callable[[Session], None] = lambda _: None,
        on_answer: Callable[[Session], None] = lambda _: None,
        power: Power | None = None,
    ) -> None:
        """Made by `Engine.session`."""
        self._power = power or Power()
        self.messages: list[Message] = []
        self._model = model
        self._reader = PromptReader(model.tokenizer, model.vocab_size)
        self._driver = driver
        self._system = system
        self._on_close, self._on_answer = on_close, on_answer
        self._busy = threading.Lock()
        self._cancelled: threading.Event | None = None
        self._latest: threading.Event | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = [Message(role="system", content=self._system)] if self._system else []

    def generate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """The whole answer. Raises BadRequest, ContextOverflow or UnitFailed."""
        *_, last = self.stream(prompt, options)
        assert last.answer is not None
        return last.answer

    def stream(
        self, prompt: Prompt, options: Options | None = None
    ) -> Generator[Piece, None, None]:
        """The answer piece by piece. Raises as `generate` does.

        A string is added to the conversation, and so is the answer; a list of messages replaces
        the conversation; token ids leave it alone. Closing the iterator cancels the answer; what
        was said so far stays in the conversation.
        """
        self._latest = cancelled = threading.Event()
        return self._stream(prompt, options, cancelled)

    def _stream(
        self, prompt: Prompt, options: Options | None, cancelled: threading.Event
    ) -> Generator[Piece, None, None]:
        if options is not None and not isinstance(options, Options):
            raise BadRequest(f"options must be Options, got {options!r}")
        self._driver.check_open()
        if not self._busy.acquire(blocking=False):
            raise BadRequest("this session is answering; wait for it, or open another one")
        self._cancelled = cancelled
        try:
            yield from self._answer(prompt, (options or Options()).checked(), cancelled)
        finally:
            self._cancelled = None
            self._busy.release()

    async def astream(self, prompt: Prompt, options: Options | None = None) -> AsyncIterator[Piece]:
        """`stream` for asyncio, pumped by a thread; leaving the loop cancels the answer."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        cancelled = threading.Event()

        def pump() -> None:
            try:
                for piece in self._stream(prompt, options, cancelled):
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        pumping = loop.run_in_executor(None, pump)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            cancelled.set()
            self._driver.wake()
            await _ended(pumping)

    def cancel(self) -> None:
        """End the answer under way with what it has, and the one that is to come of a new stream.

        Harmless when there is none.
        """
        for cancelled in (self._cancelled, self._latest):
            if cancelled is not None:
                cancelled.set()
        self._driver.wake()

    @property
    def model(self) -> Model:
        """What it answers with."""
        return self._model

    @property
    def experience(self) -> Experience:
        """What this session has learned of its units; changes while it answers."""
        return self._driver.coordinator.experience

    def close(self) -> None:
        """Cancel what runs and free both caches."""
        self._driver.close()
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, prompt: Prompt, options: Options, cancelled: threading.Event
    ) -> Iterator[Piece]:
        messages, tokens = self._reader.read(prompt, self.messages)
        room = self._model.context - len(tokens)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(tokens)} tokens, the verifier's context is "
                f"{self._model.context}; shorten the prompt or start a new conversation"
            )
        law = Law(options.sampling, self._model.vocab_size, len(tokens))
        schedule, reason = self._schedule(options, law)
        text = TextStream(self._model.tokenizer, self._model.end_tokens, options.stop)
        limits = AnswerLimits(min(options.max_tokens, room), text.feed)
        emitted: list[EmittedToken] = []
        tally = Tally(schedule.strategy, len(tokens), time.monotonic_ns())
        stop, window = Stop("cancelled"), self._power.meter.begin()
        try:
            with closing(self._driver.answer(tokens, limits, schedule, law, cancelled)) as commands:
                for command in commands:
                    tally.take(command, time.monotonic_ns())
                    if isinstance(command, Stop):
                        stop = command
                    else:
                        emitted.extend(command.tokens)
                        yield Piece(text.take(), command.tokens, record=command.record)
        finally:
            text.finish()
            energy = window.end(self._power.busy_ms(tally))
            # An answer that was stopped before its first word leaves the conversation as it was.
            if messages and (text.text or stop.reason in ("stop", "length")):
                self.messages = [*messages, Message(role="assistant", content=text.text)]
        if stop.error is not None:
            raise stop.error
        rest = text.take()
        stats = tally.summary(self._reason(reason, schedule, tally), law.seed)
        stats = self._power.added(stats, energy)
        self._on_answer(self)
        ids = tuple(token.token for token in emitted)
        yield Piece(rest, (), Answer(text.text, ids, stop.reason, tuple(emitted), stats))

    def _schedule(self, options: Options, law: Law) -> tuple[Schedule, str]:
        """The schedule that can be had, and why it is this one."""
        model = self._model
        if options.strategy == "plain":
            return Schedule("plain"), "plain, as set"
        if model.no_drafter and options.strategy in DRAFTING:
            return Schedule("plain"), f"plain: {model.no_drafter}"
        if model.shape == "plain":
            return Schedule("plain"), f"plain: {model.shape_reason}"
        if model.shape == "chain" and options.strategy == "lookahead":
            return Schedule("plain"), f"plain: lookahead needs trees: {model.shape_reason}"
        if options.children == 1 and options.strategy == "lookahead":
            return Schedule("plain"), "plain: lookahead needs trees, and one child a node was asked"
        notes = [] if options.strategy == "auto" else [f"{options.strategy}, as set"]
        rule, children = options.rule, options.children
        if rule == "rejection" and law.greedy:
            rule = "coupled"  # both take the likeliest token
        if rule == "rejection" and options.strategy in WEIGHTLESS:
            rule = "coupled"
            notes.append(f"coupled, since {options.strategy} samples no drafts")
        if rule == "rejection" and children is not None and children > 1:
            rule = "coupled"
            notes.append(
                f"coupled, since rejection drafts chains and {children} children were asked"
            )
        if model.shape == "chain":
            notes.append(f"chains: {model.shape_reason}")
        chain = rule == "rejection" or model.shape == "chain"
        chosen = 1 if chain else children or DEFAULT_CHILDREN
        schedule = Schedule(
            options.strategy,
            children=chosen,
            rule=rule,
            sizes=options.sizes,
            drafter=not model.no_drafter,
            window=options.window,
        )
        if not schedule.drafts and not schedule.use.names:  # `auto` under rejection, no drafter
            return Schedule("plain"), f"plain: {model.no_drafter}"
        if options.strategy == "auto" and model.no_drafter:
            notes.append(model.no_drafter)
        return schedule, "; ".join(notes)

    def _reason(self, set_reason: str, schedule: Schedule, tally: Tally) -> str:
        """Why the answer was decoded as it was. set_reason: what was known at its start."""
        coordinator = self._driver.coordinator
        reasons = [set_reason]
        if schedule.strategy == "auto":
            reasons.insert(0, coordinator.reason)
        error = coordinator.drafter_error
        if error is not None and schedule.drafts:
            reasons.append(f"without the drafter since it failed: {error}")
        elif schedule.strategy not in ("auto", "plain") and not tally.steps and tally.tokens > 1:
            reasons.append("no draft was worth its time")
        return "; ".join(reason for reason in reasons if reason)


async def _ended(pumping: asyncio.Future[None]) -> None:
    """Wait for the end of an answer that was cancelled, also when the waiter is cancelled again.

    Else the session would be busy a little longer than its reader.
    """
    again = None
    while not pumping.done():
        try:
            await asyncio.shield(pumping)
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again
    pumping.result()
