"""What the user gives to learn from: prompts, and texts cut into windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.artifact import file_sha256
from ondevice.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_TOKENS = 256
_LEAST_WINDOW = 16
HELD_OUT_PART = 10
"""One part in so many of a text, its last one, is never trained on: the card measures it."""


@dataclass(frozen=True, slots=True)
class Material:
    """Paths of texts and of prompts; empty when the verifier is to ask itself."""

    texts: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()

    def sha256(self) -> tuple[str, ...]:
        """Identity of all files; BadRequest when one cannot be read."""
        return tuple(_digest(path) for path in (*self.texts, *self.prompts))


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """The file as UTF-8; BadRequest when it is not, is empty, or cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; "
            "save it as UTF-8"
        ) from error
    if not text.strip():
        raise BadRequest(f"{path} is empty: expected text to learn from")
    return text


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, or .jsonl with `prompt` or the first of `turns`; BadRequest otherwise."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    return [_prompt(path, number, line) for number, line in enumerate(lines, start=1)]


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
        found = entry["prompt"] if "prompt" in entry else entry["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, str) or not found.strip():
        raise BadRequest(
            f"{path}, line {number}: expected an object with `prompt` or `turns`, got {line[:40]!r}"
        )
    return found


def text_windows(
    paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Windows of WINDOW_TOKENS to train on, and those of each text's last part, held out."""
    trained: list[tuple[int, ...]] = []
    held_out: list[tuple[int, ...]] = []
    for path in paths:
        text = read_text(path)
        cut = len(text) - len(text) // HELD_OUT_PART
        trained += _windows(text[:cut], tokenizer)
        held_out += _windows(text[cut:], tokenizer)
    if not trained:
        raise BadRequest(f"{paths[0]} is too short: expected at least {_LEAST_WINDOW} tokens")
    return trained, held_out


def _windows(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    cuts = [
        tuple(tokens[first : first + WINDOW_TOKENS])
        for first in range(0, len(tokens), WINDOW_TOKENS)
    ]
    return [window for window in cuts if len(window) >= _LEAST_WINDOW]
