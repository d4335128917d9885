"""The commands of a conversation: what begins with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ondevice.apps.chat import check_options
from ondevice.apps.draftview import LEGEND
from ondevice.apps.terminal import note, note_fields, note_table, statistics_line
from ondevice.errors import BadRequest
from ondevice.session import Options, Session
from ondevice.statistics import Statistics

HELP = (
    ("/clear", "forget the conversation, but for the system message"),
    ("/set", "show the options; /set NAME VALUE changes one"),
    ("/stats", "show the figures after each answer, or stop showing them"),
    ("/draft", "colour tokens by who proposed them, or stop it"),
    ("/help", "this list"),
    ("/bye, Ctrl-D", "leave"),
    ("Ctrl-C", "stop the answer; what was said stays in the conversation"),
    ('"""', "begins and ends a text of several lines"),
)


@dataclass(slots=True)
class Settings:
    """What the person can change while talking, and the last answer's figures."""

    options: Options
    show_stats: bool = False
    show_draft: bool = False
    last: Statistics | None = None


_OPTION_TYPES: dict[str, Callable[[str], Any]] = {
    "strategy": str,
    "max-tokens": int,
    "stop": lambda text: (text,) if text else (),
}
_SAMPLING_TYPES: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "repetition-penalty": float,
    "seed": int,
}


def obey(line: str, session: Session, settings: Settings) -> bool:
    """Carry out the command in `line`; False when it is to leave."""
    name, _, rest = line.partition(" ")
    match name.lower():
        case "/bye" | "/exit" | "/quit":
            return False
        case "/help" | "/?":
            note_table(HELP)
        case "/clear":
            session.clear()
            note("the conversation is forgotten")
        case "/stats":
            _toggle_stats(settings)
        case "/draft":
            settings.show_draft = not settings.show_draft
            note(LEGEND if settings.show_draft else "tokens are no longer coloured")
        case "/set":
            _set(rest, settings)
        case _:
            note(f"unknown command {name}; /help lists them")
    return True


def _toggle_stats(settings: Settings) -> None:
    settings.show_stats = not settings.show_stats
    if settings.show_stats and settings.last is not None:
        note_fields(statistics_line(settings.last))
    note(f"figures after each answer: {'on' if settings.show_stats else 'off'}")


def _set(rest: str, settings: Settings) -> None:
    if not rest.strip():
        note_fields(options_line(settings.options))
        return
    try:
        settings.options = changed(settings.options, *rest.split(maxsplit=1))
    except BadRequest as error:
        note(str(error))
    else:
        note_fields(options_line(settings.options))


def changed(options: Options, name: str, value: str = "") -> Options:
    """`options` with the one called `name` set to `value`; raises BadRequest."""
    name = name.lower().removeprefix("--").replace("_", "-")
    read = _OPTION_TYPES.get(name) or _SAMPLING_TYPES.get(name)
    if read is None:
        known = ", ".join((*_OPTION_TYPES, *_SAMPLING_TYPES))
        raise BadRequest(f"no option {name!r}; there are {known}")
    try:
        parsed = read(value)
    except ValueError:
        kind = "a whole number" if read is int else "a number"
        raise BadRequest(f"{name} must be {kind}, got {value!r}") from None
    change = {name.replace("-", "_"): parsed}
    if name in _OPTION_TYPES:
        new = replace(options, **change)
    else:
        new = replace(options, sampling=replace(options.sampling, **change))
    check_options(new)
    return new


def options_line(options: Options) -> str:
    """All options that /set changes, with their values."""
    values = [(name, getattr(options, name.replace("-", "_"))) for name in _OPTION_TYPES]
    values += [
        (name, getattr(options.sampling, name.replace("-", "_"))) for name in _SAMPLING_TYPES
    ]
    return "  ".join(f"{name} {_value(value)}" for name, value in values)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    return "random" if value is None else str(value)
