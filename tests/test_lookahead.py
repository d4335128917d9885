"""Lookahead's window and pool against the published algorithm, written out slowly."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
import verifying
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import END, VOCAB, logits

from ondevice.errors import BadRequest
from ondevice.lookahead import DEFAULT, JacobiWindow, Lookahead
from ondevice.ngrams import MOST_KEYS, NgramPool
from ondevice.records import ROOT_ROW, StartVerify, Verdict, VerifyRow, Window
from ondevice.tree import riders_of
from ondevice.windows import SHAPES, checked

WINDOWS = st.builds(Window, st.integers(2, 8), st.integers(3, 6), st.integers(1, 8))


def likeliest(history: Sequence[int]) -> int:
    return int(np.argmax(logits(history)))


class Published:
    """Fu et al.'s program, one flat step after the other: levels, positions, mask, pool.

    No tree here: what a place sees is listed place by place, as in the paper's figure of the mask.
    """

    def __init__(self, window: Window, text: Sequence[int]) -> None:
        self.w, self.n, self.g = window.columns, window.ngram, window.guesses
        self.rng = random.Random(0)
        self.past: list[list[int] | None] = [
            [self.rng.choice(text) for _ in range(self.w + self.n - 3)]
        ]
        self.past += [None] * (self.n - 2)
        self.map: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def places(self) -> list[tuple[int, int]]:
        """(level, column), in the order of the program's input; column 0 of level 0 is the root."""
        found = [(0, column + 1) for column in range(len(self.past[0] or []))]
        for level, tokens in enumerate(self.past[1:], start=1):
            found += [(level, column) for column in range(len(tokens or []))]
        return found

    def token(self, place: tuple[int, int], root: int) -> int:
        level, column = place
        if level == 0:
            return root if column == 0 else self.past[0][column - 1]
        return self.past[level][column]

    def position(self, place: tuple[int, int], root_at: int) -> int:
        level, column = place
        if level == 0:
            return root_at + column  # item i = column - 1 stands at L + 1 + i
        offset = len(self.past[0]) + 1 - len(self.past[level])
        return root_at + level + offset + column

    def visible(self, place: tuple[int, int], root: int) -> list[int]:
        """The tokens after the prefix that a place sees, itself last."""
        level, column = place
        row = [(0, at) for at in range(column + 1)]
        own = [(above, column) for above in range(1, level + 1)]
        return [self.token(seen, root) for seen in (*row, *own)]

    def step(self, text: list[int]) -> None:
        """One forward's worth: fill a level, or find n-grams and shift."""
        root, prefix = text[-1], text[:-1]
        filled = [level for level in self.past if level is not None]
        last = len(filled) - 1
        new = [
            likeliest([*prefix, *self.visible(place, root)])
            for place in self.places()
            if place[0] == last
        ]
        if self.past[1] is None:
            self.past[0], self.past[1] = self.past[0][1:], new
        elif self.past[self.n - 2] is None:
            for level in range(last + 1):
                self.past[level] = self.past[level][1:]
            self.past[last + 1] = new[1:]
        else:
            assert len(new) == self.w
            for column in range(self.w):
                rest = tuple(self.past[level][column] for level in range(1, self.n - 1))
                self.remember(self.token((0, column), root), (*rest, new[column]))
            self.past[0] = self.past[1][1:]
            for level in range(1, self.n - 2):
                self.past[level] = self.past[level + 1]
            self.past[self.n - 2] = new
        newest = max(at for at, level in enumerate(self.past) if level is not None)
        self.past[newest] = [
            self.rng.choice(text) if token == END else token for token in self.past[newest]
        ]

    def remember(self, key: int, rest: tuple[int, ...]) -> None:
        known = self.map.setdefault(key, [])
        if rest in known:
            known.remove(rest)
        elif len(known) >= self.g:
            known.pop(0)
        known.append(rest)

    def learn_text(self, text: Sequence[int], start: int) -> None:
        for at in range(start, len(text) - self.n + 1):
            self.remember(text[at], tuple(text[at + 1 : at + self.n]))


