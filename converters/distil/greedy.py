"""The verifier's greedy answers to given prompts, side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from ondevice.converters.distil.decoding import Decoder

Report = Callable[[float, int], None]


def greedy_answers(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    stops: Collection[int],
    limit: int,
    report: Report = lambda share, steps: None,
) -> list[list[int]]:
    """Answers of at most `limit` tokens, the stop token included.

    report is told of every step: the share of the steps that it may take, and how many were taken.

    The decoder must have been made without a prefix: prompts begin at its first slot.
    """
    answers: list[list[int]] = []
    for first in range(0, len(prompts), decoder.rows):
        some = prompts[first : first + decoder.rows]
        answers += _answer_some(decoder, some, stops, limit, report)
    return answers


def _answer_some(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    stops: Collection[int],
    limit: int,
    report: Report,
) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + limit for prompt in prompts]
    fed = [0] * decoder.rows
    most = max(ends)
    steps = 0
    while True:
        going = [
            row
            for row, text in enumerate(texts)
            if fed[row] < len(text)
            and not (len(text) >= ends[row] or _ended(text, prompts[row], stops))
        ]
        if not going:
            return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        tokens = np.zeros(decoder.rows, np.int64)
        positions = np.zeros(decoder.rows, np.int64)
        for row in range(len(texts)):
            positions[row] = min(fed[row], len(texts[row]) - 1)
            tokens[row] = texts[row][positions[row]]
        zeros = np.zeros(decoder.rows, np.float32)
        step = decoder.step(tokens, positions, zeros, zeros)
        steps += 1
        report(steps / most, steps)
        for row in going:
            fed[row] += 1
            if fed[row] == len(texts[row]):
                texts[row].append(int(step.tokens[row]))


def _ended(text: list[int], prompt: Sequence[int], stops: Collection[int]) -> bool:
    return len(text) > len(prompt) and text[-1] in stops
