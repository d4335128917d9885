"""Repetition loops: a small model's text that has begun to go in circles."""

from __future__ import annotations

from collections.abc import Sequence

MIN_LOOP_TOKENS = 24
"""Tokens that a loop covers before it counts as one: three equal list markers are no loop."""

MIN_REPEATS = 3
MAX_PERIOD = 96


def loop_period(tokens: Sequence[int]) -> int | None:
    """The shortest period with which `tokens` end in at least MIN_REPEATS equal pieces, or None.

    Short periods must repeat until they cover MIN_LOOP_TOKENS.
    """
    count = len(tokens)
    for period in range(1, min(MAX_PERIOD, count // MIN_REPEATS) + 1):
        needed = max(period * MIN_REPEATS, MIN_LOOP_TOKENS)
        if needed > count:
            continue
        if tokens[count - needed : count - period] == tokens[count - needed + period :]:
            return period
    return None


def loop_start(tokens: Sequence[int]) -> int | None:
    """Index at which the first loop's second round begins: what follows only repeats. None: none.

    Everything from there on is predictable from the text before it.
    """
    tokens = list(tokens)
    for end in range(MIN_LOOP_TOKENS, len(tokens) + 1):
        period = loop_period(tokens[:end])
        if period is None:
            continue
        start = end - max(period * MIN_REPEATS, MIN_LOOP_TOKENS)
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        return start + period
    return None


def without_loop(tokens: Sequence[int]) -> int:
    """How many of `tokens` to keep so that a loop is seen twice and no more."""
    period = loop_period(tokens)
    if period is None:
        return len(tokens)
    start = len(tokens) - period
    while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    return min(len(tokens), start + 2 * period)
