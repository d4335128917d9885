"""Proof of a drafter package: the emulated functions against mlx-lm running the same layers.

A tree of random tokens is fed through the package the way a host does it, several rows a step,
branches and scattered slots; mlx-lm then runs every path from the root as a plain sequence. Two
references: the matrices that the package stores (read back from it), which leaves only the graph to
differ, and the checkpoint's own, which adds the rounding to fp16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ondevice.artifact import ParityResult
from ondevice.converters.checkpoint import tensor_shapes
from ondevice.converters.verifier import rope_scaling
from ondevice.coreml.emulator import Emulator
from ondevice.coreml.package import Package
from ondevice.coreml.runtime import CoreMLRuntime
from ondevice.errors import RuntimeFailure
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_graph import DrafterFunction, stored_weights
from ondevice.models.drafter_weights import Tensors, head_partition, unfolded
from ondevice.models.mil import MASKED
from ondevice.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from mlx_lm.models.llama import Model

Single = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

MAX_ERROR_ROUNDED = 1e-3
"""In logits; measured 8e-5 with three layers of SmolLM2, whose largest logit there is 70."""

MAX_ERROR_UNROUNDED = 0.25
"""Rounding grows with depth and logits (SmolLM2: three layers 0.022, nine 0.055); a wrong matrix is
off by whole units."""

MIN_AGREEMENT_FP16 = 0.9
"""Of some 80 positions with random tokens; the 98 % of the tests are of 500 with real text."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Nodes in the order in which they are fed; `parents[i]` < i, -1 at the root.

    `steps` cuts that order: nodes [sum(steps[:n]), sum(steps[:n+1])) go in step n.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def random(
        cls, vocab_size: int, steps: Sequence[int], seed: int, branching: float = 0.3
    ) -> TokenTree:
        """Random tokens; a node continues the newest one, or with `branching` hangs elsewhere."""
        rng = np.random.default_rng(seed)
        total = sum(steps)
        parents = [-1]
        for node in range(1, total):
            continues = rng.random() >= branching
            parents.append(node - 1 if continues else int(rng.integers(max(0, node - 12), node)))
        tokens = rng.integers(0, vocab_size, total)
        return cls(tuple(tokens.tolist()), tuple(parents), tuple(steps))

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def leaves(self) -> list[int]:
        """Nodes without children; their paths cover the tree."""
        return sorted(set(range(len(self.tokens))) - set(self.parents))


@dataclass(slots=True)
class Replay:
    """A host for one package: slots handed out at random, masks from the tree.

    `embedding` (vocab, D) is what the host looks rows up in. In fp32 emulation `cos` and `sin` stay
    unrounded, so that what is left to differ from mlx-lm is the graph.
    """

    runtime: CoreMLRuntime
    config: ModelConfig
    context: int
    embedding: Array
    seed: int = 0
    slots: dict[int, int] = field(init=False, default_factory=dict)
    cache: dict[str, Array] = field(init=False, default_factory=dict)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self._free = rng.permutation(self.context).tolist()

    def inputs(self, tree: TokenTree, nodes: Sequence[int], rows: int) -> dict[str, Array]:
        """Inputs of function t{rows}_s{context} for `nodes`; unused rows see themselves only."""
        function = DrafterFunction(self.config, rows, self.context)
        specs = self.runtime.functions[function.name].inputs
        for name in function.inputs():
            if name not in self.cache and name[:2] in ("k_", "v_"):
                self.cache[name] = specs[name].empty()
        paths = [tree.path(node) for node in nodes]
        positions = np.array([len(path) - 1 for path in paths] + [0] * (rows - len(nodes)))
        mask = np.full((rows, self.context), MASKED)
        mask_new = np.where(np.eye(rows, dtype=bool), 0.0, MASKED)
        row_of = {node: row for row, node in enumerate(nodes)}
        for row, path in enumerate(paths):
            mask[row, [self.slots[node] for node in path if node in self.slots]] = 0
            mask_new[row, [row_of[node] for node in path if node in row_of]] = 0
        tokens = [tree.tokens[node] for node in nodes] + [0] * (rows - len(nodes))
        angles = np.outer(inverse_frequencies(self.config), positions)
        angles = np.concatenate([angles, angles])
        made = {
            "x": self.embedding[tokens].T[None, :, None],
            "cos": np.cos(angles)[None, None],
            "sin": np.sin(angles)[None, None],
            "mask": mask[None, None],
            "mask_new": mask_new[None, None],
        }
        typed = {
            name: np.ascontiguousarray(array, specs[name].dtype) for name, array in made.items()
        }
        return typed | self.cache

    def step(self, tree: TokenTree, nodes: Sequence[int], rows: int) -> dict[str, Array]:
        """Run `nodes` (ancestors fed before or beside them) and write their rows into slots."""
        name = f"t{rows}_s{self.context}"
        outputs = self.runtime.predict(name, self.inputs(tree, nodes, rows))
        for row, node in enumerate(nodes):
            slot = self._free.pop()
            self.slots[node] = slot
            for layer in range(self.config.num_layers):
                self.cache[f"k_{layer}"][0, :, slot] = outputs["k_new"][layer, :, row]
                self.cache[f"v_{layer}"][0, :, slot] = outputs["v_new"][layer, :, row]
        return outputs

    def logits(self, tree: TokenTree, row_counts: Sequence[int]) -> Single:
        """Feed the whole tree, each step by the smallest function that fits: (nodes, vocab)."""
        collected = []
        first = 0
        for count in tree.steps:
            rows = min(rows for rows in row_counts if rows >= count)
            outputs = self.step(tree, range(first, first + count), rows)
            collected.append(join_logits(outputs, self.config)[:count])
            first += count
        return np.concatenate(collected)


