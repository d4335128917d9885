"""The verifier as a batch decoder in torch: the data maker's twin for CPUs with bf16 products.

    python torch_decoder.py VERIFIER_FOLDER SHARD_FOLDER TOKENS ROWS LIBRARY

LIBRARY is bf16_attention.c, compiled as its head says. An AVX512-BF16 core runs torch's bf16
products at 200 GFLOP/s, MLX with OpenBLAS fp32 ones at 80. Not part of the product: the maker, its
plans and its shards are; only the forward pass is torch's.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ondevice.converters.distil.conversation import Limits
from ondevice.converters.distil.decoding import TOP, Floats, Ints, Step, draw
from ondevice.converters.distil.maker import Made, Maker
from ondevice.converters.distil.plans import OwnQuestions
from ondevice.converters.distil.script import chat_script, opening_tokens
from ondevice.converters.distil.shards import ShardFolder

CHUNK = 128
HALF = torch.bfloat16
Tensor = torch.Tensor


class TorchDecoder:
    """A Llama with a cache of (rows, slots): bf16 products, fp32 norms, residual and logits."""

    def __init__(
        self, folder: Path, rows: int, slots: int, prefix: tuple[int, ...], library: Path
    ) -> None:
        self.rows, self.slots = rows, slots
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._size, self._eps = config["head_dim"], config["rms_norm_eps"]
        self._embed = weights["model.embed_tokens.weight"].to(HALF)
        self._norm = weights["model.norm.weight"].float()
        count = config["num_hidden_layers"]
        self._layers = [_layer(weights, i, self._size) for i in range(count)]
        shape = (count, rows, self._kv_heads, slots, self._size)
        self._keys, self._values = torch.zeros(shape, dtype=HALF), torch.zeros(shape, dtype=HALF)
        self._scratch = torch.empty(rows, config["vocab_size"])
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._attend = ctypes.CDLL(str(library)).attend
        self._attend.argtypes = [pointer] * 7 + [number] * 4
        half = self._size // 2
        frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(slots, dtype=torch.float64)[:, None] * frequencies
        self._cos, self._sin = angles.cos().float(), angles.sin().float()
        for position, token in enumerate(prefix):
            self._hidden(torch.full((rows,), token), torch.full((rows,), position))

    @torch.inference_mode()
    def step(self, tokens: Ints, positions: Ints, temperatures: Floats, chances: Floats) -> Step:
        hidden = self._hidden(torch.from_numpy(tokens), torch.from_numpy(positions))
        logits = F.linear(hidden, self._embed).float()
        top, ids = _top(logits)
        heat = torch.from_numpy(np.where(temperatures > 0, temperatures, 1).astype(np.float32))
        peak = top[:, :1]
        warm = torch.sub(logits, peak, out=self._scratch).div_(heat[:, None]).exp_().sum(-1).log()
        plain = torch.sub(logits, peak, out=self._scratch).exp_().sum(-1).log() + peak[:, 0]
        drawn = draw(
            ids.numpy(),
            top.numpy(),
            (warm + peak[:, 0] / heat).numpy(),
            temperatures,
            chances,
            lambda row: logits[row].numpy(),
        )
        return Step(drawn, ids.numpy(), (top - plain[:, None]).numpy())

    @torch.inference_mode()
    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rows, size = self.rows, self._size
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = self._embed[tokens].float()
        widths = (self._heads * size, self._kv_heads * size, self._kv_heads * size)
        mixed = torch.empty(rows, widths[0], dtype=HALF)
        for i, (norm, qkv, output, mlp_norm, gate_up, down) in enumerate(self._layers):
            q, k, v = F.linear(self._normed(x, norm), qkv).split(widths, -1)
            q = _rotated(q.view(rows, -1, size), cos, sin)
            k = _rotated(k.view(rows, -1, size), cos, sin)
            v = v.contiguous()
            arrays = (q, k, v, positions, self._keys[i], self._values[i], mixed)
            group = self._heads // self._kv_heads
            pointers = [array.data_ptr() for array in arrays]
            self._attend(*pointers, rows, self._kv_heads, group, self.slots)
            x += F.linear(mixed, output)
            gate, up = F.linear(self._normed(x, mlp_norm), gate_up).chunk(2, -1)
            x += F.linear(F.silu(gate) * up, down)
        return self._normed(x, self._norm)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, self._eps).to(HALF)


def _layer(weights: Mapping[str, Tensor], index: int, size: int) -> tuple[Tensor, ...]:
    def read(name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}.weight"].float()

    query = read("self_attn.q_proj") * size**-0.5
    return (
        read("input_layernorm"),
        torch.cat([query, read("self_attn.k_proj"), read("self_attn.v_proj")]).to(HALF),
        read("self_attn.o_proj").to(HALF),
        read("post_attention_layernorm"),
        torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]).to(HALF),
        read("mlp.down_proj").to(HALF),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(HALF)


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens of each row's TOP best, which lie in its TOP best chunks."""
    rows, vocab = logits.shape
    chunks = logits.view(rows, vocab // CHUNK, CHUNK)
    best = chunks.amax(-1).topk(TOP, dim=-1).indices
    few = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).reshape(rows, -1)
    top, place = few.topk(TOP, dim=-1)
    return top, best.gather(1, place // CHUNK) * CHUNK + place % CHUNK


def main(arguments: list[str]) -> None:
    verifier, folder, wanted, rows, library = arguments
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(verifier)
    config = json.loads((Path(verifier) / "config.json").read_text())
    script = chat_script(tokenizer, config["eos_token_id"], verifier)
    openings, shares = opening_tokens(tokenizer)
    plan = OwnQuestions(1, script, Limits(), openings, shares)
    slots = -(-plan.longest // 32) * 32 + 32
    decoder = TorchDecoder(Path(verifier), int(rows), slots, plan.prefix, Path(library))
    shards = ShardFolder(Path(folder), {"seed": 1, "recipe": "chat"})
    marks: list[tuple[float, int]] = []

    def report(made: Made) -> None:
        marks.append((made.seconds, made.learned_tokens))
        if len(marks) % 10 == 0:
            pace = (made.learned_tokens - marks[0][1]) / (made.seconds - marks[0][0])
            print(
                f"{time.strftime('%H:%M:%S')} {made.conversations} texts, {made.dropped} dropped, "
                f"{made.learned_tokens} answer tokens, {pace:.0f} tok/s",
                flush=True,
            )

    maker = Maker(decoder, plan, shards, config["vocab_size"])
    maker.run(lambda made: made.learned_tokens < int(wanted), report)


if __name__ == "__main__":
    main(sys.argv[1:])
