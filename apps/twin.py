"""A Core ML drafter as an mlx-lm model: what mlx-lm's own speculative decoding drafts with."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ondevice.artifact import (
    DRAFTER_EMBEDDING,
    DRAFTER_FILE,
    DRAFTER_PACKAGE,
    VERIFIER_FILE,
    DrafterManifest,
    VerifierManifest,
)
from ondevice.converters.parity import stored_model
from ondevice.coreml.package import Function, Package
from ondevice.drafter import rotary_settings
from ondevice.embeddings import Embedding
from ondevice.errors import UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.family import FAMILIES
from ondevice.verifierfolder import weight_files

_NEVER = -1e4  # a logit that any row's beats, and that every precision holds


def mlx_twin(folder: Path, verifier_folder: Path) -> Module:
    """The drafter in `folder` as mlx-lm's Llama, with the weights that its package stores.

    They are in the verifier's precision. The package is the source, not the checkpoint that it was
    made from: so a trained drafter has its twin too. Raises UnsupportedModel for a drafter that is
    no plain Llama (compressed weights), ArtifactError for damaged files.
    """
    manifest = DrafterManifest.read(folder / DRAFTER_FILE)
    verifier = VerifierManifest.read(verifier_folder / VERIFIER_FILE)
    if manifest.compression != "fp16":
        raise UnsupportedModel(f"the drafter's weights are stored as {manifest.compression}")
    files = weight_files(verifier_folder, verifier)
    if manifest.embedding_in == "drafter":
        files = [folder / DRAFTER_EMBEDDING]
    embedding = Embedding.open(files, manifest.embedding_tensor, manifest.embedding_sha256)
    package = Package.open(folder / DRAFTER_PACKAGE)
    config = _config(manifest, next(iter(package.functions.values())), verifier.context)
    rows = mx.array(embedding.rows(range(manifest.vocab_size)), mx.float32)
    model: Module = stored_model(package, config, np.array(rows[: manifest.head_rows]))
    model.model.embed_tokens.weight = rows
    if manifest.row_to_token is not None:
        model.lm_head = _SomeTokens(model.lm_head.weight, manifest.row_to_token, len(rows))
    model.set_dtype(getattr(mx, verifier.dtype))
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]  # mlx has no types there
    return model


class _SomeTokens(Module):
    """A head that gives logits for the whole vocabulary; tokens without a row never win."""

    def __init__(self, weight: mx.array, row_to_token: list[int], vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx has no types there
        self.weight = weight
        rows = np.full(vocab_size, len(row_to_token), np.int32)
        rows[row_to_token] = np.arange(len(row_to_token))
        self._rows = mx.array(rows)

    def __call__(self, x: mx.array) -> mx.array:
        logits = x @ self.weight.T
        nothing = mx.full((*logits.shape[:-1], 1), _NEVER, logits.dtype)
        return mx.concatenate([logits, nothing], axis=-1)[..., self._rows]


def _config(manifest: DrafterManifest, function: Function, context: int) -> ModelConfig:
    """What the manifest and the package say of the network; `context` is the verifier's."""
    rotary = rotary_settings(manifest.rope, manifest.head_dim)
    return ModelConfig(
        family=manifest.family,
        vocab_size=manifest.head_rows,
        hidden_size=manifest.hidden_size,
        intermediate_size=function.constants["layer0_mlp_gate_weight"].type.shape[0],
        num_layers=manifest.num_layers,
        num_heads=manifest.num_heads,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        context=context,
        rms_norm_eps=_norm_epsilon(function, manifest.family),
        rope_theta=rotary.rope_theta,
        rope_scaling=rotary.rope_scaling,
        tied_embeddings=False,
        layer_kinds=tuple(manifest.layer_kinds),
        window=manifest.window,
        local_rope_theta=None if manifest.local_rope is None else manifest.local_rope.theta,
        rotary_dim=rotary.rotary_dim,
        query_scale=manifest.query_scale,
        biases=tuple(manifest.biases),
    )


def _norm_epsilon(function: Function, family: str) -> float:
    """The eps of its norms, for a residual stream that is not scaled; rounded as it is stored."""
    norm = next(op for op in function.ops if op.type == "layer_norm")
    (argument,) = norm.inputs["epsilon"]
    constant = function.constants[argument] if isinstance(argument, str) else argument
    return float(np.asarray(constant.read())) / FAMILIES[family].residual_scale ** 2
