"""What a decoder looks like: sizes, norms, rotary embedding; independent of any framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later (Hugging Face `rope_type` "llama3").

    Wavelengths longer than `original_context / low_freq_factor` are stretched by `factor`, those
    shorter than `original_context / high_freq_factor` are kept, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer, as the checkpoint states them.

    `context` is in tokens. `rope_scaling` is None for plain RoPE. Immutable: `with_layers` gives
    the same model at another depth.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (GQA)."""
        return self.num_heads // self.num_kv_heads

    def with_layers(self, num_layers: int) -> Self:
        """The same model with `num_layers` layers."""
        return replace(self, num_layers=num_layers)
