"""Proof of a drafter package: the emulated functions against mlx-lm running the same layers.

A tree of random tokens is fed through the package the way a host does it, several rows a step,
branches and scattered slots; mlx-lm then runs every path from the root as a plain sequence. Two
references: the matrices that the package stores (read back from it), which leaves only the graph to
differ, and the checkpoint's own, which adds the rounding to fp16.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ondevice.converters.checkpoint import tensor_shapes
from ondevice.converters.mlxmodel import mlx_model
from ondevice.coreml.package import Package
from ondevice.coreml.runtime import CoreMLRuntime
from ondevice.coreml.weights import StoredWeights
from ondevice.models.ane import MASKED
from ondevice.models.config import ModelConfig
from ondevice.models.drafter_graph import DrafterFunction, stored_tensors
from ondevice.models.drafter_layers import stored_epsilon
from ondevice.models.drafter_weights import Tensors, head_partition
from ondevice.models.rope import exact_cos_sin, inverse_frequencies

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

Single = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


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
        made = {"x": self.embedding[tokens].T[None, :, None]}
        rotaries = {"": self.config.rotary}
        if self.config.has_local_layers:
            rotaries["_local"] = self.config.local_rotary
        for suffix, rotary in rotaries.items():
            cosines, sines = exact_cos_sin(positions, inverse_frequencies(rotary))
            made |= {f"cos{suffix}": cosines, f"sin{suffix}": sines}
            made |= {f"mask{suffix}": mask[None, None], f"mask_new{suffix}": mask_new[None, None]}
        if self.config.window is not None and self.config.has_local_layers:
            made |= self._narrowed(self.config.window, tree, nodes, mask, mask_new)
        typed = {
            name: np.ascontiguousarray(array, specs[name].dtype) for name, array in made.items()
        }
        return typed | self.cache

    def _narrowed(
        self, window: int, tree: TokenTree, nodes: Sequence[int], mask: Array, mask_new: Array
    ) -> dict[str, Array]:
        """The masks of layers that see `window` tokens."""
        mask, mask_new = mask.copy(), mask_new.copy()
        row_of = {node: row for row, node in enumerate(nodes)}
        for row, node in enumerate(nodes):
            for far in tree.path(node)[:-window]:
                if far in self.slots:
                    mask[row, self.slots[far]] = MASKED
                if far in row_of:
                    mask_new[row, row_of[far]] = MASKED
        return {"mask_local": mask[None, None], "mask_new_local": mask_new[None, None]}

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


def stored_model(
    package: Package, config: ModelConfig, embedding: Array, narrow: bool = False
) -> Any:
    """mlx-lm's model with the matrices that `package` stores and the rows the host looks up.

    Its norms over the residual stream have the eps that the package stores, which is rounded.
    narrow: see `mlx_model`.
    """
    read = StoredWeights(next(iter(package.functions.values())))
    stored = stored_tensors(read, config)
    # Made when it is asked for, so that nothing keeps it.
    rows = (("model.embed_tokens.weight", table.astype(np.float32)) for table in [embedding])
    untied = replace(config, tied_embeddings=False)
    model = mlx_model(untied, itertools.chain(rows, stored), narrow)
    _round_epsilons(model, config)
    return model


def _round_epsilons(model: Module, config: ModelConfig) -> None:
    scale = config.traits.residual_scale
    stream = float(stored_epsilon(config.rms_norm_eps, scale)) / scale**2
    inner: Any = model
    inner.model.norm.eps = stream
    for layer in inner.layers:
        for role, name in config.traits.norms.items():
            if hasattr(layer, name) and role.startswith("before"):
                getattr(layer, name).eps = stream


def selected_model(
    tensors: Tensors, config: ModelConfig, layers: Sequence[int], narrow: bool = False
) -> Any:
    """mlx-lm's model with `layers` of a checkpoint, unrounded; narrow: see `mlx_model`."""
    smaller = config.selected(layers)

    def source(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", lambda number: str(layers[int(number[0])]), name)

    named = ((name, tensors(source(name))) for name in tensor_shapes(smaller))
    return mlx_model(smaller, named, narrow)


def path_logits(model: Module, tree: TokenTree) -> Single:
    """mlx-lm's logits of every node, each path run as a plain sequence: (nodes, vocab)."""
    import mlx.core as mx

    paths = [tree.path(leaf) for leaf in tree.leaves()]
    longest = max(len(path) for path in paths)
    # Shorter paths are padded behind their end, where a causal model does not look.
    tokens = [[tree.tokens[node] for node in path] for path in paths]
    batch = mx.array([row + [0] * (longest - len(row)) for row in tokens])
    output = np.array(model(batch))
    logits: dict[int, Single] = {}
    for path, rows in zip(paths, output, strict=True):
        logits |= {node: rows[i] for i, node in enumerate(path) if node not in logits}
    return np.stack([logits[node] for node in range(len(tree.tokens))])
