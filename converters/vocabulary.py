"""A drafter's vocabulary: the frequent tokens of a text, with specials and single bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.converters.distil.vocabulary import choose_rows
from ondevice.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PIECE_CHARACTERS = 100_000  # a tokenizer is slow on one very long string


def frequent_tokens(
    tokenizer: PreTrainedTokenizerFast, corpus: Path, count: int, vocab_size: int
) -> tuple[int, ...]:
    """Ascending ids of `count` tokens: the most frequent in the text file `corpus`.

    Special and byte tokens are always in. Raises BadRequest for a count that cannot be, or a corpus
    that cannot be read.
    """
    try:
        text = corpus.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise BadRequest(f"--corpus: cannot read {corpus}: {reason}; give a text file") from error
    counts = np.zeros(vocab_size)
    for start in range(0, len(text), _PIECE_CHARACTERS):
        ids = tokenizer.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False)
        counts += np.bincount(ids, minlength=vocab_size)
    return tuple(choose_rows(counts, always(tokenizer), count))


def always(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of added tokens (specials among them) and of tokens that stand for one byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    single = {*ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))}
    found = {index for token, index in vocabulary.items() if token in single}
    return found | set(tokenizer.added_tokens_decoder)
