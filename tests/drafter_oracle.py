"""Two transformers written apart from the product, to hold the drafter against.

`NumpyRuntime` is the drafter function's contract in its simplest form: named inputs in, named
outputs out, caches joined and masks obeyed. `in_order_logits` knows no cache, slot or step: it runs
a text from its first token, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tiny

from ondevice.artifact import DrafterManifest, FunctionShape, RopeManifest
from ondevice.coreml.runtime import Array, FunctionSignature, TensorSpec, check_call
from ondevice.drafter import CoreMLDrafter
from ondevice.drafterfolder import LoadedDrafter
from ondevice.embeddings import Embedding
from ondevice.models.drafter_graph import DrafterFunction
from ondevice.models.drafter_weights import head_partition


class NumpyRuntime:
    """Runs every t{T}_s{S} of a tiny model. `spoil`: output -> index that becomes NaN."""

    name = "numpy"

    sleeps = False

    def __init__(
        self, model: tiny.TinyModel, row_counts: Sequence[int], contexts: Sequence[int]
    ) -> None:
        self.model = model
        self.shapes = [
            DrafterFunction(model.config, rows, context)
            for rows in row_counts
            for context in contexts
        ]
        self.functions = {
            shape.name: FunctionSignature(_specs(shape.inputs()), _specs(shape.outputs()))
            for shape in self.shapes
        }
        self.spoil: dict[str, tuple[Any, ...]] = {}
        self.spoil_with = np.nan
        self.calls: list[str] = []
        self.closed = False

    def buffer(self, spec: TensorSpec) -> Array:
        return spec.empty()

    def predict(
        self, function: str, inputs: Mapping[str, Array], out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        check_call(function, self.functions[function], inputs, out)
        self.calls.append(function)
        outputs = self._outputs(inputs)
        for name, index in self.spoil.items():
            outputs[name][index] = self.spoil_with
        for name, array in (out or {}).items():
            array[:] = outputs[name]
            outputs[name] = array
        return outputs

    def close(self) -> None:
        self.closed = True

    def _outputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        config, weights = self.model.config, self.model.tensors
        x = inputs["x"][0, :, 0].T
        cos, sin = inputs["cos"][0, 0].T, inputs["sin"][0, 0].T
        mask = np.concatenate([inputs["mask"][0, 0], inputs["mask_new"][0, 0]], axis=1)
        new: dict[str, list[Array]] = {"k_new": [], "v_new": []}

        def rotate(heads: Array) -> Array:
            low, high = np.split(heads, 2, axis=-1)
            return heads * cos + np.concatenate([-high, low], axis=-1) * sin

        def project(x: Array, name: str, heads: int) -> Array:
            return (x @ weights[name].T).reshape(len(x), heads, -1).transpose(1, 0, 2)

        for layer in range(config.num_layers):
            at = f"model.layers.{layer}."
            h = _norm(x, weights[at + "input_layernorm.weight"], config.rms_norm_eps)
            q = rotate(project(h, at + "self_attn.q_proj.weight", config.num_heads))
            k = rotate(project(h, at + "self_attn.k_proj.weight", config.num_kv_heads))
            v = project(h, at + "self_attn.v_proj.weight", config.num_kv_heads)
            new["k_new"].append(k)
            new["v_new"].append(v)
            keys = np.concatenate([inputs[f"k_{layer}"][0], k], axis=1)
            values = np.concatenate([inputs[f"v_{layer}"][0], v], axis=1)
            keys = keys.repeat(config.group_size, axis=0)
            scores = q @ keys.swapaxes(1, 2) / np.sqrt(config.head_dim) + mask
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = scores @ values.repeat(config.group_size, axis=0)
            mixed = mixed.transpose(1, 0, 2).reshape(len(x), -1)
            x = x + mixed @ weights[at + "self_attn.o_proj.weight"].T
            h = _norm(x, weights[at + "post_attention_layernorm.weight"], config.rms_norm_eps)
            gate = h @ weights[at + "mlp.gate_proj.weight"].T
            up = h @ weights[at + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        logits = _norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T
        outputs = {name: np.stack(layers) for name, layers in new.items()}
        outputs |= head_outputs(logits)
        return {name: array.astype(np.float32) for name, array in outputs.items()}


def head_outputs(logits: Array) -> dict[str, Array]:
    """logits_i, chunk_max_i, chunk_sum_i for logits (T, vocab), padded with -1e4."""
    parts = head_partition(logits.shape[1])
    padded = np.pad(logits, ((0, 0), (0, sum(parts) - logits.shape[1])), constant_values=-1e4)
    outputs: dict[str, Array] = {}
    for index, part in enumerate(np.split(padded, np.cumsum(parts)[:-1], axis=1)):
        chunks = part.reshape(len(part), -1, 128)
        largest = chunks.max(axis=2)
        sums = np.exp(chunks - largest[:, :, None]).sum(axis=2)
        outputs[f"logits_{index}"] = part.T[None, :, None]
        outputs[f"chunk_max_{index}"] = largest.T[None, :, None]
        outputs[f"chunk_sum_{index}"] = sums.T[None, :, None]
    return outputs


def numpy_drafter(
    model: tiny.TinyModel, row_counts: Sequence[int] = (1, 4, 8), contexts: Sequence[int] = (64,)
) -> tuple[CoreMLDrafter, NumpyRuntime]:
    """The product's unit on a NumpyRuntime."""
    config = model.config
    runtime = NumpyRuntime(model, row_counts, contexts)
    functions = [
        FunctionShape(
            name=shape.name,
            rows=shape.rows,
            context=shape.context,
            inputs={name: list(size) for name, size in shape.inputs().items()},
            outputs={name: list(size) for name, size in shape.outputs().items()},
        )
        for shape in runtime.shapes
    ]
    manifest = DrafterManifest(
        family=config.family,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rope=RopeManifest(theta=config.rope_theta),
        layers=list(range(config.num_layers)),
        row_counts=list(row_counts),
        context_sizes=list(contexts),
        functions=functions,
        logit_rows=head_partition(config.vocab_size),
        embedding_in="verifier",
        embedding_tensor="model.embed_tokens.weight",
        embedding_sha256="",
        compression="none",
        weights_sha256="",
        ops_sha256="",
        tokenizer_sha256="",
        sources=[],
        converter_version="0",
    )
    embedding = Embedding(model.tensors["model.embed_tokens.weight"], is_bfloat16=False)
    return CoreMLDrafter(LoadedDrafter(manifest, embedding, runtime)), runtime


