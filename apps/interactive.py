"""The conversation on a terminal: prompt, answer, prompt."""

from __future__ import annotations

from collections.abc import Callable

from ondevice import blas
from ondevice.apps.chat import Request, interrupt_stops, stream_answer, whole_text
from ondevice.apps.failures import say
from ondevice.apps.opening import placement
from ondevice.apps.slash import Settings, obey
from ondevice.apps.terminal import note, note_fields, statistics_line
from ondevice.engine import Engine
from ondevice.errors import BadRequest, CacheUnwritable
from ondevice.home import home_folder, make_writable
from ondevice.session import Session

QUOTES = '"""'
HOW_TO_LEAVE = "Ctrl-D or /bye leaves"


def converse(request: Request, open_pair: Callable[[str], Engine]) -> None:
    """Open the pair, say what runs where, and talk."""
    read = line_reader()
    with open_pair(request.pair) as engine, engine.session(system=request.system) as session:
        note(f"{request.pair}, {request.options.strategy}")
        for line in placement(engine):
            note(line)
        report = blas.prepare()
        if not report.fast:
            note(report.advice)
        note(f"/help lists commands, {HOW_TO_LEAVE}")
        talk(session, Settings(request.options, request.show_stats, request.show_draft), read)


def talk(session: Session, settings: Settings, read: Callable[[], str]) -> None:
    """Answer what `read` returns until it raises EOFError or a command leaves.

    Ctrl-C ends an answer, at the prompt it says how to leave. Raises what is neither the user's
    nor to be mended by another prompt, such as a verifier that was lost.
    """
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            note(HOW_TO_LEAVE)
            continue
        text = unquoted(line)
        if text.startswith("/") and not line.strip().startswith(QUOTES):
            if not obey(text, session, settings):
                return
        elif text:
            _answer(text, session, settings)


def _answer(text: str, session: Session, settings: Settings) -> None:
    try:
        with interrupt_stops(session):
            prompt = whole_text(text, "this")
            answer = stream_answer(session, prompt, settings.options, settings.show_draft)
            settings.last = answer.stats
    except BadRequest as error:
        say(str(error))
    else:
        if settings.show_stats:
            note_fields(statistics_line(settings.last))


def line_reader() -> Callable[[], str]:
    """A prompt with history and editing; a text that begins with triple quotes spans lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.output import create_output

    history: History = InMemoryHistory()
    try:
        history = FileHistory(str(make_writable(home_folder()) / "history"))
    except CacheUnwritable as error:
        note(f"these lines will not be remembered: {error}")
    # The prompt is for the person at the terminal, also when the answers go to a file.
    session: PromptSession[str] = PromptSession(
        history=history, output=create_output(always_prefer_tty=True)
    )

    def read() -> str:
        return session.prompt(
            ">>> ",
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation="... ",
            enable_history_search=True,
        )

    return read


def is_open(text: str) -> bool:
    """Whether `text` begins with triple quotes that have not been closed."""
    text = text.strip()
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed


def unquoted(line: str) -> str:
    """The text of a line or of a triple-quoted block, without blank ends."""
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip()
    return text
