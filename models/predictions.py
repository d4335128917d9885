"""What a step would cost on a Mac that is not here: a prediction from bytes, not a measurement.

Decoding reads every weight once a step, so a step takes at least its bytes over the bandwidth. Rows
beyond the first cost nothing until their arithmetic takes longer than the reading. With 4-bit
weights that is soon, at three to five rows (mlx issues 3839 and 3852, mlx PRs 3791 and 3863), since
few bytes carry many products and each must be unpacked; with 16-bit weights past ten. At a number
of rows that depends on the chip MLX goes over to kernels that pad to 32 rows: a cliff, then flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from ondevice.errors import BadRequest
from ondevice.models.devices import Catalogue, Device, Network, catalogue

# Launches of a layer's kernels, which bandwidth does not explain: on an M4 Pro MLX decodes
# Qwen2.5-0.5B 4-bit in 2.27 ms, Qwen2.5-1.5B 4-bit in 4.67 (lykuroai/engine v1.0.4), Qwen3-0.6B
# 8-bit in 3.52 (vllm-mlx issue 531); at 0.80 of 273 GB/s that leaves 0.04, 0.025, 0.022 a layer.
LAUNCH_MS_PER_LAYER = 0.03
# Cost of another row's attention over the cache, relative to the first row's: rows share weights
# but each reads keys and values again (vllm-metal issue 465). mlx-dspark: a round of width 8 grows
# by 140 ms from 2k to 32k tokens; 0.8 if that was a model with 147 kB a token on an M4 Pro.
KV_SHARE_OF_A_ROW = 0.8
# 16-bit weights: MLX has a vector kernel for up to 15 rows from M3 on (mlx PR 3888), before that
# for one. Its matrix kernel takes 1.4 to 2.2 times as long as reading once (ibid.; 2.0 in mlx issue
# 4265, 1.4 on an M1 Pro in mlx issue 3967).
DENSE_VECTOR_ROWS = 15
DENSE_VECTOR_GENERATION = 3
DENSE_TILE_STREAM = 1.8
TILE_ROWS = 32
# Palettes stream at less than the bandwidth of fp16 weights: 98 of 120 GB/s on M4 Max (anemll-bench
# issue 1), 76 and 92 of 126 on M4 Pro (mlx-ane-sd, DFlash drafter and LM head in 6 bits).
PALETTE_STREAM = 0.75
# A Core ML call beyond the engine's own dispatch: two chunks fewer saved 0.8 ms (CoreML-LLM,
# CHUNK_CONSOLIDATION_BENCH). Python's coremltools adds 1.0 to 2.7 ms more (mlx-ane-sd), which is
# not in here: the product's own runtime does not use it.
COREML_CALL_MS = 0.4
# Another row of a drafter step: 4 % for 8 rows (larql PR 312), 5 % for 5 (ANEForge).
ANE_SHARE_OF_A_ROW = 0.006
# Part of the memory's bandwidth that all units together reach: 0.89 by the Neural Engine alone on
# M1 (anemll-bench), 0.87 to 0.89 by both (larql PR 312, if its machine has 400 GB/s).
MEMORY_REACH = 0.9


@dataclass(frozen=True, slots=True)
class PairBytes:
    """What a pair moves and computes in a step.

    verifier_bytes: weights that a forward reads, the head included, an embedding that is only
    looked up not. verifier_weights: how many weights those are (two operations each a row).
    kv_bytes_per_token: keys and values of a token in the layers that see the whole context;
    local_kv_bytes_per_token: in those that keep `window` tokens. The same for the drafter, whose
    step reads all of its function's `drafter_slots`. Raises BadRequest on sizes below zero, and on
    pairs without weights.
    """

    verifier_bytes: float
    verifier_weights: float
    verifier_quantized: bool
    verifier_layers: int
    kv_bytes_per_token: float
    drafter_bytes: float
    drafter_weights: float
    drafter_palettized: bool
    drafter_kv_bytes_per_token: float
    drafter_slots: int
    local_kv_bytes_per_token: float = 0.0
    window: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise BadRequest(f"{field.name} is {value}: expected a size of 0 or more")
        for name in ("verifier_bytes", "verifier_weights", "drafter_bytes", "drafter_weights"):
            if getattr(self, name) == 0:
                raise BadRequest(f"{name} is 0: expected the size of a model")

    def kv_bytes(self, context: int) -> float:
        """Keys and values that one row of a verifier step reads, `context` tokens in the cache."""
        local = self.local_kv_bytes_per_token * min(context, self.window)
        return self.kv_bytes_per_token * context + local


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Predicted step costs of `pair` on `device`; nothing in here was measured on any machine.

    verify_slowdown, draft_slowdown: time of a step while the other unit works over its time alone.
    estimated: the device's figures that are themselves estimates.
    """

    device: Device
    pair: PairBytes
    verify_slowdown: float
    draft_slowdown: float
    estimated: tuple[str, ...]
    row_counts: tuple[int, ...] = (1, 8, 64)
    prediction: Literal[True] = True

    def verify_ms(self, rows: int, context: int) -> float:
        """A verifier step of `rows` rows with `context` tokens in the cache, alone, in ms.

        products + keys and values + launches. Where vector kernels are used, products take
        max(bytes / (bandwidth x efficiency), rows x 2 x weights / gpu_vector_tflops); beyond, a
        matrix kernel's max(reading, padded rows x 2 x weights / gpu_tile_tflops). Raises BadRequest
        on fewer rows than 1 or a context below 0.
        """
        if rows < 1 or context < 0:
            raise BadRequest(f"{rows} rows, context {context}: expected at least 1 and 0")
        attention = _ms(self.pair.kv_bytes(context), self._gpu_gb_s)
        attention *= 1 + KV_SHARE_OF_A_ROW * (rows - 1)
        return self._products_ms(rows) + attention + LAUNCH_MS_PER_LAYER * self.pair.verifier_layers

    def draft_ms(self, rows: int) -> float:
        """A drafter step of up to `rows` rows, alone, in ms.

        Rows are padded to the next of `row_counts`. max(bytes / bandwidth, padded rows x 2 x
        weights / ane_tflops) + dispatch; bytes are weights and all cache slots. Raises BadRequest
        below 1 row and above the largest count.
        """
        padded = min((count for count in self.row_counts if count >= rows), default=0)
        if rows < 1 or padded == 0:
            raise BadRequest(f"{rows} rows: expected 1 to {max(self.row_counts)}")
        device, pair = self.device, self.pair
        bandwidth = device.ane_bandwidth_gb_s.value
        weights_gb_s = bandwidth * (PALETTE_STREAM if pair.drafter_palettized else 1.0)
        stream = _ms(pair.drafter_bytes, weights_gb_s) + _ms(_slot_bytes(pair), bandwidth)
        stream *= 1 + ANE_SHARE_OF_A_ROW * (padded - 1)
        arithmetic = _arithmetic_ms(padded, pair.drafter_weights, device.ane_tflops.value)
        return max(stream, arithmetic) + device.ane_dispatch_ms.value + COREML_CALL_MS

    @property
    def _gpu_gb_s(self) -> float:
        return self.device.gpu_bandwidth_gb_s.value * self.device.gpu_efficiency.value

    def _products_ms(self, rows: int) -> float:
        """Products with the weights; few rows are padded to a matrix kernel's where cheaper."""
        limit = self._vector_rows
        if rows > limit:
            return self._tile_ms(rows)
        arithmetic = _arithmetic_ms(
            rows, self.pair.verifier_weights, self.device.gpu_vector_tflops.value
        )
        stream = _ms(self.pair.verifier_bytes, self._gpu_gb_s)
        return min(max(stream, arithmetic), max(stream, self._tile_ms(limit + 1)))

    @property
    def _vector_rows(self) -> int:
        if self.pair.verifier_quantized:
            return int(self.device.gpu_vector_rows.value)
        return DENSE_VECTOR_ROWS if self.device.generation >= DENSE_VECTOR_GENERATION else 1

    def _tile_ms(self, rows: int) -> float:
        stream = _ms(self.pair.verifier_bytes, self._gpu_gb_s)
        if not self.pair.verifier_quantized:
            stream *= DENSE_TILE_STREAM
        padded = math.ceil(rows / TILE_ROWS) * TILE_ROWS
        return max(
            stream,
            _arithmetic_ms(padded, self.pair.verifier_weights, self.device.gpu_tile_tflops.value),
        )


