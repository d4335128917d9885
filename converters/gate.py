"""The parity gate: every function of a package against mlx-lm, before it is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.artifact import FunctionParity, ParityResult
from ondevice.converters.compression import Compression
from ondevice.converters.network import Network
from ondevice.converters.parity import (
    Array,
    Replay,
    Single,
    TokenTree,
    path_logits,
    selected_model,
    stored_model,
)
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package
from ondevice.errors import RuntimeFailure
from ondevice.models.drafter_graph import DrafterFunction

MAX_ERROR_ROUNDED = 1e-3
"""In logits; measured 8e-5 with three layers of SmolLM2, whose largest logit there is 70."""

MAX_ERROR_UNROUNDED = 0.25
"""Rounding grows with depth and logits (SmolLM2: three layers 0.022, nine 0.055); a wrong matrix is
off by whole units."""

MAX_SHARE_COMPRESSED = 0.5
"""Of the logits' standard deviation: how far a compressed package may be from the checkpoint in the
mean square, by far more than LUT4 is and far less than a wrong matrix."""

MIN_AGREEMENT_FP16 = 0.9
"""Of some 80 positions with random tokens; the 98 % of the tests are of 500 with real text."""

LARGE_WEIGHTS = 500_000_000
"""Weights of a package from which on the emulator unpacks each at every use: 2 GB in float32."""

_SINGLE_STEPS, _SINGLE_STEPS_LARGE = 6, 2  # of one row; each unpacks a large package's weights

_TOP = 8


def check_parity(
    package: Package,
    network: Network,
    embedding: Array,
    functions: Sequence[DrafterFunction],
    compression: Compression | None = None,
) -> ParityResult:
    """Run every function of the package against mlx-lm; takes seconds for a small model.

    `embedding` (vocab, D) holds the rows that the host will look up; a drafter with fewer output
    rows is tried on its first ones. Raises RuntimeFailure when the package does not compute its
    model.
    """
    config = functions[0].config
    embedding = embedding[: config.vocab_size]
    row_counts = sorted({function.rows for function in functions})
    contexts = sorted({function.context for function in functions})
    keep = _weight_count(package) < LARGE_WEIGHTS
    single = _SINGLE_STEPS if keep else _SINGLE_STEPS_LARGE
    steps = _step_sizes(row_counts, contexts[0], single)
    tree = TokenTree.random(config.vocab_size, steps, seed=0)

    def logits_of(precision: str) -> Single:
        runtime = Emulator(package, "fp32" if precision == "fp32" else "fp16", keep)
        replays = (Replay(runtime, config, context, embedding) for context in contexts)
        return np.stack([replay.logits(tree, row_counts) for replay in replays])

    exact, half = logits_of("fp32"), logits_of("fp16")
    rounded = path_logits(stored_model(package, config, embedding, narrow=True), tree)
    original = selected_model(network.tensors, network.source, network.places, narrow=True)
    unrounded = path_logits(original, tree)
    compared = _Compared(exact, half, rounded, unrounded)
    result = ParityResult(
        positions=len(tree.tokens) * len(contexts),
        max_error_rounded=float(np.abs(exact - rounded).max()),
        max_error_unrounded=float(np.abs(exact - unrounded).max()),
        first_choice_agreement_fp16=_agreement(half, rounded),
        first_choice_agreement=_agreement(exact, unrounded),
        functions=compared.by_function(tree, row_counts, contexts),
    )
    _refuse_unless_equal(result, compared, compression or Compression())
    return result


@dataclass(frozen=True, slots=True)
class _Compared:
    """Logits of the package, (contexts, nodes, vocab), and of mlx-lm, (nodes, vocab)."""

    exact: Single
    half: Single
    rounded: Single
    unrounded: Single

    def by_function(
        self, tree: TokenTree, row_counts: Sequence[int], contexts: Sequence[int]
    ) -> dict[str, FunctionParity]:
        """What the steps of each function gave."""
        rows = np.repeat(
            [min(rows for rows in row_counts if rows >= count) for count in tree.steps], tree.steps
        )
        return {
            f"t{count}_s{context}": self._of(number, np.flatnonzero(rows == count))
            for number, context in enumerate(contexts)
            for count in row_counts
            if (rows == count).any()
        }

    def _of(self, context: int, nodes: np.ndarray) -> FunctionParity:
        exact, half = self.exact[context, nodes], self.half[context, nodes]
        rounded = self.rounded[nodes]
        best = rounded.argmax(-1)
        top = np.argpartition(-half, min(_TOP, half.shape[1]) - 1, axis=-1)[:, :_TOP]
        return FunctionParity(
            positions=len(nodes),
            max_error=float(np.abs(exact - rounded).max()),
            first_choice=_agreement(half, rounded),
            top_8=float((top == best[:, None]).any(-1).mean()),
            divergence=_divergence(rounded, half),
        )

    @property
    def distance(self) -> float:
        """Root mean square from the checkpoint's logits, in their standard deviations."""
        gap = self.exact - self.unrounded
        return float(np.sqrt((gap * gap).mean()) / self.unrounded.std())


def _agreement(found: Single, expected: Single) -> float:
    return float((found.argmax(-1) == expected.argmax(-1)).mean())


def _divergence(expected: Single, found: Single) -> float:
    """Mean KL divergence in nats, of what is expected from what was found."""
    p, q = _log_softmax(expected), _log_softmax(found)
    return float(np.maximum((np.exp(p) * (p - q)).sum(-1), 0).mean())


def _log_softmax(logits: Single) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    log_p: np.ndarray = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return log_p


def _weight_count(package: Package) -> int:
    """Elements of the large constants of one function; they share them."""
    function = next(iter(package.functions.values()))
    shapes = [op.outputs[0].type.shape for op in function.ops if op.type.startswith("const")]
    return sum(math.prod(shape) for shape in shapes)


def _step_sizes(row_counts: Sequence[int], context: int, single: int) -> list[int]:
    """Two steps of each row count, the smaller one partly filled, `single` of one row or two.

    At most 12 of its rows are used, and `context` positions in all: emulated ones take their time.
    """
    sizes = []
    for rows in sorted(row_counts, reverse=True):
        full = min(rows, 12)
        sizes += [full, full - 2] if full > 2 else [full] * single
    while sum(sizes) > context:
        sizes.remove(max(sizes))
    return sizes


def _refuse_unless_equal(
    result: ParityResult, compared: _Compared, compression: Compression
) -> None:
    """Comparisons are written so that a NaN fails them."""
    limits = [("stored weights", result.max_error_rounded, MAX_ERROR_ROUNDED, "logits")]
    if str(compression) == "fp16":
        unrounded = ("unrounded weights", result.max_error_unrounded, MAX_ERROR_UNROUNDED, "logits")
        limits.append(unrounded)
    else:
        share = ("the checkpoint's weights", compared.distance, MAX_SHARE_COMPRESSED, "deviations")
        limits.append(share)
    for against, error, limit, unit in limits:
        if not error <= limit:
            raise RuntimeFailure(
                f"the drafter package does not compute its model: expected within {limit:g} "
                f"{unit} of mlx-lm with {against}, got {error:.3g}; this model cannot be a "
                "drafter, please report it"
            )
    if not result.first_choice_agreement_fp16 >= MIN_AGREEMENT_FP16:
        raise RuntimeFailure(
            "the drafter package loses its model's choices in half precision: expected at least "
            f"{MIN_AGREEMENT_FP16:.0%} equal first choices, got "
            f"{result.first_choice_agreement_fp16:.0%}; this model cannot be a Neural Engine "
            "drafter"
        )
