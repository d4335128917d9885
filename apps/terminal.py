"""What people see: figures on stderr, dim; stdout is the answer's alone."""

from __future__ import annotations

import os
import sys
import termios
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ondevice.statistics import Statistics


def notes() -> Console:
    """The console on stderr; plain text when that is no terminal or NO_COLOR is set."""
    return Console(stderr=True, highlight=False, markup=False)


class _Results(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program with status 1; `apps.failures` knows what it means."""
        raise


def results() -> Console:
    """The console on stdout for tables; where that is no terminal, lines are 120 wide and plain."""
    console = _Results(highlight=False, markup=False)
    return console if console.is_terminal else _Results(highlight=False, markup=False, width=120)


def note(line: str) -> None:
    """One dim line on stderr; only a terminal's width breaks it, between words."""
    console = notes()
    style = None if console.no_color else "dim"
    console.print(line, style=style, soft_wrap=not console.is_terminal)


def note_fields(line: str) -> None:
    """One dim line on stderr, of fields two spaces apart; a terminal breaks it between those."""
    console = notes()
    if console.is_terminal:
        kept = "  ".join(field.replace(" ", _NO_BREAK) for field in line.split("  "))
        lines = textwrap.wrap(kept, console.width, break_long_words=False, break_on_hyphens=False)
        line = "\n".join(lines).replace(_NO_BREAK, " ")
    note(line)


_NO_BREAK = "\N{NO-BREAK SPACE}"


def note_table(rows: Iterable[tuple[str, str]]) -> None:
    """Names and what they mean, dim, on stderr; the meanings stay in their column."""
    console = notes()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console.print(table, style=None if console.no_color else "dim")


def waiting(title: str) -> AbstractContextManager[object]:
    """A spinner on stderr while the block runs; nothing when that is no terminal."""
    console = notes()
    if not console.is_interactive:
        return nullcontext()
    return console.status(Text(title, style="" if console.no_color else "dim"))


@contextmanager
def keys_unseen() -> Iterator[None]:
    """What is typed while the block runs is not echoed into its output; the next prompt has it."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    if os.tcgetpgrp(terminal) != os.getpgrp():  # in the background: the change would stop us
        yield
        return
    before = termios.tcgetattr(terminal)
    unseen = [*before]
    unseen[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Whatever the block, or a library it calls, prints on stdout goes to stderr instead."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # stdout is closed
        yield
        return
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def shown(text: str) -> str:
    """`text` as it may be written to stdout: a terminal is not given control characters."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


# A model may say ESC, with which a terminal can be reprogrammed; newline and tab are harmless.
_CONTROLS = dict.fromkeys(
    set(range(32)) - {9, 10} | set(range(127, 160)), "\N{REPLACEMENT CHARACTER}"
)


def statistics_line(stats: Statistics) -> str:
    """The figures of an answer in one line; n/a for what was not measured."""
    steps = stats.num_spec_steps
    accepted = stats.num_accepted_draft_tokens / steps if steps else None
    drafted = stats.num_draft_tokens / steps if steps else None
    return "  ".join(
        (
            f"{stats.completion_tokens} token{'s' if stats.completion_tokens != 1 else ''}",
            f"{figure(stats.decode_tok_s, '.1f')} tok/s",
            f"ttft {figure(stats.ttft_ms, '.0f', ' ms')}",
            f"accepted {figure(accepted, '.1f')} of {figure(drafted, '.1f')} per step",
            f"drafter {figure(stats.drafter_busy, '.0%')}",
            f"verifier {figure(stats.verifier_busy, '.0%')}",
            *_energy(stats),
            *_proposers(stats),
            stats.reason,
        )
    )


def _energy(stats: Statistics) -> list[str]:
    """Energy per token by rail, where it is known."""
    rails = stats.energy_per_token_mj or {}
    parts = [f"{rail} {mj:.1f}" for rail, mj in rails.items()]
    return [f"energy {', '.join(parts)} mJ/token"] if parts else []


def _proposers(stats: Statistics) -> Iterator[str]:
    """Whose tokens were drafted, and the window that rode along."""
    for name, counts in stats.proposers.items():
        yield f"{name} {', '.join(f'{count} {what}' for what, count in counts.items())}"
    if stats.lookahead is not None:
        shape = " ".join(f"{letter} {size}" for letter, size in stats.lookahead.items())
        yield f"window {shape}"


def figure(value: float | None, form: str, unit: str = "") -> str:
    """`value` formatted, with its unit; n/a for what was not measured."""
    return "n/a" if value is None else f"{value:{form}}{unit}"
