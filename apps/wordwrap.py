"""Answers on a terminal: lines break between words, though the text comes in pieces."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unicodedata import category

from rich.cells import cell_len

STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal's switch of colour, weight and the like; it takes no cell."""
_ATOM = re.compile(rf"{STYLE.pattern}|.", re.DOTALL)
_TAB = 8
_ZERO_WIDTH_JOINER = "\u200d"
_OPENING, _FOLLOWING = {"Ps", "Pi"}, {"Pe", "Pf", "Po", "Lm", "Sk"}


@contextmanager
def answer_writer() -> Iterator[Callable[[str], None]]:
    """The function that writes a piece of an answer on stdout; only a terminal's lines are wrapped.

    What is held back is written when the block ends.
    """
    if not sys.stdout.isatty():
        yield _write
        return
    wrapper = WordWrapper(_write, lambda: shutil.get_terminal_size().columns)
    try:
        yield wrapper.feed
    finally:
        wrapper.flush()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class WordWrapper:
    """Passes text on, with a newline in place of the spaces before a word that would not fit.

    A word is held back until it is known to be whole, or to be wider than a line: such a one is
    left to the terminal. Wide characters (CJK) are words of their own, with their punctuation. A
    `STYLE` is passed on where it is.
    """

    def __init__(self, write: Callable[[str], None], width: Callable[[], int]) -> None:
        """width: of the terminal, in cells; asked for again and again, since it may change."""
        self._write, self._width = write, width
        self._column = 0
        self._gap = self._word = ""
        self._too_wide = False

    def feed(self, text: str) -> None:
        """Write `text` but for a last word that may go on."""
        for character in _ATOM.findall(text):
            if character in "\n \t":
                self.flush()
                self._space(character)
                continue
            if len(character) > 1:
                self._word += character
                continue
            if _may_break(STYLE.sub("", self._word), character):
                self.flush()
            self._word += character
            if self._too_wide or _cells(self._word) > self._width():
                self.flush()
                self._too_wide = True

    def flush(self) -> None:
        """Write the word that was held back."""
        if not self._word:
            return
        width, end = self._width(), self._column + len(self._gap) + _cells(self._word)
        if self._column and end > width and not self._too_wide:
            self._gap, end = "\n", _cells(self._word)
        self._write(self._gap + self._word)
        self._column = end if end <= width else end % width
        self._gap = self._word = ""

    @property
    def held_back(self) -> str:
        """Spaces and the last word, not yet written."""
        return self._gap + self._word

    @property
    def room(self) -> int:
        """Cells that are left in the line after what was written."""
        return self._width() - self._column

    def _space(self, character: str) -> None:
        self._too_wide = False
        if character == "\n":
            self._write("\n")
            self._gap, self._column = "", 0
        else:
            to_stop = _TAB - (self._column + len(self._gap)) % _TAB
            self._gap += " " * (to_stop if character == "\t" else 1)


def _cells(text: str) -> int:
    return cell_len(STYLE.sub("", text))


def _may_break(word: str, character: str) -> bool:
    """Whether a line may end between `word` and `character`, with no space between them."""
    if not word or word.endswith(_ZERO_WIDTH_JOINER) or not cell_len(character):
        return False
    if category(character) in _FOLLOWING or category(word[-1]) in _OPENING:
        return False
    return 2 in (cell_len(word[-1]), cell_len(character))
