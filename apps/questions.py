"""Prompt files: JSON lines in the shape of Spec-Bench, or plain text with one prompt a line."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from ondevice.errors import BadRequest

OWN_FILE = "prompts.jsonl"
"""The project's own set, inside this package; the repository shows it in tests/prompts too."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to measure with. category: "" where its file names none."""

    id: str
    category: str
    text: str

    @property
    def key(self) -> str:
        """What tells it from a prompt of another file with the same id."""
        return f"{self.id} {sha256(self.text.encode()).hexdigest()[:8]}"


class _Line(BaseModel):
    """A line of a .jsonl file: Spec-Bench's fields (Xia et al. 2024), others are ignored."""

    question_id: int | str
    category: str = ""
    turns: Annotated[list[str], Field(min_length=1)]


def own_questions() -> list[Question]:
    """The project's own set: code, summaries, chat, translation, maths and extraction."""
    text = files("ondevice.apps").joinpath(OWN_FILE).read_text(encoding="utf-8")
    return _from_json_lines(text, OWN_FILE)


def read_questions(file: Path) -> list[Question]:
    """The prompts of `file`; blank lines are skipped.

    A .jsonl file has {"question_id", "category", "turns"} a line, and the first turn is the
    prompt; any other file has one prompt a line. Raises BadRequest when it holds none or a line is
    wrong.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadRequest(f"cannot read prompts from {file}: {reason}") from error
    as_json = file.suffix == ".jsonl"
    questions = _from_json_lines(text, str(file)) if as_json else _from_lines(text)
    if not questions:
        raise BadRequest(f"{file} holds no prompt; write one a line")
    (often, times), *_ = Counter(question.id for question in questions).most_common(1)
    if times > 1:
        raise BadRequest(f"{file}: question_id {often} comes twice; give each prompt its own")
    return questions


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` of `questions`, taken from all categories in turn; all of them for None.

    Raises BadRequest for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise BadRequest(f"the limit of prompts must be 1 or more, got {limit}")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    turns = itertools.zip_longest(*by_category.values())
    mixed = (question for turn in turns for question in turn if question is not None)
    return list(itertools.islice(mixed, limit))


def _from_lines(text: str) -> list[Question]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [Question(str(number), "", line) for number, line in enumerate(lines, start=1)]


def _from_json_lines(text: str, name: str) -> list[Question]:
    questions = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            read = _Line.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the line"
            wrong = first["msg"].replace(" at line 1 column", " at column")
            raise BadRequest(
                f"{name}, line {number}: {where}: {wrong}; "
                'expected {"question_id": ..., "category": ..., "turns": ["the prompt"]}'
            ) from error
        if not read.turns[0].strip():
            raise BadRequest(f"{name}, line {number}: the first turn is empty; write a prompt")
        questions.append(Question(str(read.question_id), read.category, read.turns[0]))
    return questions
