"""The conversation as a person has it: typed lines, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commandline import COMMAND
from pseudoterminal import Terminal

from ondevice.apps.interactive import is_open, talk, unquoted
from ondevice.apps.slash import Settings, changed, options_line
from ondevice.engine import Engine
from ondevice.errors import BadRequest
from ondevice.session import Options, Session

OPTIONS = Options(max_tokens=24)


@pytest.fixture(scope="module")
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with Engine.open_folder(tiny_pair) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.session() as session:
        yield session


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A reader of these lines; then Ctrl-D."""
    waiting = iter(lines)

    def read() -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


# The loop


def test_turns_build_one_conversation(
    engine: Engine, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed("One.", "", "   ", "Two."))
    with engine.session() as other:
        expected = [other.generate(text, OPTIONS).text for text in ("One.", "Two.")]
        assert session.messages == other.messages
    out, err = capsys.readouterr()
    assert out == "".join(text + "\n" for text in expected)
    assert err == ""


def test_control_c_at_the_prompt_says_how_to_leave(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed(KeyboardInterrupt, KeyboardInterrupt))
    assert capsys.readouterr() == ("", "Ctrl-D or /bye leaves\n" * 2)


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_bye_leaves(session: Session, capsys: pytest.CaptureFixture[str], leave: str) -> None:
    talk(session, Settings(OPTIONS), typed(leave, "never read"))
    assert capsys.readouterr() == ("", "")


def test_control_c_stops_the_answer_and_keeps_the_chat(session: Session) -> None:
    settings = Settings(Options(max_tokens=3500))
    # One token: with more, the model may end its answer sooner, after a cut that the clock chose.
    lines = iter(["Tell me more.", "/set max-tokens 1", "And now?"])
    asked_s: list[float] = []
    pressing = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def read() -> str:
        if not asked_s:
            pressing.start()
        asked_s.append(time.monotonic())
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    before = signal.getsignal(signal.SIGINT)
    talk(session, settings, read)
    assert signal.getsignal(signal.SIGINT) is before
    assert 0.5 <= asked_s[1] - asked_s[0] < 1.5
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert session.messages[1]["content"]
    assert settings.last is not None
    assert settings.last.completion_tokens == 1


def test_a_prompt_that_is_too_long_does_not_end_the_chat(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed("One.", "x" * 5000, "Two."))
    out, err = capsys.readouterr()
    assert re.fullmatch(r"ondevice: the prompt has \d+ tokens, .*\n", err)
    assert out
    assert [m["content"] for m in session.messages[::2]] == ["One.", "Two."]


def test_clear_forgets_the_turns_and_keeps_the_system_message(engine: Engine) -> None:
    with engine.session(system="Be brief.") as session:
        talk(session, Settings(OPTIONS), typed("One.", "/clear"))
        assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_stats_shows_the_last_figures_and_is_a_switch(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed("One.", "/stats", "Two.", "/stats", "Three."))
    lines = capsys.readouterr().err.splitlines()
    shown = ["figures" if line.startswith("24 tokens  ") else line for line in lines]
    assert shown == [
        "figures",
        "figures after each answer: on",
        "figures",
        "figures after each answer: off",
    ]


def test_an_unknown_command_is_one_line_and_not_a_prompt(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed("/sing a song"))
    assert capsys.readouterr() == ("", "unknown command /sing; /help lists them\n")
    assert session.messages == []


def test_help_names_every_command(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    talk(session, Settings(OPTIONS), typed("/help"))
    _, err = capsys.readouterr()
    for command in ("/help", "/clear", "/stats", "/set", "/bye", "Ctrl-C", "Ctrl-D", '"""'):
        assert command in err
    assert all(len(line) <= 80 for line in err.splitlines())


def test_commands_are_read_whatever_their_case(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, Settings(OPTIONS), typed("/HELP", "/Set Top_K 3", "/Bye", "never read"))
    out, err = capsys.readouterr()
    assert "/clear" in err
    assert "top-k 3" in err
    assert (out, session.messages) == ("", [])


def test_quoted_text_may_span_lines_and_begin_with_a_slash(session: Session) -> None:
    talk(session, Settings(OPTIONS), typed('"""\n/bye\nfor now\n"""'))
    assert session.messages[0]["content"] == "/bye\nfor now"


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ("hello", False),
        ('"""', True),
        ('""""', True),
        ('  """one\ntwo', True),
        ('"""one\ntwo"""  ', False),
        ('""""""', False),
        ('say """', False),
    ],
)
def test_triple_quotes_stay_open_until_they_are_closed(text: str, is_it: bool) -> None:
    assert is_open(text) is is_it


def test_quotes_are_no_part_of_the_text() -> None:
    assert unquoted(' """one\ntwo""" ') == "one\ntwo"
    assert unquoted('""""""') == ""
    assert unquoted(' he said """no""" ') == 'he said """no"""'


