"""The chat template, taken apart: what stands before the user's words, and what after them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ondevice.converters.distil.conversation import Script
from ondevice.converters.distil.openings import DOMAINS, OPENINGS
from ondevice.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = "@@the user's words@@"


def chat_script(tokenizer: PreTrainedTokenizerBase, stops: Iterable[int], label: str) -> Script:
    """The template of `tokenizer` as tokens.

    stops: token ids that end the verifier's texts. Raises UnsupportedModel, naming `label`, when
    there is no template, or none that shows where the user's words are.
    """
    if not tokenizer.chat_template:
        raise UnsupportedModel(
            f"{label} has no chat template: expected one, so that it can write questions and "
            "answers; give texts of your own with --text"
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _WORDS}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = str(text).partition(_WORDS)
    if not found or not after:
        raise UnsupportedModel(
            f"{label}: its chat template does not show where the user's words are; "
            "give texts of your own with --text"
        )
    return Script(
        prefix=tuple(tokenizer.encode(before, add_special_tokens=False)),
        turn=tuple(tokenizer.encode(after, add_special_tokens=False)),
        stops=frozenset(stops),
        special=frozenset(tokenizer.all_special_ids),
    )


def opening_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, float]]:
    """The built-in openings as tokens by domain, and the share of each domain."""
    encoded = {
        domain: [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        for domain, texts in OPENINGS.items()
    }
    return encoded, DOMAINS
