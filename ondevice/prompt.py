"""What a person or a program says, as messages and as token ids."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from ondevice.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
_EMPTY = "the prompt is empty; write something"


class Message(TypedDict):
    """One turn of a conversation; `role` is one of ROLES."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""A user's turn, a whole conversation, or token ids that are used as they are."""


class PromptReader:
    """Prompts for one model: its tokenizer, its chat template, its vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """vocab_size: of the verifier; token ids are below it."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def read(self, prompt: Prompt, said: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """The conversation that `prompt` makes of what was `said`, and its tokens.

        Token ids make none: the list is empty. Raises BadRequest.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise BadRequest(_EMPTY)
            messages = [*said, Message(role="user", content=prompt)]
        elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            got = type(prompt).__name__
            raise BadRequest(f"a prompt must be text, messages or token ids, got {got}")
        elif not prompt:
            raise BadRequest(_EMPTY)
        elif all(isinstance(entry, Mapping) for entry in prompt):
            messages = [_checked_message(cast("Mapping[str, object]", entry)) for entry in prompt]
        else:
            return [], [self._checked_id(token) for token in prompt]
        return messages, self._render(messages)

    def _checked_id(self, token: object) -> int:
        whole = isinstance(token, numbers.Integral) and not isinstance(token, bool)
        if not whole or not 0 <= cast(int, token) < self._vocab_size:
            raise BadRequest(f"token ids must be 0 to {self._vocab_size - 1}, got {token!r}")
        return int(cast(int, token))

    def _render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the assistant speaks."""
        from jinja2 import TemplateError

        plain = "\n".join(message["content"] for message in messages)
        try:
            plain.encode("utf-8")
        except UnicodeEncodeError as error:
            half = plain[error.start]
            raise BadRequest(f"a prompt must be Unicode text, got half a sign: {half!r}") from error
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer.encode(plain))
        try:
            text = self._tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            raise BadRequest(f"the chat template refuses this conversation: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _checked_message(message: Mapping[str, object]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise BadRequest(
            f"a message has a role ({', '.join(ROLES)}) and text as its content, "
            f"got {dict(message)!r}"
        )
    return Message(role=role, content=content)