def join_logits(outputs: Mapping[str, Array], config: ModelConfig) -> Single:
    """The logits parts as one array (rows, vocab), without the padding rows."""
    parts = [outputs[f"logits_{i}"][0, :, 0] for i in range(len(head_partition(config.vocab_size)))]
    return np.concatenate(parts).T[:, : config.vocab_size].astype(np.float32)


def stored_model(package: Package, config: ModelConfig, embedding: Array) -> Model:
    """mlx-lm's Llama with the matrices that `package` stores and the rows the host looks up."""
    constants = next(iter(package.functions.values())).constants

    def read(name: str) -> Array:
        value = constants[name].read()
        assert not isinstance(value, str)
        return value

    matrices = unfolded(stored_weights(read, config), config)
    matrices["model.embed_tokens.weight"] = embedding.astype(np.float32)
    return llama(replace(config, tied_embeddings=False), matrices)


def selected_model(tensors: Tensors, config: ModelConfig, layers: Sequence[int]) -> Model:
    """mlx-lm's Llama with `layers` of a checkpoint, unrounded."""
    smaller = config.with_layers(len(layers))

    def source(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", lambda number: str(layers[int(number[0])]), name)

    return llama(smaller, {name: tensors(source(name)) for name in tensor_shapes(smaller)})


def llama(config: ModelConfig, matrices: Mapping[str, Single]) -> Model:
    """mlx-lm's own Llama in fp32 with these tensors, by Hugging Face name."""
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    args = ModelArgs(
        model_type="llama",
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        num_key_value_heads=config.num_kv_heads,
        rope_theta=config.rope_theta,
        rope_scaling=rope_scaling(config),
        tie_word_embeddings=config.tied_embeddings,
    )
    model = Model(args)
    model.load_weights([(name, mx.array(value)) for name, value in matrices.items()])
    return model


def path_logits(model: Model, tree: TokenTree) -> Single:
    """mlx-lm's logits of every node, each path run as a plain sequence: (nodes, vocab)."""
    import mlx.core as mx

    logits: dict[int, Single] = {}
    for leaf in tree.leaves():
        path = tree.path(leaf)
        output = np.array(model(mx.array([[tree.tokens[node] for node in path]]))[0])
        logits |= {node: output[i] for i, node in enumerate(path) if node not in logits}
    return np.stack([logits[node] for node in range(len(tree.tokens))])


def check_parity(
    package: Package,
    tensors: Tensors,
    source: ModelConfig,
    layers: Sequence[int],
    embedding: Array,
    functions: Sequence[DrafterFunction],
) -> ParityResult:
    """Run every function of the package against mlx-lm; takes seconds.

    The package was made of `layers` of `tensors`, a model of sizes `source`. `embedding` (vocab, D)
    holds the rows that the host will look up; a drafter with fewer output rows than that is tried
    on its first ones. Raises RuntimeFailure when the package does not compute its model.
    """
    config = functions[0].config
    embedding = embedding[: config.vocab_size]
    row_counts = sorted({function.rows for function in functions})
    contexts = sorted({function.context for function in functions})
    tree = TokenTree.random(config.vocab_size, _step_sizes(row_counts, contexts[0]), seed=0)
    exact, half = (Emulator(package, precision) for precision in ("fp32", "fp16"))

    def logits_of(runtime: CoreMLRuntime) -> Single:
        replays = (Replay(runtime, config, context, embedding) for context in contexts)
        return np.stack([replay.logits(tree, row_counts) for replay in replays])

    logits = logits_of(exact)
    rounded = path_logits(stored_model(package, config, embedding), tree)
    unrounded = path_logits(selected_model(tensors, source, layers), tree)
    agreement = (logits_of(half).argmax(-1) == rounded.argmax(-1)).mean()
    result = ParityResult(
        positions=len(tree.tokens) * len(contexts),
        max_error_rounded=float(np.abs(logits - rounded).max()),
        max_error_unrounded=float(np.abs(logits - unrounded).max()),
        first_choice_agreement_fp16=float(agreement),
    )
    _refuse_unless_equal(result)
    return result


def _step_sizes(row_counts: Sequence[int], context: int) -> list[int]:
    """A full and a partly filled step of each row count, a few of one row; at most `context`."""
    sizes = []
    for rows in sorted(row_counts, reverse=True):
        full = min(rows, 12)
        sizes += [full, full - 2] if full > 2 else [full] * 6
    while sum(sizes) > context:
        sizes.remove(max(sizes))
    return sizes


def _refuse_unless_equal(result: ParityResult) -> None:
    """Comparisons are written so that a NaN fails them."""
    limits = (
        ("rounded weights", result.max_error_rounded, MAX_ERROR_ROUNDED),
        ("unrounded weights", result.max_error_unrounded, MAX_ERROR_UNROUNDED),
    )
    for against, error, limit in limits:
        if not error <= limit:
            raise RuntimeFailure(
                f"the drafter package does not compute its model: logits expected within {limit:g} "
                f"of mlx-lm with {against}, got {error:.3g}; this model cannot be a drafter, "
                "please report it"
            )
    if not result.first_choice_agreement_fp16 >= MIN_AGREEMENT_FP16:
        raise RuntimeFailure(
            "the drafter package loses its model's choices in half precision: expected at least "
            f"{MIN_AGREEMENT_FP16:.0%} equal first choices, got "
            f"{result.first_choice_agreement_fp16:.0%}; this model cannot be a Neural Engine "
            "drafter"
        )
