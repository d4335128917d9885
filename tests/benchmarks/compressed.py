"""What storing the default drafter in fewer bits costs: its own first choices, and right ones.

    uv run python tests/benchmarks/compressed.py [--tokens 128] [--prompts 10] [--text FILE]

The verifier answers held-out prompts greedily (at most `--tokens` each). Along those answers, or
along the first thousand tokens of FILE, the drafter runs with its matrices in each format. Agrees:
its first choice is that of the same drafter in half precision. Right: it is the next token. Several
numbers of rows that share a palette are tried; conversions use `compression.GROUP_ROWS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ondevice import blas

blas.prepare()  # before MLX is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from rich.table import Table  # noqa: E402

from ondevice.apps.terminal import results  # noqa: E402
from ondevice.converters import compression  # noqa: E402
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from ondevice.converters.compression import FORMATS, packer  # noqa: E402
from ondevice.converters.distil.decoder import RowDecoder  # noqa: E402
from ondevice.converters.distil.greedy import greedy_answers  # noqa: E402
from ondevice.converters.mlxmodel import mlx_model  # noqa: E402
from ondevice.converters.network import Network  # noqa: E402
from ondevice.converters.pair import VERIFIER_FOLDER, prepare_pair  # noqa: E402
from ondevice.converters.trained import read_trained  # noqa: E402
from ondevice.models.drafter_weights import folded, unfolded  # noqa: E402
from ondevice.models.pairs import default_pair, known_pair, models_folder  # noqa: E402

GROUPS = (16, 8, 4, 2)
TEXT_TOKENS, WINDOW = 1000, 250


class Passage(NamedTuple):
    """Tokens, and the place of the first one that is to be foretold."""

    tokens: list[int]
    start: int


def answered(checkpoint: Checkpoint, folder: Path, count: int, limit: int) -> list[Passage]:
    """The verifier's greedy answers to `count` of the held-out prompts, spread over all kinds."""
    lines = (models_folder() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(line) for line in lines[:: max(1, len(lines) // count)]]
    prompts = []
    for entry in chosen:
        message = [{"role": "user", "content": entry["turns"][0]}]
        text = checkpoint.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        prompts.append(checkpoint.tokenizer.encode(str(text), add_special_tokens=False))
    model, _ = load_model(folder)
    slots = max(map(len, prompts)) + limit
    decoder = RowDecoder(model, len(prompts), -(-slots // 32) * 32, ())
    answers = greedy_answers(decoder, prompts, set(checkpoint.eos_token_ids), limit)
    return [
        Passage([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def windows(checkpoint: Checkpoint, file: Path) -> list[Passage]:
    """The first tokens of a file, in windows."""
    tokens = checkpoint.tokenizer.encode(file.read_text(encoding="utf-8"))[:TEXT_TOKENS]
    return [Passage(tokens[at : at + WINDOW], 1) for at in range(0, len(tokens), WINDOW)]


class Drafter:
    """The default drafter along passages, in any format."""

    def __init__(self, checkpoint: Checkpoint, network: Network, passages: Sequence[Passage]):
        self._network, self._passages = network, passages
        self._embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float16)
        token_of_row = network.row_to_token or range(network.config.vocab_size)
        self._token_of_row = np.asarray(token_of_row)
        self.targets = np.concatenate([p.tokens[p.start :] for p in passages])

    def choices(self, form: Any) -> tuple[np.ndarray, int, int]:
        """The first choice at every place, bytes of the weights, and how many they are."""
        network, pack = self._network, packer(form)
        weights = folded(network.tensors, network.source, network.places, pack, pack)
        tensors = unfolded(weights, network.config)
        count = sum(values.size for values in tensors.values() if values.ndim > 1)
        rows = self._embedding.astype(np.float32)
        tensors["model.embed_tokens.weight"] = rows[: network.config.vocab_size]
        model = mlx_model(replace(network.config, tied_embeddings=False), tensors)
        model.model.embed_tokens.weight = mx.array(rows)
        found = []
        for passage in self._passages:
            logits = np.array(model(mx.array([passage.tokens[:-1]]))[0, passage.start - 1 :])
            found.append(self._token_of_row[logits.argmax(-1)])
        return np.concatenate(found), weights.nbytes, count


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args(arguments)
    name = default_pair()
    folder = prepare_pair(name) / VERIFIER_FOLDER
    checkpoint = open_checkpoint(folder)
    trained = known_pair(name).drafter.trained_path
    assert trained is not None
    network = Network.trained(checkpoint, read_trained(trained))
    if given.text:
        passages = windows(checkpoint, given.text)
    else:
        passages = answered(checkpoint, folder, given.prompts, given.tokens)
    drafter = Drafter(checkpoint, network, passages)
    table = Table("format", "rows a palette", "bits", "MB", "agrees", "right")
    reference, *_ = drafter.choices("fp16")
    for form in FORMATS:
        for rows in GROUPS if form.startswith("lut") else ("",):
            compression.GROUP_ROWS = rows or compression.GROUP_ROWS
            found, size, count = drafter.choices(form)
            shares = (found == reference).mean(), (found == drafter.targets).mean()
            cells = [f"{8 * size / count:.2f}", f"{size / 1e6:.1f}"]
            table.add_row(form, str(rows), *cells, *(f"{share:.1%}" for share in shares))
    console = results()
    console.print(f"{len(reference)} places")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