def predict(
    device: Device, pair: PairBytes, busy_rows: int = 8, busy_context: int = 512
) -> PredictedCosts:
    """Predict what steps of `pair` cost on `device`.

    The slow-downs are those of verifier steps of `busy_rows` rows at `busy_context` tokens beside
    drafter steps of 8: the bytes both units ask for each ms, over what the memory gives, where they
    ask for more; at least the device's own figure for the GPU. Raises what `verify_ms` raises.
    """
    costs = PredictedCosts(
        device=device,
        pair=pair,
        verify_slowdown=1.0,
        draft_slowdown=1.0,
        estimated=tuple(
            name for name, figure in device.figures().items() if figure.kind == "estimated"
        ),
    )
    verifier = pair.verifier_bytes + pair.kv_bytes(busy_context)
    drafter = pair.drafter_bytes + _slot_bytes(pair)
    asked_gb_s = 1e-6 * (
        verifier / costs.verify_ms(busy_rows, busy_context) + drafter / costs.draft_ms(8)
    )
    contention = max(1.0, asked_gb_s / (MEMORY_REACH * device.gpu_bandwidth_gb_s.value))
    return PredictedCosts(
        device=device,
        pair=pair,
        verify_slowdown=max(contention, device.gpu_slowdown_beside_ane.value),
        draft_slowdown=contention,
        estimated=costs.estimated,
    )


