"""What the Neural Engine takes, as far as is known without asking one: limits and their sources.

The lint (`ondevice.coreml.lint`) names what breaks them; the drafter graph is built inside them.
"""

from __future__ import annotations

ANE_MAX_AXIS = 16_384
"""Longest axis on A13 to A15 class engines, M1 to M3; 65,536 from A16 and M4 on (ANEMLL
llama_model.py, coreai-model-zoo ane-silicon-reference). A head has more rows and is split."""

ANE_MAX_RANK = 5
"""ANEForge op-quirks, Apple's neural_engine_rules."""

ANE_ROW_BYTES = 64
"""A last axis is padded to so many bytes (Apple's neural_engine_rules)."""

RELIABLE_WEIGHT_BYTES = 1_000_000_000
"""Of one program; about 2 GB are the end (CoreML-LLM DECODE_STATE_LAYOUTS, ANEMLL chunks)."""

RELIABLE_STATES = 1
"""Two fail on some systems, three or more on all (CoreML-LLM MLSTATE_PATTERN)."""

STATE_MULTIPLE = 32
"""Of a state's last axes (coremltools issue 2631)."""

ATTENTION_ELEMENTS = 2_000_000
"""Of queries, below which the attention op runs on the CPU (Vx issue 437)."""

SMALLEST_EPSILON = 1e-6
"""Smaller ones are stored as a subnormal half, or as 0."""

MASKED = -1e4
"""Additive mask: -inf makes NaN in a softmax whose row is all masked (coremltools PR 2669). It
hides a score up to 9,890 above the best visible one (exp is 0 from -104 on, in fp16 from -17)."""

FP16_MAX = 65_504.0
SMALLEST_HALF = 2.0**-24

SLICE_MAX = 4_094
"""Larger values saturate in a slice of the last axis after its start, on M1 and M2 (ANEForge
numeric-cliffs)."""
