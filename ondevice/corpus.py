"""Text of the user's that prompt lookup looks into: a code base, templates, earlier documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.errors import BadRequest
from ondevice.lookup import BYTES_A_TOKEN, SuffixIndex

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_BYTES = 8 << 20
"""Of a file."""
MOST_TOKENS = (1 << 21) - 1
"""Of a file; the index of so many has 72 MiB, for all sessions together."""


def read_corpus(file: Path, tokenizer: PreTrainedTokenizerBase) -> SuffixIndex:
    """The index of a text file in UTF-8.

    Raises BadRequest when it cannot be read, is no text, has no token, or is larger than MOST_BYTES
    or MOST_TOKENS.
    """
    tokens = tokenizer.encode(read_text(file), add_special_tokens=False)
    if not tokens:
        raise BadRequest(f"{file} has no token; name a text file to look into")
    if len(tokens) > MOST_TOKENS:
        memory_mib = MOST_TOKENS * BYTES_A_TOKEN >> 20
        raise BadRequest(
            f"{file} has {len(tokens)} tokens, expected at most {MOST_TOKENS} (an index of "
            f"{memory_mib} MiB); name a smaller file"
        )
    return SuffixIndex.of(tokens)


def read_text(file: Path) -> str:
    """What is in it; raises BadRequest as `read_corpus` does, but for MOST_TOKENS."""
    try:
        size = file.stat().st_size
        if not file.is_file():  # a device may never end
            raise BadRequest(f"cannot look into {file}: it is no regular file; name a text file")
        if size > MOST_BYTES:
            raise BadRequest(
                f"{file} has {size >> 20} MiB, expected at most {MOST_BYTES >> 20}; name a smaller "
                "file"
            )
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadRequest(f"cannot look into {file}: {reason}; name a text file") from error
    if not text:
        raise BadRequest(f"{file} is empty; name a text file to look into, or leave --lookup out")
    if "\0" in text:
        raise BadRequest(f"cannot look into {file}: it is binary; name a text file")
    return text
