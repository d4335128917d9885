"""How much memory a pair takes on a Mac, estimated from its sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.artifact import MemoryEstimate
from ondevice.coreml.package import Package, weights_file
from ondevice.models.config import ModelConfig

_CACHE_BYTES = 2  # of a key or value: half precision in the drafter, 16 bits in MLX

MAC_SIZES_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""Memory that Macs are sold with."""

GPU_SHARE = 2 / 3
"""Of a Mac's memory that the GPU may keep for itself: about two thirds up to 36 GB, three quarters
above (Metal's recommendedMaxWorkingSetSize)."""


def cache_per_token(config: ModelConfig) -> int:
    """Bytes of keys and values that every token of text adds."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _CACHE_BYTES


def drafter_memory(
    config: ModelConfig, package: Package, contexts: Sequence[int]
) -> MemoryEstimate:
    """Weights as stored, and the slots of the largest context."""
    weights = weights_file(package.path)
    per_token = cache_per_token(config)
    return MemoryEstimate(
        weights=weights.stat().st_size if weights.is_file() else 0,
        cache_per_token=per_token,
        cache=per_token * max(contexts),
    )


def smallest_mac_gb(needed_bytes: int) -> int | None:
    """The smallest Mac whose GPU share holds `needed_bytes`; None when there is none."""
    return next((size for size in MAC_SIZES_GB if size * 1e9 * GPU_SHARE >= needed_bytes), None)
