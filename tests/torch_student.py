"""The trainer's twin in torch: the same student, loss and optimiser; bf16 products on request.

Not part of the product. It proves the MLX trainer's losses, and trained the shipped drafter on a
CPU whose bf16 products torch runs at twice to four times MLX's fp32 speed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


class TorchStudent:
    """`weights`: fp32 by Hugging Face name, layers numbered from 0; embed and head are frozen."""

    def __init__(self, weights, config, embed, head, dtype=torch.float32):
        self.config, self.dtype = config, dtype
        self.p = {k: torch.tensor(v, requires_grad=True) for k, v in weights.items()}
        self.embed, self.head = torch.as_tensor(embed), torch.as_tensor(head).to(dtype)
        half = config["head_dim"] // 2
        freq = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(2048, dtype=torch.float64)[:, None] * freq
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def _w(self, name):
        return self.p[name + ".weight"].to(self.dtype)

    def _norm(self, x, name):
        y = F.rms_norm(x, (x.shape[-1],), self.p[name + ".weight"], self.config["rms_norm_eps"])
        return y.to(self.dtype)

    def _rope(self, x):
        n = x.shape[2]
        a, b = x.float().chunk(2, -1)
        c, s = self.cos[:n], self.sin[:n]
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(self.dtype)

    def hidden(self, tokens, places):
        """Normed output at the flat `places`; the last layer's MLP runs on those alone."""
        c = self.config
        texts, length = tokens.shape
        heads, size = c["num_attention_heads"], c["head_dim"]
        group = heads // c["num_key_value_heads"]
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embed[tokens].float().view(texts * length, -1)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            y = self._norm(x, p + "input_layernorm")
            q, k, v = (
                F.linear(y, self._w(f"{p}self_attn.{n}_proj"))
                .view(texts, length, -1, size)
                .transpose(1, 2)
                for n in "qkv"
            )
            q, k = self._rope(q), self._rope(k)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = (q @ k.transpose(2, 3)).float() * size**-0.5
            a = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(self.dtype) @ v
            a = a.transpose(1, 2).reshape(texts * length, heads * size)
            if i == c["num_hidden_layers"] - 1:
                x, a = x[places], a[places]
            x = x + F.linear(a, self._w(p + "self_attn.o_proj"))
            y = self._norm(x, p + "post_attention_layernorm")
            z = F.silu(F.linear(y, self._w(p + "mlp.gate_proj")))
            z = z * F.linear(y, self._w(p + "mlp.up_proj"))
            x = x + F.linear(z, self._w(p + "mlp.down_proj"))
        return self._norm(x, "model.norm")

    def loss(self, batch, chunk=1024):
        """Summed loss of a batch; backward is run inside for the head, to bound memory."""
        flat = self.hidden(torch.from_numpy(batch.tokens), torch.from_numpy(batch.places))
        leaf = flat.detach().requires_grad_(True)
        rows, weights = torch.from_numpy(batch.rows), torch.from_numpy(batch.weights)
        total, right = 0.0, 0
        first = torch.from_numpy(batch.first)
        grads = []
        with torch.no_grad():
            for s in range(0, len(leaf), chunk):
                e = s + chunk
                logits = F.linear(leaf[s:e], self.head).float()
                right += int((logits.argmax(-1) == first[s:e]).sum())
                mass = weights[s:e].sum(1)
                picked = (logits.gather(1, rows[s:e]) * weights[s:e]).sum(1)
                top = logits.amax(1, keepdim=True)
                p = logits.sub_(top).exp_()
                z = p.sum(1, keepdim=True)
                total += float(((top + z.log())[:, 0] * mass - picked).sum())
                p.mul_(mass[:, None] / z)
                p.scatter_add_(1, rows[s:e], -weights[s:e])
                grads.append(p.to(self.dtype) @ self.head)
        flat.backward(torch.cat(grads))
        return total, right


def orthogonal(g, steps=5):
    x = g.to(torch.bfloat16)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if flip else x).float()


class TorchLearner:
    """`Learner` in torch: AdamW, or Muon for matrices with AdamW for the norms."""

    def __init__(self, student, muon=False, betas=(0.9, 0.95), eps=1e-8, norm_rate=1.0):
        self.student, self.muon, self.betas, self.eps = student, muon, betas, eps
        self.norm_rate = norm_rate
        self.m = {k: torch.zeros_like(v) for k, v in student.p.items()}
        self.v = {k: torch.zeros_like(v) for k, v in student.p.items()}
        self.t = 0

    def learn(self, batches, rate):
        total = sum(len(b.places) for b in batches)
        loss, right = 0.0, 0
        for p in self.student.p.values():
            p.grad = None
        for b in batches:
            a, c = self.student.loss(b)
            loss += a
            right += c
        self.t += 1
        with torch.no_grad():
            for k, p in self.student.p.items():
                self._update(k, p, p.grad / total, rate)
        from ondevice.converters.distil.learner import Learned

        return Learned(loss / total, total, right)

    def _update(self, k, p, g, rate):
        b1, b2 = self.betas
        m, v = self.m[k], self.v[k]
        if self.muon and p.ndim == 2:
            m.mul_(0.95).add_(g)
            u = orthogonal(g + 0.95 * m)
            p.sub_(u, alpha=rate * 0.2 * max(p.shape) ** 0.5)
            return
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        step = rate / (1 - b1**self.t)
        p.sub_(m / ((v / (1 - b2**self.t)).sqrt() + self.eps), alpha=step)

    def judge(self, batches):
        from ondevice.converters.distil.learner import Learned

        loss, right, total = 0.0, 0, 0
        with torch.no_grad():
            for b in batches:
                h = self.student.hidden(torch.from_numpy(b.tokens), torch.from_numpy(b.places))
                for s in range(0, len(h), 1024):
                    logits = F.linear(h[s : s + 1024], self.student.head).float()
                    r, w = (
                        torch.from_numpy(b.rows[s : s + 1024]),
                        torch.from_numpy(b.weights[s : s + 1024]),
                    )
                    loss += float(
                        (logits.logsumexp(1) * w.sum(1)).sum() - (logits.gather(1, r) * w).sum()
                    )
                    right += int(
                        (logits.argmax(1) == torch.from_numpy(b.first[s : s + 1024])).sum()
                    )
                total += len(b.places)
        return Learned(loss / total, total, right)

    def weights(self):
        return {k: v.detach().numpy().copy() for k, v in self.student.p.items()}

    def state(self):
        s = self.weights() | {"t": np.array(self.t)}
        s |= {"m." + k: v.numpy().copy() for k, v in self.m.items()}
        return s | {"v." + k: v.numpy().copy() for k, v in self.v.items()}

    def restore(self, state):
        self.t = int(np.asarray(state["t"]).reshape(-1)[0])
        with torch.no_grad():
            for k, p in self.student.p.items():
                p.copy_(torch.from_numpy(np.array(state[k])))
                self.m[k].copy_(torch.from_numpy(np.array(state["m." + k])))
                self.v[k].copy_(torch.from_numpy(np.array(state["v." + k])))