# /set


def test_set_changes_one_option() -> None:
    options = changed(changed(OPTIONS, "temperature", "0.5"), "max-tokens", "7")
    assert (options.sampling.temperature, options.max_tokens) == (0.5, 7)
    assert changed(options, "top_k", "4").sampling.top_k == 4
    assert changed(options, "strategy", "plain").strategy == "plain"
    assert changed(options, "TEMPERATURE", "1").sampling.temperature == 1


def test_set_stop_is_one_text_or_none() -> None:
    options = changed(OPTIONS, "stop", "the end")
    assert options.stop == ("the end",)
    assert "stop 'the end'  " in options_line(options)
    assert changed(options, "stop", "").stop == ()
    assert "stop none  " in options_line(changed(options, "stop"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "-1", "temperature must be 0 or more"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top-k", "1.5", "top-k must be a whole number, got '1.5'"),
        ("strategy", "telepathy", "strategy must be one of"),
        ("mood", "good", "no option 'mood'; there are strategy, max-tokens, stop, temperature"),
        ("seed", "", "seed must be a whole number, got ''"),
    ],
)
def test_set_refuses_and_changes_nothing(
    session: Session, capsys: pytest.CaptureFixture[str], name: str, value: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        changed(OPTIONS, name, value)
    settings = Settings(OPTIONS)
    talk(session, settings, typed(f"/set {name} {value}"))
    assert settings.options == OPTIONS
    assert capsys.readouterr().err.startswith(message)


# A real terminal


def test_a_person_at_a_terminal(tiny_pair: Path, tmp_path: Path) -> None:
    # At temperature 0 the tiny model repeats itself, and lookup is through before Ctrl-C comes.
    line = [*COMMAND, "chat", str(tiny_pair), "--max-tokens", "3500", "--temperature", "1"]
    with Terminal(line, ONDEVICE_HOME=str(tmp_path / "home")) as terminal:
        _talk_like_a_person(terminal)
    history = (tmp_path / "home" / "history").read_text(encoding="utf-8")
    assert "+Tell me more.\n" in history
    assert '+"""two\n+lines"""\n' in history
    assert "+pasted\n+lines\n" in history


def _talk_like_a_person(terminal: Terminal) -> None:
    banner = terminal.wait_for(">>>")
    assert "auto" in banner
    assert "emulated Core ML" in banner
    assert "MLX on CPU" in banner
    assert "Ctrl-D or /bye leaves" in banner

    terminal.type("Tell me more.\r", r"more\.")
    time.sleep(1.0)
    pressed_s = time.monotonic()
    terminal.type("\x03", ">>>")
    assert time.monotonic() - pressed_s < 2.0

    # Every key waits for the prompt: a terminal between two prompts takes Ctrl-D for itself.
    terminal.type("\x03", "Ctrl-D or /bye leaves.*>>>")
    terminal.type("/set max-tokens 4\r", "seed random.*>>>")
    terminal.type("/stats\r", "answer: on.*>>>")
    terminal.type('"""two\r', r"\.\.\.")
    terminal.type('lines"""\r', "tok/s.*>>>")
    terminal.type("\x1b[200~pasted\nlines\x1b[201~\r", "tok/s.*>>>")
    assert terminal.finish("\x04") == 0


def test_what_is_typed_while_the_pair_loads_waits_unseen_for_the_prompt(
    tiny_pair: Path, tmp_path: Path
) -> None:
    line = [*COMMAND, "chat", str(tiny_pair), "--max-tokens", "4"]
    with Terminal(line, ONDEVICE_HOME=str(tmp_path / "home")) as terminal:
        terminal.wait_for("(opening|loading) ")
        before = terminal.type("typed early", ">>>.*typed early").partition(">>>")[0]
        assert "typed" not in before
        terminal.type("\r", "reading the prompt.*>>>")
        assert terminal.finish("\x04") == 0


def test_a_narrow_terminal_keeps_columns_and_words_whole(tiny_pair: Path, tmp_path: Path) -> None:
    line = [*COMMAND, "chat", str(tiny_pair)]
    with Terminal(line, columns=40, ONDEVICE_HOME=str(tmp_path / "home")) as terminal:
        terminal.wait_for(">>>")
        table = lines_of(terminal.type("/help\r", "several.*lines.*>>>"))
        assert "Ctrl-C        stop the answer; what was" in table
        assert "              said stays in the" in table
        options = lines_of(terminal.type("/set\r", "seed random.*>>>"))
        assert "strategy auto  max-tokens 512  stop none" in options
        assert "min-p 0.0  repetition-penalty 1.0" in options
        assert terminal.finish("\x04") == 0


def lines_of(screen: str) -> list[str]:
    """Lines without what moves the cursor, and without blank ends."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen).splitlines()]
