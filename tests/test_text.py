"""Text from tokens: bytes merged across tokens, stop strings withheld and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_tokenizer

from ondevice.text import TextStream

END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def fed(stream: TextStream, tokens: list[int]) -> list[str]:
    """The pieces taken after every token until the text ends, and after `finish`."""
    pieces = []
    for token in tokens:
        ended = stream.feed(token)
        pieces.append(stream.take())
        if ended:
            break
    stream.finish()
    return [*pieces, stream.take()]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=40))
def test_pieces_join_to_what_was_encoded(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces = fed(TextStream(tokenizer, {END}), tokens)
    assert "".join(pieces) == tokenizer.backend_tokenizer.decode(tokens)


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    tokens = tokenizer.encode("né 🎉")
    pieces = fed(TextStream(tokenizer, {END}), tokens)
    assert "".join(pieces) == "né 🎉"
    assert "🎉" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_stay_incomplete_are_shown_as_such_at_the_end(tokenizer):
    tokens = tokenizer.encode("a🎉")[:-1]
    pieces = fed(TextStream(tokenizer, {END}), tokens)
    assert "".join(pieces).startswith("a\ufffd")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stops):
    stream = TextStream(tokenizer, {END}, tuple(stops))
    joined = "".join(fed(stream, tokenizer.encode(text)))
    found = [at for at in map(text.find, stops) if at >= 0]
    # Letter by letter, the stop that is complete first wins; none may be left inside.
    assert text.startswith(joined)
    assert not any(stop in joined for stop in stops)
    assert joined == stream.text
    if not found:
        assert joined == text


def test_a_stop_string_over_two_tokens_is_never_shown(tokenizer):
    stream = TextStream(tokenizer, {END}, ("END.",))
    pieces = fed(stream, tokenizer.encode("the E and the END. more"))
    assert "".join(pieces) == "the E and the "


def test_the_end_token_ends_and_is_not_shown(tokenizer):
    stream = TextStream(tokenizer, {END})
    assert not stream.feed(tokenizer.encode("a")[0])
    assert stream.feed(END)
    stream.finish()
    assert stream.take() == "a"
