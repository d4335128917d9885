"""Prompt files: both shapes, every mistake by its line, all categories in turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ondevice.apps.questions import Question, own_questions, read_questions, spread
from ondevice.errors import BadRequest

SHOWN = Path(__file__).parent / "prompts" / "own.jsonl"


def test_the_own_set_has_eight_or_more_of_each_kind() -> None:
    counts = Counter(question.category for question in own_questions())
    assert counts.keys() == {*("code", "summary", "chat", "translation", "maths", "extraction")}
    assert min(counts.values()) >= 8
    assert counts.total() >= 40


def test_the_own_set_is_distinct_and_the_one_shown_in_tests() -> None:
    questions = own_questions()
    assert len({question.id for question in questions}) == len(questions)
    assert len({question.text for question in questions}) == len(questions)
    assert read_questions(SHOWN) == questions


def test_json_lines_give_the_first_turn_and_other_files_a_prompt_a_line(tmp_path: Path) -> None:
    lines = tmp_path / "set.jsonl"
    lines.write_text(
        '{"question_id": 81, "category": "qa", "turns": ["One\\nand two", "again"]}\n\n'
        '{"question_id": "b", "turns": ["Three"], "reference": []}\n',
        encoding="utf-8",
    )
    assert read_questions(lines) == [
        Question("81", "qa", "One\nand two"),
        Question("b", "", "Three"),
    ]
    plain = tmp_path / "set.txt"
    plain.write_text("One.\n\n  Two. \n", encoding="utf-8")
    assert read_questions(plain) == [Question("1", "", "One."), Question("2", "", "Two.")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "question_id"),
        ("not json", "line 2"),
        ('{"question_id": 1, "turns": []}', "turns"),
        ('{"question_id": 1, "turns": [" "]}', "empty"),
        ('{"question_id": 1, "turns": "text"}', "turns"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(f'{{"question_id": 1, "turns": ["x"]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(BadRequest, match="line 2") as caught:
        read_questions(file)
    assert words in str(caught.value)


def test_two_prompts_of_one_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"question_id": 1, "turns": ["x"]}\n' * 2, encoding="utf-8")
    with pytest.raises(BadRequest, match="question_id 1 comes twice"):
        read_questions(file)


def test_a_limit_takes_from_all_categories_in_turn() -> None:
    questions = [Question(str(i), "abbccc"[i], "x") for i in range(6)]
    assert "".join(question.category for question in spread(questions, 4)) == "abcb"
    assert sorted(spread(questions, None), key=lambda q: q.id) == questions
    with pytest.raises(BadRequest, match="got 0"):
        spread(questions, 0)
