"""Word wrapping of an answer that comes in pieces: laws, and what a terminal gets."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoterminal import Terminal
from rich.cells import cell_len

from ondevice.apps.wordwrap import WordWrapper

WIDTH = 12
WORDS = st.lists(st.text("abcé", min_size=1, max_size=WIDTH), min_size=1, max_size=12)
ANY_TEXT = st.text("ab é世界。（）か\u3099👩\u200d \t\n", max_size=60)


def wrapped(*pieces: str, width: int = WIDTH) -> str:
    written: list[str] = []
    wrapper = WordWrapper(written.append, lambda: width)
    for piece in pieces:
        wrapper.feed(piece)
    wrapper.flush()
    return "".join(written)


@settings(deadline=None, max_examples=100)
@given(WORDS)
def test_words_are_wrapped_as_textwrap_does(words: list[str]) -> None:
    text = " ".join(words)
    assert wrapped(text) == "\n".join(textwrap.wrap(text, WIDTH))


@settings(deadline=None, max_examples=200)
@given(ANY_TEXT, st.integers(1, 7))
def test_the_pieces_make_no_difference(text: str, size: int) -> None:
    assert wrapped(*(text[at : at + size] for at in range(0, len(text), size))) == wrapped(text)


@settings(deadline=None, max_examples=200)
@given(ANY_TEXT)
def test_only_blanks_change_and_no_newline_is_lost(text: str) -> None:
    assert "".join(wrapped(text).split()) == "".join(text.split())
    assert wrapped(text).count("\n") >= text.count("\n")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("ab世界か", min_size=1, max_size=WIDTH), max_size=12))
def test_every_line_fits_in_cells(words: list[str]) -> None:
    assert all(cell_len(line) <= WIDTH for line in wrapped(" ".join(words)).splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  - an item of a list", "  - an item\nof a list"),
        ("one\n\n\ntwo", "one\n\n\ntwo"),
        ("twelve cells\nfit", "twelve cells\nfit"),
        ("x\ty", "x       y"),
        ("see https://a.very.long.address", "see\nhttps://a.very.long.address"),
        ("世界世界世界世界", "世界世界世界\n世界"),
        ("世界世界世界。世界", "世界世界世\n界。世界"),
        ("世界世界世（界）", "世界世界世\n（界）"),
    ],
)
def test_what_is_kept_together(text: str, expected: str) -> None:
    assert wrapped(text) == expected


CODE = (
    "from ondevice.apps.wordwrap import answer_writer\n"
    "with answer_writer() as write:\n"
    "    for piece in ('one two thr', 'ee four'): write(piece)\n"
)


def test_a_terminal_gets_whole_words() -> None:
    with Terminal([sys.executable, "-c", CODE], columns=WIDTH) as terminal:
        assert terminal.finish("") == 0
        assert terminal.screen == "one two\r\nthree four"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"one two three four"
