"""Failures become one line on stderr and an exit status; nobody sees a traceback unasked."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ondevice.errors import OnDeviceError

UNEXPECTED = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended: 128 + 13."""
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAKE_ROOM = "free space there, or send it elsewhere"


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn what the block raises into its line and a `typer.Exit` with its status.

    debug: print the traceback before the line.
    """
    try:
        yield
        sys.stdout.flush()
    except (typer.Exit, typer.Abort, typer.TyperException):
        raise
    except BrokenPipeError:
        silence_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except (KeyboardInterrupt, EOFError):
        raise typer.Exit(INTERRUPTED) from None
    except OnDeviceError as error:
        _show(error, debug, str(error))
        raise typer.Exit(error.exit_status) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            silence_stdout()
            _show(error, debug, f"cannot write the output: {error.strerror}; {MAKE_ROOM}")
            raise typer.Exit(USAGE) from error
        detail = f": {error}" if str(error) else ""
        _show(error, debug, f"unexpected {type(error).__name__}{detail}; --debug shows where")
        raise typer.Exit(UNEXPECTED) from error


def _show(error: Exception, debug: bool, line: str) -> None:
    if debug:
        traceback.print_exception(error)
    say(line)


def say(message: str) -> None:
    """`message` as one line on stderr, after the program's name."""
    print("ondevice:", " ".join(message.split()), file=sys.stderr, flush=True)


def usage_line(error: typer.TyperException) -> str:
    """What is wrong with the command line, what was given, and whose help to read."""
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    if callable(found := getattr(error.__cause__, "errors", None)):  # pydantic's ValidationError
        given = repr(found()[0]["input"])
        message += "" if given in message else f", got {given}"
    context = getattr(error, "ctx", None)
    return f"{message}; see {context.command_path if context else 'ondevice'} --help"


def silence_stdout() -> None:
    """Stdout takes no more: what is still buffered for it is dropped without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