def in_order_logits(model: tiny.TinyModel, tokens: Sequence[int], windows: Sequence[int]) -> Array:
    """Logits after the last of `tokens`, (vocab,); token i sees tokens 0 to 3 and windows[i] to i.

    Embedding, cosines and sines are rounded to fp16, as the host hands them over.
    """
    config, weights = model.config, {n: t.astype(np.float64) for n, t in model.tensors.items()}
    index = np.arange(len(tokens))
    first = np.asarray(windows)[:, None]
    visible = (index <= index[:, None]) & ((index < 4) | (index >= first))
    frequencies = config.rope_theta ** (-np.arange(config.head_dim // 2) * 2 / config.head_dim)
    angles = np.outer(index, frequencies)
    turn = np.cos(angles).astype(np.float16) + 1j * np.sin(angles).astype(np.float16)

    def rotate(x: Array) -> Array:
        half = x.shape[1] // 2
        turned = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    x = weights["model.embed_tokens.weight"][list(tokens)].astype(np.float16).astype(np.float64)
    for layer in range(config.num_layers):
        own = {n.split(".", 3)[3]: t for n, t in weights.items() if f"layers.{layer}." in n}
        h = _norm(x, own["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (h @ own[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = []
        for head in range(config.num_heads):
            mine, group = (
                slice(i * config.head_dim, (i + 1) * config.head_dim)
                for i in (head, head // config.group_size)
            )
            scores = rotate(q[:, mine]) @ rotate(k[:, group]).T / np.sqrt(config.head_dim)
            scores = np.where(visible, np.exp(scores - scores.max()), 0)
            mixed.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(mixed, axis=1) @ own["self_attn.o_proj.weight"].T
        h = _norm(x, own["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = h @ own["mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (h @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
    head_matrix = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits: Array = _norm(x[-1:], weights["model.norm.weight"], config.rms_norm_eps) @ head_matrix.T
    return logits[0]


def log_softmax(logits: Array) -> Array:
    """Of one row, in the dtype given."""
    shifted = logits - logits.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def _norm(x: Array, gain: Array, eps: float) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * gain
    return result


def _specs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
