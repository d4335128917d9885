"""The student in MLX: a few layers of the verifier, its embedding frozen, and its optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ondevice.converters.distil.corpus import Batch
from ondevice.converters.distil.learner import Learned, Single, State
from ondevice.converters.distil.workers import Workers
from ondevice.converters.parity import selected_model
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_weights import Tensors

if TYPE_CHECKING:
    from mlx_lm.models.llama import Model

HEAD_ROWS = 256
"""Targets whose logits are in memory at a time."""

BETAS = (0.9, 0.95)
EPS = 1e-8
START_SCALE = 0.25
"""On the final norm's gain when training begins: a few layers alone are sure of the wrong tokens.

SmolLM2's layers 0, 1, 2 begin at a loss of 17.2 as they are, 9.7 at a half, 7.8 at 0.3, 8.0 at
0.15.
"""

_OPTIMISER = "optimiser."
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class _Sum:
    loss: float
    right: int
    targets: int


class Student:
    """`layers` of a llama-family verifier (`tensors`, `config`) as a model of its own.

    Only the layers and the final norm are learned; the head is the rows `row_to_token` of the
    verifier's output matrix, frozen as the embedding is. AdamW without weight decay. The batches of
    a step are shared out among `workers`.
    """

    def __init__(
        self,
        tensors: Tensors,
        config: ModelConfig,
        layers: Sequence[int],
        row_to_token: Sequence[int],
        workers: Workers | None = None,
    ) -> None:
        self._workers = workers or Workers()
        matrix = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        head = mx.array(tensors(f"{matrix}.weight")[list(row_to_token)])
        self._model = _trainable(selected_model(tensors, config, layers))
        self._model.model.norm.weight = self._model.model.norm.weight * START_SCALE
        self._graphs = [_Graph(self._model, head)]
        for _ in range(self._workers.count - 1):
            other = _trainable(selected_model(tensors, config, layers))
            self._graphs.append(_Graph(other, head))
        self._share(self._model.parameters())
        self._optimiser = optim.AdamW(
            1.0, betas=list(BETAS), eps=EPS, weight_decay=0.0, bias_correction=True
        )
        self._optimiser.init(self._model.trainable_parameters())

    def begin_as(self, tensors: Mapping[str, Single]) -> None:
        """Take these weights in place of the verifier's, with fresh moments."""
        self._share(tree_unflatten([(k, mx.array(v)) for k, v in tensors.items()]))

    def _share(self, parameters: Any) -> None:
        """Give every worker's graph the same arrays."""
        mx.eval(parameters)
        for graph in self._graphs:
            graph.model.update(parameters)

    def _on_workers(
        self, ask: Callable[[_Graph, Batch], Part], batches: Sequence[Batch]
    ) -> list[Part]:
        graphs = cycle(self._graphs)
        return self._workers.map([partial(ask, next(graphs), batch) for batch in batches])

    def learn(self, batches: Sequence[Batch], rate: float) -> Learned:
        """One optimiser step at learning rate `rate` on the mean loss of all `batches`."""
        parts = self._on_workers(_Graph.gradient, batches)
        learned = _mean([part for part, _ in parts])
        sums = reduce(partial(tree_map, mx.add), (gradient for _, gradient in parts))
        self._optimiser.learning_rate = mx.array(rate)
        self._optimiser.update(self._model, tree_map(lambda grad: grad / learned.targets, sums))
        mx.eval(self._optimiser.state)
        self._share(self._model.trainable_parameters())
        return learned

    def judge(self, batches: Sequence[Batch]) -> Learned:
        """Loss and right first choices on `batches`; nothing is learned."""
        return _mean(self._on_workers(_Graph.judge, batches))

    def gradients(self, batch: Batch) -> dict[str, Single]:
        """Gradient of the summed loss of one batch, by parameter name."""
        _, gradient = self._graphs[0].gradient(batch)
        return _named(gradient)

    def weights(self) -> dict[str, Single]:
        """The student's own tensors by Hugging Face name, layers numbered from 0."""
        return _named(self._model.trainable_parameters())

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Weights and the optimiser's moments, exactly."""
        moments = _named(self._optimiser.state)
        return self.weights() | {_OPTIMISER + name: value for name, value in moments.items()}

    def restore(self, state: State) -> None:
        """Take back what `state` gave."""
        cut = len(_OPTIMISER)
        moments = [(k[cut:], mx.array(v)) for k, v in state.items() if k.startswith(_OPTIMISER)]
        weights = [(k, mx.array(v)) for k, v in state.items() if not k.startswith(_OPTIMISER)]
        self._share(tree_unflatten(weights))
        self._optimiser.state = tree_unflatten(moments)


