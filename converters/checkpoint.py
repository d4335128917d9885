"""A source model, whatever its file format: configuration, tensors read one at a time, tokenizer.

Tensors carry Hugging Face's names and layouts of their family (`model.layers.0.self_attn.q_proj
.weight`, rows are outputs), also when they come from a GGUF file; matrices that a family stores
fused have the names of their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.artifact import SourceFile, file_sha256
from ondevice.errors import BadCheckpoint, UnsupportedModel
from ondevice.models.config import ModelConfig
from ondevice.models.family import FAMILIES, MATRICES

if TYPE_CHECKING:
    import mlx.core as mx
    from transformers import PreTrainedTokenizerFast

# Tables that old checkpoints carry and that follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


class TensorStore(Protocol):
    """Where a checkpoint's tensors lie; names and shapes are known without reading any."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the files, by canonical name."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor `name`, widened to float32, owned by the caller."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A readable source model. Nothing large is read before it is asked for.

    `eos_token_ids` end a text; the first is the tokenizer's own. `label` names the source in
    messages.
    """

    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    label: str
    store: TensorStore
    files: tuple[Path, ...]
    load_tokenizer: Callable[[], PreTrainedTokenizerFast]

    def names(self) -> list[str]:
        """Canonical tensor names; `lm_head.weight` only when the head is not the embedding."""
        return list(tensor_shapes(self.config))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`; KeyError when the model has none of that name."""
        return tensor_shapes(self.config)[name]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read the tensor `name` as float32; BadCheckpoint when it cannot be, or is not finite."""
        if name not in tensor_shapes(self.config):
            raise KeyError(name)
        values = self.store.read(name)
        if not np.isfinite(values).all():
            raise nonfinite(name, self.label)
        return values

    @cached_property
    def sources(self) -> list[SourceFile]:
        """The files that the model was read from, with their sha256 (reads them once)."""
        return [SourceFile(name=file.name, sha256=file_sha256(file)) for file in self.files]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, chat template included; BadCheckpoint when it does not fit the model."""
        tokenizer = self.load_tokenizer()
        if len(tokenizer) > self.config.vocab_size:
            raise BadCheckpoint(
                f"{self.label}: expected a tokenizer of at most {self.config.vocab_size} tokens "
                f"(the model's vocabulary), got {len(tokenizer)}; take tokenizer and weights "
                "from the same release"
            )
        return tokenizer

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Identity of what token ids mean; equal for a GGUF and the folder exported from it."""
        from ondevice.converters.tokenizer import tokenizer_digest

        return tokenizer_digest(self.tokenizer)


def nonfinite(name: str, label: str) -> BadCheckpoint:
    """The error for a weight that is NaN or infinite."""
    return BadCheckpoint(
        f"{label}: tensor {name}: expected finite weights, got NaN or infinity; "
        "download the model again"
    )


def refuse_nonfinite(name: str, array: mx.array, label: str) -> None:
    """BadCheckpoint, naming the tensor, when a float `array` holds NaN or infinity."""
    import mlx.core as mx

    if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
        raise nonfinite(name, label)


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a Hugging Face folder or a .gguf file.

    Raises BadCheckpoint when files are missing, truncated or inconsistent, UnsupportedModel when
    the model is of a family, or uses a feature or tensor type, that is not supported.
    """
    try:
        checkpoint = _open(source)
    except OSError as error:
        raise BadCheckpoint(
            f"{source}: expected a model that can be read, got {error.strerror or error}; "
            "check its permissions"
        ) from error
    check_sizes(checkpoint.config, checkpoint.label)
    check_tensors(checkpoint.config, checkpoint.store.shapes(), checkpoint.label)
    _check_tying(checkpoint)
    return checkpoint


def _check_tying(checkpoint: Checkpoint) -> None:
    """BadCheckpoint for a head of its own in a model whose head is said to be the embedding."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if checkpoint.config.tied_embeddings and names[0] in checkpoint.store.shapes():
        head, embedding = (checkpoint.store.read(name) for name in names)
        if not np.array_equal(head, embedding):
            raise BadCheckpoint(
                f"{checkpoint.label}: the configuration says tie_word_embeddings true, but "
                "lm_head.weight differs from the embedding; configuration and weights are not of "
                "the same model"
            )


def _open(source: Path) -> Checkpoint:
    if source.is_dir():
        from ondevice.converters.huggingface import open_folder

        return open_folder(source)
    if source.is_file():
        from ondevice.converters.gguf import open_gguf

        return open_gguf(source)
    raise BadCheckpoint(
        f"no model at {source}: expected a Hugging Face folder or a .gguf file; check the path"
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model of this configuration, in the order of the forward pass."""
    hidden = config.hidden_size
    layer = _layer_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each matrix of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "query": (queries, hidden),
        "key": (keys, hidden),
        "value": (keys, hidden),
        "output": (hidden, queries),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    traits, shapes = config.traits, matrix_shapes(config)
    layer: dict[str, tuple[int, ...]] = {}

    def add(*names: str) -> None:
        for name in names:
            layer[f"{MATRICES[name]}.weight"] = shapes[name]
            if name in config.biases:
                layer[f"{MATRICES[name]}.bias"] = shapes[name][:1]

    norms = [f"{name}.weight" for name in traits.norms.values()]
    layer[norms[0]] = (config.hidden_size,)
    add("query", "key", "value", "output")
    if traits.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    layer |= {name: (config.hidden_size,) for name in norms[1:]}
    add("gate", "up", "down")
    return layer


def check_sizes(config: ModelConfig, label: str) -> None:
    """BadCheckpoint unless the configuration's sizes can make a model at all."""
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise BadCheckpoint(
            f"{label}: expected query heads to be a multiple of key/value heads, got "
            f"{config.num_heads} and {config.num_kv_heads}; the configuration is damaged"
        )
    rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if config.head_dim < 2 or config.head_dim % 2 or rotated % 2 or rotated > config.head_dim:
        raise BadCheckpoint(
            f"{label}: expected an even head size, got {config.head_dim}, {rotated} rotated; "
            "the configuration is damaged"
        )


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], label: str) -> None:
    """BadCheckpoint for a missing or misshapen tensor, UnsupportedModel for one too many."""
    expected = tensor_shapes(config)
    if not config.tied_embeddings and "lm_head.weight" not in found:
        raise BadCheckpoint(
            f"{label}: the configuration says tie_word_embeddings false, but the weights have no "
            "lm_head.weight; configuration and weights are not of the same model"
        )
    for name, shape in expected.items():
        if name not in found:
            raise BadCheckpoint(
                f"{label}: expected tensor {name}, got no such tensor; download the model again"
            )
        if found[name] != shape:
            raise BadCheckpoint(
                f"{label}: tensor {name}: expected shape {list(shape)}, got {list(found[name])}; "
                "configuration and weights are not of the same model"
            )
    for name in found:
        redundant_head = name == "lm_head.weight" and config.tied_embeddings
        if name not in expected and not redundant_head and not name.endswith(_DERIVED_SUFFIXES):
            raise UnsupportedModel(
                f"{label}: tensor {name} has no place in a {config.family} model (supported "
                f"families: {', '.join(FAMILIES)}); merge or remove it"
            )
