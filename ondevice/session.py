"""A conversation: prompts in, text out, both caches kept from turn to turn."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypedDict, cast

from ondevice.driver import Driver
from ondevice.errors import BadRequest, ContextOverflow
from ondevice.policy import DEFAULT_CHILDREN, STRATEGIES, Schedule, Strategy
from ondevice.records import AcceptanceRule, AnswerLimits, EmittedToken, FinishReason, Stop
from ondevice.sampling import Law, SamplingParams
from ondevice.statistics import Statistics, summarise
from ondevice.text import TextStream
from ondevice.units import TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EMPTY = "the prompt is empty; write something"


class Message(TypedDict):
    """One turn of a conversation; role is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""A user's turn, a whole conversation, or token ids that are used as they are."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer.

    max_tokens: at least 1; the verifier's context limits it too. stop: strings that end the answer
    and are not part of it. strategy: changes the speed, never the text. rule: `coupled` gives the
    same text for the same seed with any strategy; `rejection` the same distribution, in chains.
    children: proposals per node, None chooses; 1 makes chains.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    strategy: Strategy = "pipelined"
    rule: AcceptanceRule = "coupled"
    children: int | None = None

    def checked(self) -> Self:
        """The same options; raises BadRequest for a value out of range."""
        if self.max_tokens < 1:
            raise BadRequest(f"max tokens must be 1 or more, got {self.max_tokens}")
        if self.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise BadRequest(f"strategy must be one of {known}, got {self.strategy!r}")
        if self.rule not in ("coupled", "rejection"):
            raise BadRequest(f"rule must be coupled or rejection, got {self.rule!r}")
        if self.children is not None and not 1 <= self.children <= 16:
            raise BadRequest(f"children must be 1 to 16, got {self.children}")
        return self


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
    """Text that is certain, and the tokens just committed; the last piece carries the answer."""

    text: str
    tokens: tuple[EmittedToken, ...]
    answer: Answer | None = None


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
    ) -> None:
        """Made by `Engine.session`."""
        self.messages: list[Message] = []
        self._model = model
        self._driver = driver
        self._system = system
        self._on_close = on_close
        self._busy = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = [Message(role="system", content=self._system)] if self._system else []

    def generate(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """The whole answer. Raises BadRequest, ContextOverflow or UnitFailed."""
        *_, last = self.stream(prompt, options)
        assert last.answer is not None
        return last.answer

    def stream(self, prompt: Prompt, options: Options | None = None) -> Iterator[Piece]:
        """The answer piece by piece. Raises as `generate` does.

        A string is added to the conversation, and so is the answer; a list of messages replaces
        the conversation; token ids leave it alone. Closing the iterator cancels the answer; what
        was said so far stays in the conversation.
        """
        if not self._busy.acquire(blocking=False):
            raise BadRequest("this session is answering; wait for it, or open another one")
        try:
            yield from self._answer(prompt, (options or Options()).checked())
        finally:
            self._busy.release()

    async def astream(self, prompt: Prompt, options: Options | None = None) -> AsyncIterator[Piece]:
        """`stream` for asyncio, pumped by a thread; leaving the loop cancels the answer."""
        import asyncio

        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        def pump() -> None:
            try:
                for piece in self.stream(prompt, options):
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        pumping = loop.run_in_executor(None, pump)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
        finally:
            self.cancel()
            await pumping

    def cancel(self) -> None:
        """End the answer under way with what it has. Harmless when there is none."""
        self._driver.cancel()

    def close(self) -> None:
        """Cancel what runs and free both caches."""
        self._driver.close()
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, prompt: Prompt, options: Options) -> Iterator[Piece]:
        messages, tokens = self._read(prompt)
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
        stop = Stop("cancelled")
        try:
            with closing(self._driver.answer(tokens, limits, schedule, law)) as commands:
                for command in commands:
                    if isinstance(command, Stop):
                        stop = command
                    else:
                        emitted.extend(command.tokens)
                        yield Piece(text.take(), command.tokens)
        finally:
            text.finish()
            if messages:
                self.messages = [*messages, Message(role="assistant", content=text.text)]
        if stop.error is not None:
            raise stop.error
        rest = text.take()
        yield Piece(rest, (), self._finished(text.text, emitted, stop.reason, reason, law.seed))

    def _read(self, prompt: Prompt) -> tuple[list[Message], list[int]]:
        """The conversation that the prompt makes (empty for token ids), and its tokens."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise BadRequest(_EMPTY)
            messages = [*self.messages, Message(role="user", content=prompt)]
        elif not prompt:
            raise BadRequest(_EMPTY)
        elif isinstance(prompt[0], int):
            return [], self._checked_ids(cast("Sequence[int]", prompt))
        else:
            messages = list(cast("Sequence[Message]", prompt))
        return messages, self._render(messages)

    def _checked_ids(self, tokens: Sequence[int]) -> list[int]:
        vocab_size = self._model.vocab_size
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise BadRequest(f"token ids must be 0 to {vocab_size - 1}, got {bad}")
        return list(tokens)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the assistant speaks."""
        tokenizer = self._model.tokenizer
        plain = "\n".join(message["content"] for message in messages)
        try:
            plain.encode("utf-8")
        except UnicodeEncodeError as error:
            bad = plain[error.start]
            raise BadRequest(
                f"the prompt must be Unicode text, got half a character: {bad!r}"
            ) from error
        if tokenizer.chat_template is None:
            return list(tokenizer.encode(plain))
        text = tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", messages), tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(cast(str, text), add_special_tokens=False))

    def _schedule(self, options: Options, law: Law) -> tuple[Schedule, str]:
        """The schedule that can be had, and why it is this one."""
        model = self._model
        if options.strategy == "plain":
            return Schedule("plain"), "plain, as set"
        if model.no_drafter:
            return Schedule("plain"), f"plain: {model.no_drafter}"
        if model.shape == "plain":
            return Schedule("plain"), f"plain: {model.shape_reason}"
        reason = f"{options.strategy}, as set"
        rule, children = options.rule, options.children
        if rule == "rejection" and law.greedy:
            rule = "coupled"  # both take the likeliest token
        if rule == "rejection" and children is not None and children > 1:
            rule = "coupled"
            reason += f"; coupled, since rejection drafts chains and {children} children were asked"
        if model.shape == "chain":
            reason += f"; chains: {model.shape_reason}"
        chain = rule == "rejection" or model.shape == "chain"
        chosen = 1 if chain else children or DEFAULT_CHILDREN
        return Schedule(options.strategy, children=chosen, rule=rule), reason

    def _finished(
        self,
        text: str,
        emitted: Sequence[EmittedToken],
        finish_reason: FinishReason,
        reason: str,
        seed: int,
    ) -> Answer:
        turn = self._driver.coordinator.turn
        assert turn is not None
        error = self._driver.coordinator.drafter_error
        if error is not None and turn.schedule.speculates:
            reason += f"; without the drafter since it failed: {error}"
        return Answer(
            text=text,
            token_ids=tuple(token.token for token in emitted),
            finish_reason=finish_reason,
            tokens=tuple(emitted),
            stats=summarise(turn, reason, seed),
        )
