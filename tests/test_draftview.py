"""`chat --show draft`: colours by origin, refused drafts for a moment, nothing of it in pipes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from commandline import COMMAND, Run, assert_one_line, runner
from pseudoterminal import Terminal

from ondevice.apps.draftview import DraftView, can_colour
from ondevice.apps.terminal import _CONTROLS
from ondevice.apps.wordwrap import WordWrapper
from ondevice.engine import Engine
from ondevice.records import EmittedToken, StepRecord
from ondevice.session import Piece

RED, GREEN = "\x1b[31m", "\x1b[32m"
RESET = "\x1b[0m"


class Screen:
    """What a terminal of `width` cells shows: characters with the style they were written in."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[list[tuple[str, str]]] = [[]]
        self.style, self.saved = "", (0, 0, "")
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for atom in re.findall(r"\x1b\[[0-9;]*[mK]|\x1b[78]|.", text, flags=re.DOTALL):
            if atom == "\x1b7":
                self.saved = self.row, self.column, self.style
            elif atom == "\x1b8":
                self.row, self.column, self.style = self.saved
            elif atom == "\x1b[K":
                del self.lines[self.row][self.column :]
            elif atom.endswith("m") and len(atom) > 1:
                self.style = "" if atom == RESET else atom
            elif atom == "\n":
                self._next_line()
            else:
                if self.column == self.width:
                    self._next_line()
                line = self.lines[self.row]
                line[self.column : self.column + 1] = [(atom, self.style)]
                self.column += 1

    def _next_line(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append([])

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in line) for line in self.lines)

    def styled(self, style: str) -> str:
        return "".join(c for line in self.lines for c, of in line if of == style)


def record(refused: Sequence[int] = ()) -> StepRecord:
    return StepRecord("pipelined", 5, 4, 3, 1, 2, 0, 1, 0, True, refused=tuple(refused))


def piece(engine: Engine, text: str, proposer: str | None, refused: str = "") -> Piece:
    ids = engine.model.tokenizer.encode(text, add_special_tokens=False)
    rejected = engine.model.tokenizer.encode(refused, add_special_tokens=False) if refused else []
    tokens = tuple(EmittedToken(token, 0.0, (), proposer) for token in ids)
    return Piece(text, tokens, record=record(rejected))


def view_on(engine: Engine, screen: Screen) -> DraftView:
    return DraftView(
        engine.model.tokenizer, engine.model.end_tokens, screen.write, lambda: screen.width
    )


# The view


def test_each_token_has_the_colour_of_its_origin_and_the_text_is_the_text(engine: Engine) -> None:
    screen = Screen(80)
    view = view_on(engine, screen)
    for text, proposer in (("river", "drafter"), (" stone", None), (" cloud", "lookup")):
        view.take(piece(engine, text, proposer))
    view.end()
    assert screen.text == "river stone cloud"
    assert screen.styled(GREEN) == "river"
    assert screen.styled("\x1b[36m").strip() == "cloud"
    assert screen.styled("").strip() == "stone"
    assert screen.style == ""


def test_refused_drafts_are_struck_through_until_the_next_round(engine: Engine) -> None:
    screen = Screen(80)
    view = view_on(engine, screen)
    view.take(piece(engine, "river ", "drafter", refused="cloud"))
    assert screen.text == "river cloud"
    assert screen.styled("\x1b[2;9m") == "cloud"
    view.take(piece(engine, "stone", None))
    assert screen.text == "river stone"
    assert screen.styled("\x1b[2;9m") == ""
    view.end()
    assert screen.text == "river stone"


@pytest.mark.parametrize("width", [8, 11, 13, 20, 40])
def test_what_stays_is_what_a_terminal_without_colours_would_have(
    engine: Engine, width: int
) -> None:
    screen, plain = Screen(width), Screen(width)
    view, wrapper = view_on(engine, screen), WordWrapper(plain.write, lambda: width)
    for round_number, text in enumerate(["river st", "one cloud\nri", "ver stone", " cloud."] * 4):
        proposer = [None, "drafter", "eagle"][round_number % 3]
        view.take(piece(engine, text, proposer, refused="cloud river\nstone cloud"))
        wrapper.feed(text)
        assert len(screen.lines) == len(plain.lines)  # what passes adds no line
    view.end()
    wrapper.flush()
    assert [line.rstrip() for line in screen.text.split("\n")] == [
        line.rstrip() for line in plain.text.split("\n")
    ]


def test_a_model_cannot_send_control_characters(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    screen = Screen(80)
    view = view_on(engine, screen)
    view.take(Piece("a\x1b[31mb", (), record=record()))
    view.end()
    assert "\x1b" not in screen.text
    assert screen.styled(RED) == ""


def test_styles_take_no_room_in_a_line() -> None:
    screen = Screen(10)
    wrapper = WordWrapper(screen.write, lambda: 10)
    wrapper.feed(f"{GREEN}river{RESET} {GREEN}ston{RESET}e cloud")
    wrapper.flush()
    assert screen.text == "river\nstone\ncloud" or screen.text == "river \nstone\ncloud"
    assert screen.styled(GREEN).strip() == "riverston"


# The command


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capfd, monkeypatch)


def test_a_pipe_gets_plain_text(run: Run, tiny_pair: Path) -> None:
    command = ("chat", tiny_pair, "-p", "One.", "--max-tokens", 12)
    plain = run(*command)
    assert run(*command, "--show", "draft") == plain
    assert "\x1b" not in plain[1]


def test_json_and_show_exclude_each_other(run: Run, tiny_pair: Path) -> None:
    wrong = run("chat", tiny_pair, "-p", "One.", "--json", "--show", "draft")
    assert_one_line(wrong, 2, "--show", "--json")
    assert_one_line(run("chat", tiny_pair, "--show", "trees"), 2, "trees", "draft")


@pytest.mark.parametrize(
    ("terminal", "variables", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_only_a_terminal_that_may_be_coloured_is(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert can_colour() == expected


def test_on_a_terminal_the_answer_is_the_same_words(run: Run, tiny_pair: Path) -> None:
    command = ("chat", str(tiny_pair), "-p", "One.", "--max-tokens", "12")
    _, plain, _ = run(*command)
    with Terminal([*COMMAND, *command, "--show", "draft"], NO_COLOR="") as terminal:
        assert terminal.finish("", seconds=120) == 0, terminal.screen
        screen = terminal.screen
    shown = re.sub(r"\x1b7.*?\x1b8\x1b\[K|\x1b\[[0-9;?]*[a-zA-Z]", "", screen, flags=re.DOTALL)
    assert "".join(shown.split()).endswith("".join(plain.translate(_CONTROLS).split()))
