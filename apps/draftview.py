"""An answer as it is speculated: tokens coloured by origin, refused drafts struck through.

What was refused is shown after the text until the next round, then it is gone; it never leaves the
line, so nothing has to be scrolled back.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console

from ondevice.apps.terminal import shown
from ondevice.apps.wordwrap import STYLE, WordWrapper
from ondevice.session import Piece
from ondevice.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "\x1b[0m"
STRUCK = "\x1b[2;9m"
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"
_COLOURS = {
    "drafter": ("green", "\x1b[32m"),
    "lookup": ("cyan", "\x1b[36m"),
    "lookahead": ("magenta", "\x1b[35m"),
    "jacobi": ("yellow", "\x1b[33m"),
}
_OTHER = "\x1b[34m"
LEGEND = (
    ", ".join(f"{name} {colour}" for name, (colour, _) in _COLOURS.items())
    + ", any other proposer blue, the verifier uncoloured; refused drafts are struck through"
)


def can_colour() -> bool:
    """Whether stdout is a terminal that may be coloured: no pipe, no NO_COLOR, no TERM=dumb."""
    console = Console()
    return sys.stdout.isatty() and not console.no_color and not console.is_dumb_terminal


@contextmanager
def draft_view(
    tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]
) -> Iterator[Callable[[Piece], None]]:
    """The function that shows a piece of an answer on stdout, for a terminal with colours."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    view = DraftView(tokenizer, end_tokens, write, lambda: shutil.get_terminal_size().columns)
    try:
        yield view.take
    finally:
        view.end()


class DraftView:
    """Shows one answer. Text is written once it is certain, in the colour of its token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Collection[int],
        write: Callable[[str], None],
        width: Callable[[], int],
    ) -> None:
        """width: of the terminal, in cells."""
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, end_tokens)
        self._write = write
        self._wrapper = WordWrapper(write, width)
        self._origins: deque[str | None] = deque()  # of each character that is to come
        self._passing = False

    def take(self, piece: Piece) -> None:
        """Show what became certain, and for a moment what was refused."""
        self._erase()
        for token in piece.tokens:
            before = len(self._stream.text)
            self._stream.feed(token.token)
            self._origins.extend([token.proposer] * (len(self._stream.text) - before))
        self._wrapper.feed("".join(self._coloured(shown(piece.text))))
        if piece.record is not None:
            self._show_passing(piece.record.refused)

    def end(self) -> None:
        """Nothing more will come."""
        self._erase()
        self._wrapper.flush()

    def _coloured(self, text: str) -> Iterator[str]:
        current: str | None = None
        for character in text:
            origin = self._origins.popleft() if self._origins else None
            if origin != current:
                if current is not None:
                    yield PLAIN
                if origin is not None:
                    yield _COLOURS.get(origin, ("", _OTHER))[1]
                current = origin
            yield character
        if current is not None:
            yield PLAIN

    def _show_passing(self, refused: tuple[int, ...]) -> None:
        """The word that is held back, then the refused tokens, as far as the line goes."""
        text = self._tokenizer.backend_tokenizer.decode(list(refused)) if refused else ""
        held_back = self._wrapper.held_back
        room = self._wrapper.room - cell_len(STYLE.sub("", held_back)) - 1
        if room < 0:
            return
        passing = _fitting(shown(text.replace("\n", "\N{RETURN SYMBOL}")), room)
        if held_back or passing:
            struck = f"{STRUCK}{passing}{PLAIN}" if passing else ""
            self._write(f"{_SAVE}{held_back}{struck}")
            self._passing = True

    def _erase(self) -> None:
        if self._passing:
            self._write(_RESTORE + _ERASE)
            self._passing = False


def _fitting(text: str, cells: int) -> str:
    """As much of `text` as `cells` hold; a tab, whose width depends on its place, is a space."""
    fitting = ""
    for character in text.replace("\t", " "):
        cells -= cell_len(character)
        if cells < 0:
            break
        fitting += character
    return fitting
