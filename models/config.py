"""What a decoder looks like: sizes, norms, rotary embedding; independent of any framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from ondevice.models.family import FAMILIES, Family
from ondevice.models.rope import RopeScaling, RotarySettings

LayerKind = Literal["global", "local", "unrotated"]
"""What a layer's attention sees and how it turns keys: everything; a window of the newest tokens,
with its own RoPE; everything without RoPE (NoPE)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer, as the checkpoint states them.

    family: a key of FAMILIES, which says what the layers do. context: in tokens. rope_scaling: None
    for plain RoPE. layer_kinds: one a layer, () when all are global. window: tokens that a local
    layer sees, itself included; local_rope_theta: base of its RoPE. rotary_dim: the first
    dimensions of a head that are rotated, None for all. query_scale: factor on the scores, None for
    1/sqrt(head_dim). biases: matrices of a layer that have one. Immutable: `selected` and
    `with_layers` give the same model with other layers.
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
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    layer_kinds: tuple[LayerKind, ...] = ()
    window: int | None = None
    local_rope_theta: float | None = None
    rotary_dim: int | None = None
    query_scale: float | None = None
    biases: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (GQA)."""
        return self.num_heads // self.num_kv_heads

    @property
    def traits(self) -> Family:
        """What the family's layers do otherwise than Llama's."""
        return FAMILIES[self.family]

    @property
    def has_local_layers(self) -> bool:
        """Whether any layer sees a window only."""
        return "local" in self.layer_kinds

    @property
    def score_scale(self) -> float:
        """Factor on the product of a query and a key."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def rotary(self) -> RotarySettings:
        """RoPE of the global layers."""
        return RotarySettings(self.head_dim, self.rope_theta, self.rope_scaling, self.rotary_dim)

    @property
    def local_rotary(self) -> RotarySettings:
        """RoPE of the local layers: never scaled."""
        theta = self.rope_theta if self.local_rope_theta is None else self.local_rope_theta
        return RotarySettings(self.head_dim, theta, None, self.rotary_dim)

    def kind(self, layer: int) -> LayerKind:
        """What layer `layer` does."""
        return self.layer_kinds[layer] if self.layer_kinds else "global"

    def selected(self, layers: Sequence[int]) -> Self:
        """The same model with `layers` of its layers, in that order."""
        kinds = tuple(self.kind(layer) for layer in layers)
        plain = all(kind == "global" for kind in kinds)
        return replace(self, num_layers=len(layers), layer_kinds=() if plain else kinds)

    def with_layers(self, num_layers: int) -> Self:
        """The same model with its first `num_layers` layers."""
        return self.selected(range(num_layers))
