"""Little distillations of a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny

from ondevice.converters.checkpoint import Checkpoint
from ondevice.converters.distil.decoding import TOP
from ondevice.converters.distil.material import Material
from ondevice.converters.distil.recipe import Recipe
from ondevice.converters.distil.run import Distillation, Effort
from ondevice.converters.distil.shards import Text

RECIPE = Recipe(
    layers=(0, 1),
    rows=384,
    question_tokens=12,
    answer_tokens=16,
    decode_rows=8,
    batch_tokens=256,
    step_batches=1,
    held_out=5,
)
SOME = Effort(data_tokens=600, train_tokens=4000)
OFTEN = RECIPE.model_copy(update={"shard_s": 0.05, "checkpoint_s": 0.05})


def wide_model() -> tiny.TinyModel:
    """More tokens than the tokenizer has: a student with fewer rows is possible."""
    return tiny.tiny_model(vocab_size=400)


def distillation(checkpoint: Checkpoint, work: Path, recipe: Recipe = RECIPE) -> Distillation:
    run = Distillation(checkpoint, recipe, Material(), work, quiet=True)
    run.check()
    run.claim()
    return run


def random_texts(count: int, vocab_size: int, seed: int = 0) -> list[Text]:
    """Random tokens with random distributions, as shards hold them."""
    rng = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        length = int(rng.integers(6, 20))
        start = int(rng.integers(1, length - 2))
        logits = rng.standard_normal((length - start, vocab_size)) * 2
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        order = np.argsort(-logprobs, axis=1)[:, :TOP]
        texts.append(
            Text(
                index,
                "chat",
                0.0,
                rng.integers(0, vocab_size, length).astype(np.uint16),
                start,
                order.astype(np.uint16),
                np.take_along_axis(logprobs, order, 1).astype(np.float16),
                answer=start,
            )
        )
    return texts


def chosen_text(before: list[int], answer: list[int]) -> Text:
    """`before`, then `answer` of which every token is sure, cut at a loop."""
    top_tokens = np.zeros((len(answer), TOP), np.uint16)
    top_tokens[:, 0] = answer
    top_logprobs = np.full((len(answer), TOP), -np.inf, np.float16)
    top_logprobs[:, 0] = 0
    tokens = np.array([*before, *answer], np.uint16)
    start = len(before)
    return Text(1, "chat", 0.0, tokens, start, top_tokens, top_logprobs, start, looped=True)
