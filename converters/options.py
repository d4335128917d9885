"""How a drafter is exported."""

from __future__ import annotations

from dataclasses import dataclass, field

from ondevice.converters.compression import Compression
from ondevice.errors import BadRequest
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_graph import DrafterFunction

CONTEXT_MULTIPLE = 32
"""Slots; a cache's last axes must be multiples of 32 on the Neural Engine (coremltools 2631)."""


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """How a drafter is exported: rows a step, slots of the cache, and how weights are stored."""

    row_counts: tuple[int, ...] = (1, 8, 64)
    context_sizes: tuple[int, ...] = (512, 2048)
    compression: Compression = field(default_factory=Compression)

    def check(self) -> None:
        """Raise BadRequest for sizes that no package can have."""
        counts, sizes = self.row_counts, self.context_sizes
        if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
            raise BadRequest(
                f"drafter row counts: expected different counts from 1 on, got {list(counts)}"
            )
        wrong = [size for size in sizes if size < 1 or size % CONTEXT_MULTIPLE]
        if not sizes or wrong or len(set(sizes)) < len(sizes):
            raise BadRequest(
                f"drafter context sizes: expected different multiples of {CONTEXT_MULTIPLE}, "
                f"got {list(sizes)}"
            )

    def functions(self, config: ModelConfig) -> list[DrafterFunction]:
        """The functions of a package, in order."""
        return [
            DrafterFunction(config, rows, context)
            for rows in self.row_counts
            for context in self.context_sizes
        ]