def pair_bytes(name: str, source: Catalogue | None = None) -> PairBytes:
    """The bytes of workload `name`, of the package's catalogue unless another is given.

    Weights times their stored bits; see `Workload`. Raises BadRequest for an unknown name.
    """
    source = source or catalogue()
    workload = source.workload(name)
    verifier, drafter = source.networks[workload.verifier], source.networks[workload.drafter]
    weights = verifier.layer_weights + verifier.head_weights
    per_layer = verifier.kv_bytes_per_layer
    return PairBytes(
        verifier_bytes=weights * workload.verifier_bits / 8,
        verifier_weights=weights,
        verifier_quantized=workload.verifier_bits < 16,
        verifier_layers=verifier.num_layers,
        kv_bytes_per_token=per_layer * (verifier.num_layers - verifier.local_layers),
        local_kv_bytes_per_token=per_layer * verifier.local_layers,
        window=verifier.window,
        drafter_bytes=_drafter_bytes(drafter, workload.drafter_bits, workload.drafter_head_bits),
        drafter_weights=drafter.layer_weights + drafter.head_weights,
        drafter_palettized=workload.drafter_bits < 16,
        drafter_kv_bytes_per_token=drafter.kv_bytes_per_layer * drafter.num_layers,
        drafter_slots=workload.drafter_slots,
    )


def _drafter_bytes(network: Network, bits: float, head_bits: float) -> float:
    return (network.layer_weights * bits + network.head_weights * head_bits) / 8


def _slot_bytes(pair: PairBytes) -> float:
    return pair.drafter_kv_bytes_per_token * pair.drafter_slots


def _ms(size_bytes: float, gb_s: float) -> float:
    return size_bytes / gb_s * 1e-6


def _arithmetic_ms(rows: int, weights: float, tflops: float) -> float:
    return 2 * rows * weights / tflops * 1e-9