@pytest.mark.parametrize(
    "window", [Window(2, 3, 1), Window(5, 3, 4), Window(4, 4, 3), Window(7, 5, 7), Window(3, 6, 2)]
)
def test_ngrams_and_positions_are_the_published_ones_over_200_steps(window: Window) -> None:
    rng = random.Random(7)
    text = [rng.randrange(1, VOCAB) for _ in range(12)]
    ours, theirs = Lookahead(ends={END}), Published(window, text)
    theirs.learn_text(text, 0)
    for _ in range(200):
        root = VerifyRow(0, text[-1], ROOT_ROW)
        riders = ours.riders(window, text)
        rows = [root, *riders_of([root], riders, 0)]
        paths = []
        for row in rows:
            above = [] if row.parent == ROOT_ROW else paths[row.parent]
            paths.append([*above, row.token])
        places = theirs.places()
        at = len(text) - 1
        assert [row.token for row in riders] == [theirs.token(place, text[-1]) for place in places]
        assert [at + len(path) - 1 for path in paths[1:]] == [
            theirs.position(place, at) for place in places
        ]
        assert paths[1:] == [theirs.visible(place, text[-1]) for place in places]
        answers = tuple(likeliest([*text[:-1], *path]) for path in paths[1:])
        command = StartVerify(0, (root,), "coupled", tuple(rows[1:]), window=window)
        # One to three tokens are accepted; the window moves by one column all the same.
        tokens = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 4))]
        verdict = Verdict(0, (), tuple(tokens), (), 0, 1, rider_tokens=answers)
        before = text
        ours.observe(command, verdict)
        theirs.step(before)
        text = [*text, *tokens]
        ours.propose(text)
        theirs.learn_text(text, len(before) - window.ngram + 1)
        pool = {key: [rest for rest, _ in ours.pool.get(key)] for key in theirs.map}
        assert pool == dict(theirs.map)


@settings(max_examples=30, deadline=None)
@given(WINDOWS, st.integers(0, 6), st.integers(0, 2**31), verifying.trees(most=6))
def test_a_window_row_sees_what_it_would_in_a_sequence_of_its_own(window, filled, seed, rows):
    """Also while the window fills, and beside guesses of the tree."""
    variant = "gqa tied"
    verifier, oracle = verifying.verifier_of(variant), verifying.oracle_of(variant)
    prompt = verifying.tokens_of(seed, 9)
    state = JacobiWindow(window, prompt, random.Random(seed))
    rng = np.random.default_rng(seed)
    for _ in range(filled):
        count = len(state.rows())
        state.advance(prompt[-1], rng.integers(verifying.VOCAB, size=count).tolist())
    root = rows[0].token
    riders = riders_of(rows, state.rows(), 0)
    session = verifier.open_session()
    verifier.prefill(session, prompt, lambda: False)
    found = verifier.row_logits(session, rows, riders)[len(rows) :]
    verifier.close_session(session)
    at = 0
    for level, tokens in enumerate(state.levels):
        for column in range(len(tokens)):
            base = [root, *state.levels[0]]
            seen = base[: column + 1 + (level == 0)]
            seen += [state.levels[above][column] for above in range(1, level + 1)]
            expected = verifying.next_logits(oracle, [*prompt, *seen])
            np.testing.assert_allclose(found[at], expected, atol=1e-3, rtol=0)
            at += 1
    assert at == len(found)


def test_the_pool_keeps_the_latest_of_each_key_and_forgets_old_keys():
    pool = NgramPool(guesses=2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(5, rest)
    assert [rest for rest, _ in pool.get(5)] == [(1,), (3,)]
    for key in range(10, 10 + MOST_KEYS):
        pool.add(key, (1,))
    assert pool.get(5) == []
    assert len(pool) == MOST_KEYS


def test_what_the_text_has_too_is_not_credited_to_the_window():
    pool = NgramPool(guesses=4)
    pool.add(1, (2, 3), found=True)
    assert pool.get(1) == [((2, 3), True)]
    pool.add_text([1, 2, 3], 3)
    pool.add(1, (2, 3), found=True)
    assert pool.get(1) == [((2, 3), False)]


def test_another_shape_starts_anew_and_knows_the_text():
    lookahead = Lookahead()
    text = [1, 2, 3, 4, 1, 2, 3]
    lookahead.propose(text)
    assert len(lookahead.riders(Window(3, 3, 2), text)) == 3
    assert [rest for rest, _ in lookahead.pool.get(1)] == [(2, 3)]
    assert len(lookahead.riders(DEFAULT, text)) == DEFAULT.columns + DEFAULT.ngram - 3


@pytest.mark.parametrize("window", [*SHAPES, Window(15, 5, 15), Window(60, 5, 60)])
def test_a_full_window_has_as_many_rows_as_it_says(window):
    state = JacobiWindow(window, [1, 2, 3], random.Random(0))
    while not state.full:
        state.advance(1, [1] * len(state.rows()))
    assert len(state.rows()) == window.riders


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 1), (65, 3, 1), (2, 2, 1), (2, 11, 1), (2, 3, 0), (2, 3, 65), (64, 10, 5), (2, 3.0, 1)],
)
def test_a_shape_out_of_range_is_refused_by_name(shape):
    window = Window(*shape)
    with pytest.raises(BadRequest, match=r"lookahead.*[WNG]"):
        checked(window)
