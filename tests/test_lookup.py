"""Prompt lookup: the longest match, several continuations, bounded memory and time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.corpus import MOST_BYTES, read_corpus
from ondevice.errors import BadRequest
from ondevice.lookahead import Lookahead
from ondevice.lookup import BYTES_A_TOKEN, LONGEST_MATCH, TRIED, Lookup, SuffixIndex

TEXTS = st.lists(st.integers(0, 3), min_size=2, max_size=120)


def longest_by_hand(text: Sequence[int]) -> int:
    """Length of the longest suffix that stood earlier with a token behind it."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        for at in range(length, len(text)):
            if text[at - length : at] == text[len(text) - length :]:
                return length
    return 0


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_match_is_one_and_the_longest_of_those_looked_at(text):
    index = SuffixIndex(256)
    index.extend(text)
    matches = index.matches(text[-LONGEST_MATCH:])
    for match in matches:
        assert text[match.at - match.length : match.at] == text[len(text) - match.length :]
        assert 0 < match.at < len(text)
    assert [m.length for m in matches] == sorted((m.length for m in matches), reverse=True)
    best = longest_by_hand(text)
    assert bool(matches) == bool(best)
    if sum(text[at - 1 :: -1][:1] == text[-1:] for at in range(1, len(text))) <= TRIED:
        assert matches[0].length == best if matches else best == 0


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(2, 40))
def test_an_index_made_at_once_is_that_of_a_text_added_token_by_token(text, tail):
    at_once = SuffixIndex.of(text)
    grown = SuffixIndex(at_once._mask + 1)
    grown.extend(text)
    assert at_once.matches(text[:tail]) == grown.matches(text[:tail])
    assert at_once.matches(text[-tail:]) == grown.matches(text[-tail:])
    assert at_once.read(0, len(text)) == grown.read(0, len(text)) == tuple(text)


def test_a_ring_that_went_round_gives_only_what_it_still_has():
    rng = random.Random(3)
    text = [rng.randrange(5) for _ in range(2000)]
    index = SuffixIndex(64)
    for end in range(0, 2000, 7):
        index.extend(text[index.length : end])
        for match in index.matches(text[max(0, end - LONGEST_MATCH) : end]):
            assert end - 64 < match.at < end
            assert text[match.at - match.length : match.at] == text[end - match.length : end]


def test_continuations_of_a_repeated_start_are_a_tree():
    text = [7, 1, 2, 3, 9, 7, 1, 2, 4, 9, 7, 1, 2]
    guesses = Lookup().propose(text)
    first = [guess.token for guess in guesses if guess.parent == -1]
    assert first == [4, 3]
    assert [g.token for g in guesses if g.parent == 0] == [9]
    assert all(guess.parent < at for at, guess in enumerate(guesses))


def test_a_new_turn_that_rewrites_the_text_keeps_what_was_seen():
    lookup = Lookup()
    lookup.propose([1, 2, 3, 4, 5])
    assert [g.token for g in lookup.propose([1, 2, 9, 3])] == [4, 5]
    assert lookup.propose([8]) == []
    assert lookup._index.read(0, lookup._index.length).count(-1) == 2


def test_the_index_has_its_stated_bytes_whatever_it_is_given():
    index = SuffixIndex(1 << 10)
    before = _bytes(index)
    assert before == BYTES_A_TOKEN << 10
    index.extend(random.Random(0).choices(range(50_000), k=5000))
    assert _bytes(index) == before


def _bytes(index: SuffixIndex) -> int:
    parts = [index._tokens, *index._heads, *index._earlier]
    return sum(len(part) * part.itemsize for part in parts)


def test_a_long_session_takes_no_longer_for_a_token_than_a_short_one():
    """50,000 tokens; processor time, the least of each thousand's tenths."""
    rng = random.Random(1)
    text = [min(49_000, int(rng.paretovariate(0.7))) for _ in range(50_000)]
    lookup, lookahead = Lookup(), Lookahead()
    committed: list[int] = []
    took = []
    for start in range(0, len(text), 100):
        began = time.thread_time()
        for token in text[start : start + 100]:
            committed.append(token)
            lookup.propose(committed)
            lookahead.propose(committed)
        took.append(time.thread_time() - began)
    warm = took[10:20]  # before that chains are shorter than what is tried of them
    assert min(took[-10:]) < 1.2 * min(warm)


def corpus_of(file: Path) -> SuffixIndex:
    from ondevice.engine import _load_tokenizer

    tiny.write_tokenizer(file.parent)
    return read_corpus(file, _load_tokenizer(file.parent))


def test_a_corpus_is_proposed_from(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("the cat in the hat", encoding="utf-8")
    corpus = corpus_of(file)
    text = corpus.read(0, corpus.length)
    guesses = Lookup(corpus).propose([3, 0, *text[4:6]])
    assert [guess.token for guess in guesses[:3]] == list(text[6:9])


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a\x00b", "binary"),
        (b"a" * (MOST_BYTES + 1), "at most 8"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(tmp_path, content, wrong):
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequest, match=wrong) as caught:
        corpus_of(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