class _Graph:
    """One worker's copy of the student: its modules hold what is being differentiated.

    head (rows, width) is frozen.
    """

    def __init__(self, model: Model, head: mx.array) -> None:
        self.model = model
        self._head = head
        self._slope = value_and_grad(model, self._surrogate)

    def gradient(self, batch: Batch) -> tuple[_Sum, Any]:
        """Of the batch's summed loss, evaluated: another thread adds it up."""
        (_, loss, right), gradient = self._slope(batch)
        mx.eval(loss, right, gradient)
        return _Sum(float(loss), int(right), len(batch.places)), gradient

    def judge(self, batch: Batch) -> _Sum:
        """The batch's summed loss and right first choices."""
        _, loss, right = self._surrogate(batch)
        return _Sum(float(loss), int(right), len(batch.places))

    def _hidden(self, batch: Batch) -> mx.array:
        """Normed output at the batch's places; the last layer's MLP runs on those alone."""
        network: Any = self.model.model
        x = network.embed_tokens(mx.array(batch.tokens))
        for layer in network.layers[:-1]:
            x = layer(x, "causal")
        last = network.layers[-1]
        x = x + last.self_attn(last.input_layernorm(x), "causal")
        x = x.reshape(-1, x.shape[-1])[mx.array(batch.places)]
        hidden: mx.array = network.norm(x + last.mlp(last.post_attention_layernorm(x)))
        return hidden

    def _surrogate(self, batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
        """A number whose gradient is the loss's, the summed loss, and right first choices.

        The loss's slope at the hidden states is known in closed form (softmax less target): logits
        live for one chunk of rows only, and each is raised to a power once, which is what takes the
        time on a CPU (13 ns).
        """
        hidden = self._hidden(batch)
        slopes, loss, right = self._head_slopes(mx.stop_gradient(hidden), batch)
        return (hidden * mx.stop_gradient(slopes)).sum(), loss, right

    def _head_slopes(self, hidden: mx.array, batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
        slopes, loss, right = [], mx.array(0.0), mx.array(0)
        for first in range(0, len(batch.places), HEAD_ROWS):
            part = slice(first, first + HEAD_ROWS)
            rows, weights = mx.array(batch.rows[part]), mx.array(batch.weights[part])
            mass = weights.sum(axis=1, keepdims=True)
            logits = hidden[part] @ self._head.T
            right = right + (logits.argmax(axis=1) == mx.array(batch.first[part])).sum()
            top = logits.max(axis=1, keepdims=True)
            share = mx.exp(logits - top)
            total = share.sum(axis=1, keepdims=True)
            picked = (mx.take_along_axis(logits, rows, axis=1) * weights).sum()
            loss = loss + ((top + mx.log(total)) * mass).sum() - picked
            slope = share * (mass / total)
            # Rows that stand in for tokens without one weigh nothing, so what is added may repeat.
            slope = slope.at[mx.arange(len(mass))[:, None], rows].add(-weights)
            slopes.append(slope @ self._head)
            mx.eval(slopes[-1], loss, right)
        return mx.concatenate(slopes), loss, right


def _trainable(model: Model) -> Model:
    """`model` with its layers and final norm to be learned, and nothing else."""
    model.freeze()
    for layer in model.model.layers:
        layer.unfreeze()
    model.model.norm.unfreeze()
    return model


def _mean(sums: Sequence[_Sum]) -> Learned:
    targets = sum(part.targets for part in sums)
    loss = sum(part.loss for part in sums)
    return Learned(loss / targets, targets, sum(part.right for part in sums))


def _named(tree: Any) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a tree by their dotted paths."""
    return {name: np.array(value) for name, value in dict(tree_flatten(tree)).items()}
