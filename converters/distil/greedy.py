"""The verifier's greedy answers to given prompts, side by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ondevice.converters.distil.decoding import Decoder


def greedy_answers(
    decoder: Decoder, prompts: Sequence[Sequence[int]], stops: Collection[int], limit: int
) -> list[list[int]]:
    """Answers of at most `limit` tokens, the stop token included.

    The decoder must have been made without a prefix: prompts begin at its first slot.
    """
    answers: list[list[int]] = []
    for first in range(0, len(prompts), decoder.rows):
        answers += _answer_some(decoder, prompts[first : first + decoder.rows], stops, limit)
    return answers


def _answer_some(
    decoder: Decoder, prompts: Sequence[Sequence[int]], stops: Collection[int], limit: int
) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + limit for prompt in prompts]
    fed = [0] * decoder.rows
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
        for row in going:
            fed[row] += 1
            if fed[row] == len(texts[row]):
                texts[row].append(int(step.tokens[row]))


def _ended(text: list[int], prompt: Sequence[int], stops: Collection[int]) -> bool:
    return len(text) > len(prompt) and text[-1] in stops
