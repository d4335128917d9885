"""`ondevice chat`: one answer to a prompt that was given, or a conversation on a terminal."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from ondevice.apps.draftview import can_colour, draft_view
from ondevice.apps.opening import open_engine
from ondevice.apps.terminal import keys_unseen, note_fields, shown, statistics_line, waiting
from ondevice.apps.wordwrap import answer_writer
from ondevice.corpus import read_text
from ondevice.engine import Engine
from ondevice.errors import BadRequest
from ondevice.records import Window
from ondevice.session import Answer, Options, Piece, Session

ANY_VOCABULARY = 2**31
"""Sampling parameters are checked before the model, and so its vocabulary, is known."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for. prompt: the text of -p, None without one.

    lookup: a text file for prompt lookup to look into. show_draft: see `stream_answer`.
    """

    pair: str
    options: Options
    prompt: str | None = None
    system: str | None = None
    show_stats: bool = False
    as_json: bool = False
    lookup: Path | None = None
    show_draft: bool = False


def read_window(text: str | None) -> Window | None:
    """W,N,G as typed; raises BadRequest where they are not three whole numbers."""
    if text is None:
        return None
    try:
        columns, ngram, guesses = (int(part) for part in text.split(","))
    except ValueError:
        raise BadRequest(
            f"--lookahead takes three whole numbers W,N,G, such as 7,4,7, got {text!r}"
        ) from None
    return Window(columns, ngram, guesses)


def run(request: Request, open_pair: Callable[[str], Engine] | None = None) -> None:
    """Carry out `request`. Raises BadRequest before anything is downloaded or loaded."""
    if open_pair is None:
        # Plain decoding decides nothing by costs, so nobody is to wait for them.
        open_pair = partial(open_engine, measure=request.options.strategy != "plain")
    open_pair = partial(_opened, open_pair, request.lookup)
    check_options(request.options)
    if request.lookup is not None:
        read_text(request.lookup)  # what is wrong with it shall be said before a pair is opened
    whole_text(request.system or "", "the system message")
    interactive = request.prompt is None and sys.stdin.isatty()
    if interactive and request.as_json:
        raise BadRequest("--json answers one prompt: give it with -p, or pipe it in")
    if request.show_draft and request.as_json:
        raise BadRequest("--show is for people to watch; leave it out, or --json")
    if interactive:
        from ondevice.apps.interactive import converse

        converse(request, open_pair)
        return
    prompt = one_shot_prompt(request.prompt)
    with open_pair(request.pair) as engine, engine.session(system=request.system) as session:
        if request.as_json:
            print_json(session.generate(prompt, request.options))
        else:
            answer = stream_answer(session, prompt, request.options, request.show_draft)
            if request.show_stats:
                note_fields(statistics_line(answer.stats))


def _opened(open_pair: Callable[[str], Engine], lookup: Path | None, pair: str) -> Engine:
    engine = open_pair(pair)
    if lookup is not None:
        try:
            engine.look_into(lookup)
        except BaseException:
            engine.close()
            raise
    return engine


def check_options(options: Options) -> None:
    """Raises BadRequest for a value out of its range."""
    options.checked()
    options.sampling.checked(ANY_VOCABULARY)
    for text in options.stop:
        whole_text(text, "a stop text")


def one_shot_prompt(given: str | None) -> str:
    """-p, then a blank line and what is piped in; raises BadRequest when there is neither."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_stdin()
    prompt = "\n\n".join(part for part in (given or "", piped.strip("\n")) if part.strip())
    if not prompt:
        raise BadRequest("the prompt is empty; write something after -p, or pipe it in")
    return whole_text(prompt, "the prompt")


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadRequest(f"stdin is not {error.encoding} text; pipe in plain text") from error


def whole_text(text: str, name: str) -> str:
    """`text`; raises BadRequest when it was made of bytes that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{name} is not UTF-8 text (character {error.start}); give plain text"
        ) from error
    return text


def print_json(answer: Answer) -> None:
    """One object on stdout, the contract of `chat --json`."""
    content = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stats": answer.stats.as_json(),
    }
    print(json.dumps(content), flush=True)


def stream_answer(
    session: Session, prompt: str, options: Options, show_draft: bool = False
) -> Answer:
    """Write the answer on stdout as it comes, with a newline at its end.

    show_draft: coloured by origin, see `ondevice.apps.draftview`, where stdout can show that.

    Until it begins a terminal shows a sign that the prompt is being read; keys typed meanwhile
    are not seen.
    """
    at_line_start = False
    with keys_unseen(), _view(session, show_draft) as view, ExitStack() as reading:
        reading.enter_context(waiting("reading the prompt"))
        for piece in session.stream(prompt, options):
            if piece.tokens or piece.text:
                reading.close()
                view(piece)
            if piece.text:
                at_line_start = piece.text.endswith("\n")
            if piece.answer is not None:
                answer = piece.answer
        reading.close()
        if not at_line_start:
            view(Piece("\n", ()))
    return answer


@contextmanager
def _view(session: Session, show_draft: bool) -> Iterator[Callable[[Piece], None]]:
    """What shows the pieces of an answer."""
    if show_draft and can_colour():
        with draft_view(session.model.tokenizer, session.model.end_tokens) as view:
            yield view
        return
    with answer_writer() as write:
        yield lambda piece: write(shown(piece.text))


@contextmanager
def interrupt_stops(session: Session) -> Iterator[None]:
    """The first Ctrl-C in the block ends the answer with what it has; a second one is raised."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may take signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        session.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
