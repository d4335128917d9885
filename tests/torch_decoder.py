"""The verifier as a batch decoder in torch: the data maker's twin for CPUs with bf16 products.

    python -m tests.torch_decoder VERIFIER_FOLDER SHARD_FOLDER TOKENS [ROWS]

On an AVX512-BF16 core torch multiplies bf16 at 200 GFLOP/s, MLX with OpenBLAS fp32 at 80. Not part
of the product: the shards are made by `ondevice.converters.distil`, only the forward is torch's.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import time
from pathlib import Path

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


class TorchDecoder:
    """A Llama with a cache of (rows, slots), bf16 products, fp32 norms and scores."""

    def __init__(
        self, folder: Path, rows: int, slots: int, prefix: tuple[int, ...], library: Path
    ) -> None:
        self.rows, self.slots = rows, slots
        self._config = config = json.loads((folder / "config.json").read_text())
        self._dtype = dtype = torch.bfloat16
        weights = load_file(folder / "model.safetensors")
        self._embed = weights["model.embed_tokens.weight"].to(dtype)
        self._norm = weights["model.norm.weight"].float()
        self._heads, self._kv = config["num_attention_heads"], config["num_key_value_heads"]
        self._hd = config["head_dim"]
        self._eps = config["rms_norm_eps"]
        self._layers = [self._layer(weights, i, dtype) for i in range(config["num_hidden_layers"])]
        shape = (len(self._layers), rows, self._kv, slots, self._hd)
        self._k, self._v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._kernel = ctypes.CDLL(str(library)).attend
        self._kernel.argtypes = [pointer] * 7 + [number] * 4
        self._scratch = torch.empty(rows, config["vocab_size"])
        half = self._hd // 2
        freq = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(slots, dtype=torch.float64)[:, None] * freq
        self._cos, self._sin = angle.cos().float(), angle.sin().float()
        for position, token in enumerate(prefix):
            self._forward(torch.full((rows,), token), torch.full((rows,), position))

    def _layer(self, weights, i, dtype):
        p = f"model.layers.{i}."
        w = {k: weights[p + k + ".weight"].float() for k in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
        q = w["self_attn.q_proj"] / math.sqrt(self._hd)
        return (
            w["input_layernorm"],
            torch.cat([q, w["self_attn.k_proj"], w["self_attn.v_proj"]]).to(dtype),
            w["self_attn.o_proj"].to(dtype),
            w["post_attention_layernorm"],
            torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]]).to(dtype),
            w["mlp.down_proj"].to(dtype),
        )

    def _rms(self, x, gain):
        return F.rms_norm(x, (x.shape[-1],), gain, self._eps).to(self._dtype)

    def _rope(self, x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self._dtype)

    @torch.inference_mode()
    def _forward(self, tokens, positions):
        B, kv, hd = self.rows, self._kv, self._hd
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = self._embed[tokens].float()
        nq, nk = self._heads * hd, kv * hd
        a = torch.empty(B, nq, dtype=self._dtype)
        for i, (n1, qkv, o, n2, gu, down) in enumerate(self._layers):
            y = F.linear(self._rms(x, n1), qkv)
            q, k, v = y.split((nq, nk, nk), -1)
            q = self._rope(q.view(B, -1, hd), cos, sin)
            k = self._rope(k.view(B, kv, hd), cos, sin)
            v = v.contiguous()
            self._kernel(
                q.data_ptr(), k.data_ptr(), v.data_ptr(), positions.data_ptr(),
                self._k[i].data_ptr(), self._v[i].data_ptr(), a.data_ptr(),
                B, kv, self._heads // kv, self.slots,
            )
            x += F.linear(a, o)
            g, u = F.linear(self._rms(x, n2), gu).chunk(2, -1)
            x += F.linear(F.silu(g) * u, down)
        return self._rms(x, self._norm)

    @torch.inference_mode()
    def step(self, tokens: Ints, positions: Ints, temperatures: Floats, chances: Floats) -> Step:
        h = self._forward(torch.from_numpy(tokens), torch.from_numpy(positions))
        logits = F.linear(h, self._embed).float()
        B, V = logits.shape
        chunks = logits.view(B, V // CHUNK, CHUNK)
        _, best = chunks.amax(-1).topk(TOP, dim=-1)
        few = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).reshape(B, -1)
        top, place = few.topk(TOP, dim=-1)
        ids = best.gather(1, place // CHUNK) * CHUNK + place % CHUNK
        safe = torch.from_numpy(np.where(temperatures > 0, temperatures, 1).astype(np.float32))
        peak = top[:, :1]
        other = torch.sub(logits, peak, out=self._scratch)
        scaled = other.div_(safe[:, None]).exp_().sum(-1).log() + peak[:, 0] / safe
        plain = torch.sub(logits, peak, out=self._scratch).exp_().sum(-1).log() + peak[:, 0]
        top_logits, top_tokens = top.numpy(), ids.numpy()
        drawn = draw(top_tokens, top_logits, scaled.numpy(), temperatures, chances,
                     lambda row: logits[row].numpy())
        return Step(drawn, top_tokens, top_logits - plain.numpy()[:, None])


def main(arguments: list[str]) -> None:
    verifier, folder, wanted, rows, library = arguments
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    config = json.loads((Path(verifier) / "config.json").read_text())
    script = chat_script(tokenizer, config["eos_token_id"], verifier)
    openings, shares = opening_tokens(tokenizer)
    limits = Limits()
    slots = len(script.prefix) + limits.question + len(script.turn) + limits.answer + 32
    decoder = TorchDecoder(
        Path(verifier), int(rows), -(-slots // 32) * 32, script.prefix, Path(library)
    )
    plan = OwnQuestions(1, script, limits, openings, shares)
    shards = ShardFolder(Path(folder), {"seed": 1, "recipe": "chat"})
    start: list[tuple[float, int]] = []

    def report(made: Made) -> None:
        start.append((made.seconds, made.learned_tokens))
        if len(start) % 10 == 0:
            speed = (made.learned_tokens - start[0][1]) / (made.seconds - start[0][0])
            print(
                f"{time.strftime('%H:%M:%S')} {made.conversations} texts, {made.dropped} dropped, "
                f"{made.learned_tokens} answer tokens, {speed:.0f} tok/s",
                flush=True,
            )

    maker = Maker(decoder, plan, shards, config["vocab_size"])
    maker.run(lambda made: made.learned_tokens < int(wanted), report)


if __name__ == "__main__":
    main(sys.argv[1:])
