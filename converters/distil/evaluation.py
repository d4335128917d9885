"""A drafter against its verifier's greedy text, category by category."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ondevice.converters.distil.acceptance import Judged, figures, judge
from ondevice.converters.distil.loops import loop_start

if TYPE_CHECKING:
    from mlx_lm.models.llama import Model

ALL = "all"


@dataclass(frozen=True, slots=True)
class Passage:
    """Text along which, from `start` on, the verifier's first choice is to be foretold.

    In its own greedy text that is the text itself.
    """

    category: str
    tokens: tuple[int, ...]
    start: int


def evaluate(
    verifier: Model,
    drafter: Model,
    row_to_token: Sequence[int],
    passages: Sequence[Passage],
    report: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by category and of all, with loops and without: {"all": {"with_loops": ...}}.

    drafter: as `drafter_model` makes it, its logits are those of `row_to_token`. report is told how
    many passages are done.
    """
    judged: dict[str, list[Judged]] = {}
    for done, passage in enumerate(passages):
        report(done)
        found = _judge_passage(verifier, drafter, row_to_token, passage)
        for category in (ALL, passage.category):
            judged.setdefault(category, []).append(found)
    return {
        category: {
            "with_loops": figures(texts),
            "without_loops": figures(texts, with_loops=False),
        }
        for category, texts in judged.items()
    }


def _judge_passage(
    verifier: Model, drafter: Model, row_to_token: Sequence[int], passage: Passage
) -> Judged:
    inputs, text = passage.tokens[:-1], passage.tokens[passage.start :]
    p, q = (_last_logits(model, inputs, len(text)) for model in (verifier, drafter))
    return judge(p, q, row_to_token, p.argmax(axis=1).tolist(), loop_start(text))


def _last_logits(model: Model, tokens: Sequence[int], count: int) -> npt.NDArray[np.float32]:
    """Logits after each of the last `count` of `tokens`, (count, rows); the head runs on them."""
    import mlx.core as mx

    hidden = model.model(mx.array([tokens]))[0, -count:]
    if model.args.tie_word_embeddings:
        logits = model.model.embed_tokens.as_linear(hidden)
    else:
        logits = model.lm_head(hidden)
    return np.array(logits.astype(mx.float32))


def drafter_model(
    verifier: Model, row_to_token: Sequence[int], tensors: Mapping[str, npt.NDArray[np.float32]]
) -> Model:
    """A student as an mlx-lm Llama: `tensors` its own, embedding and head the verifier's.

    Its head has the rows `row_to_token` only.
    """
    from dataclasses import replace

    import mlx.core as mx
    from mlx.nn.layers.linear import Linear
    from mlx_lm.models.llama import Model as Llama

    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers"))
    args = replace(
        verifier.args, num_hidden_layers=layers, tie_word_embeddings=False, layer_types=None
    )
    model = Llama(args)
    embedding = verifier.model.embed_tokens.weight
    head = embedding if verifier.args.tie_word_embeddings else verifier.lm_head.weight
    model.lm_head = Linear(args.hidden_size, len(row_to_token), bias=False)
    own = {name: mx.array(value) for name, value in tensors.items()}
    own["model.embed_tokens.weight"] = embedding
    own["lm_head.weight"] = head[mx.array(list(row_to_token))]
    model.load_weights(list(own.items()))
    return model
