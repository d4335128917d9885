"""The trainer's twin in torch: the same student, loss and optimiser; bf16 products on request.

Not part of the product. It proves the MLX trainer's losses, and trained the shipped drafter on a
CPU whose bf16 products torch runs at more than twice the speed of MLX's fp32 ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ondevice.converters.distil.corpus import Batch
from ondevice.converters.distil.learner import Learned, Single, State
from ondevice.converters.distil.student import BETAS, EPS, HEAD_ROWS

POSITIONS = 2048
Tensor = torch.Tensor


class TorchStudent:
    """A few layers of a Llama; embedding and head are frozen.

    weights: fp32 by Hugging Face name, layers numbered from 0. config: the verifier's config.json.
    """

    def __init__(
        self,
        weights: Mapping[str, Single],
        config: Mapping[str, Any],
        embedding: Single,
        head: Single,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters = {k: torch.tensor(v, requires_grad=True) for k, v in weights.items()}
        self._dtype, self._eps = dtype, config["rms_norm_eps"]
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._size = config["head_dim"]
        self._layers = 1 + max(int(k.split(".")[2]) for k in weights if ".layers." in k)
        self._embedding, self._head = torch.as_tensor(embedding), torch.as_tensor(head).to(dtype)
        half = self._size // 2
        frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
        self._cos, self._sin = angles.cos().float(), angles.sin().float()

    def hidden(self, batch: Batch) -> Tensor:
        """Normed output at the batch's places; the last layer's MLP runs on those alone."""
        tokens, places = torch.from_numpy(batch.tokens), torch.from_numpy(batch.places)
        x = self._embedding[tokens].float().flatten(0, 1)
        for i in range(self._layers):
            prefix = f"model.layers.{i}."
            mixed = self._attention(self._normed(x, prefix + "input_layernorm"), prefix, tokens)
            if i == self._layers - 1:
                x, mixed = x[places], mixed[places]
            x = x + self._linear(mixed, prefix + "self_attn.o_proj")
            y = self._normed(x, prefix + "post_attention_layernorm")
            gated = F.silu(self._linear(y, prefix + "mlp.gate_proj"))
            gated = gated * self._linear(y, prefix + "mlp.up_proj")
            x = x + self._linear(gated, prefix + "mlp.down_proj")
        return self._normed(x, "model.norm")

    def learn(self, batch: Batch) -> tuple[float, int]:
        """Summed loss and right first choices of a batch; adds its gradients."""
        hidden = self.hidden(batch)
        loss, right, slopes = self._head_slopes(hidden.detach(), batch)
        hidden.backward(slopes)
        return loss, right

    def judge(self, batch: Batch) -> tuple[float, int]:
        """The same figures, nothing added."""
        with torch.no_grad():
            loss, right, _ = self._head_slopes(self.hidden(batch), batch)
        return loss, right

    @torch.no_grad()
    def _head_slopes(self, hidden: Tensor, batch: Batch) -> tuple[float, int, Tensor]:
        loss, right, slopes = 0.0, 0, []
        for first in range(0, len(hidden), HEAD_ROWS):
            part = slice(first, first + HEAD_ROWS)
            rows, weights = (
                torch.from_numpy(batch.rows[part]),
                torch.from_numpy(batch.weights[part]),
            )
            logits = F.linear(hidden[part], self._head).float()
            right += int((logits.argmax(-1) == torch.from_numpy(batch.first[part])).sum())
            mass = weights.sum(1)
            picked = (logits.gather(1, rows) * weights).sum(1)
            top = logits.amax(1, keepdim=True)
            share = logits.sub_(top).exp_()
            total = share.sum(1, keepdim=True)
            loss += float(((top + total.log())[:, 0] * mass - picked).sum())
            share.mul_(mass[:, None] / total).scatter_add_(1, rows, -weights)
            slopes.append(share.to(self._dtype) @ self._head)
        return loss, right, torch.cat(slopes)

    def _attention(self, y: Tensor, prefix: str, tokens: Tensor) -> Tensor:
        texts, length = tokens.shape
        q, k, v = (
            self._linear(y, f"{prefix}self_attn.{name}_proj")
            .view(texts, length, -1, self._size)
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        group = self._heads // self._kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3)).float() * self._size**-0.5
        mixed = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(self._dtype) @ v
        return mixed.transpose(1, 2).reshape(texts * length, -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.parameters[name + ".weight"].to(self._dtype))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        gain = self.parameters[name + ".weight"]
        return F.rms_norm(x, (x.shape[-1],), gain, self._eps).to(self._dtype)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self._cos[: x.shape[2]], self._sin[: x.shape[2]]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self._dtype)


class TorchLearner:
    """`Learner` in torch: AdamW without weight decay, fp32 moments."""

    def __init__(self, student: TorchStudent) -> None:
        self._student, self._steps = student, 0
        self._means = {k: torch.zeros_like(v) for k, v in student.parameters.items()}
        self._squares = {k: torch.zeros_like(v) for k, v in student.parameters.items()}

    def learn(self, batches: Sequence[Batch], rate: float) -> Learned:
        parameters = self._student.parameters
        for parameter in parameters.values():
            parameter.grad = None
        found = [self._student.learn(batch) for batch in batches]
        total = sum(len(batch.places) for batch in batches)
        self._steps += 1
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                self._update(name, parameter, parameter.grad / total, rate)
        return Learned(sum(loss for loss, _ in found) / total, total, sum(n for _, n in found))

    def judge(self, batches: Sequence[Batch]) -> Learned:
        found = [self._student.judge(batch) for batch in batches]
        total = sum(len(batch.places) for batch in batches)
        return Learned(sum(loss for loss, _ in found) / total, total, sum(n for _, n in found))

    def _update(self, name: str, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        first, second = BETAS
        mean, square = self._means[name], self._squares[name]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (square / (1 - second**self._steps)).sqrt_().add_(EPS)
        parameter.addcdiv_(mean, scale, value=-rate / (1 - first**self._steps))

    def weights(self) -> dict[str, Single]:
        return {k: v.detach().numpy().copy() for k, v in self._student.parameters.items()}

    def state(self) -> dict[str, Any]:
        means = {"m." + k: v.numpy().copy() for k, v in self._means.items()}
        squares = {"v." + k: v.numpy().copy() for k, v in self._squares.items()}
        return self.weights() | means | squares | {"t": np.array(self._steps)}

    def restore(self, state: State) -> None:
        self._steps = int(state["t"].reshape(-1)[0])
        with torch.no_grad():
            for name, parameter in self._student.parameters.items():
                parameter.copy_(torch.from_numpy(np.array(state[name])))
                self._means[name].copy_(torch.from_numpy(np.array(state["m." + name])))
                self._squares[name].copy_(torch.from_numpy(np.array(state["v." + name])))
