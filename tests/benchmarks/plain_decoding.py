"""Plain decoding against mlx-lm's `generate_step` on the same MLX folder.

    uv run python tests/benchmarks/plain_decoding.py FOLDER [--tokens 32] [--repeats 15] [--json]

FOLDER is a verifier folder, such as the `verifier` of a converted pair. Speed:
both decode the same tokens after the same prompt, turn by turn in one process; each turn gives one
time per token, and the medians, their quartiles and the median of the turns' ratios are printed.
CPU time, of all threads, stands beside wall time: it is the steadier figure on a machine that is
shared. Memory: each decodes in a process of its own; MLX's peak and the peak resident set are
printed. The demand is a ratio of times of at most 1.03 and of MLX's peak memory of at most 1.15.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from ondevice import blas

blas.prepare()  # before MLX is imported

PROMPT_TOKENS = 128
SIDES = ("generate_step", "ondevice")
CLOCKS = ("wall", "cpu")
Decode = Callable[[list[int], int], tuple[list[int], float, float]]
"""(prompt, count) -> (tokens, wall seconds and CPU seconds from the first token to the last)."""


def mlx_lm_decoder(folder: Path) -> Decode:
    """mlx-lm's own loop over its own cache."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)

    def decode(prompt: list[int], count: int) -> tuple[list[int], float, float]:
        stream = generate_step(mx.array(prompt), model, max_tokens=count)
        tokens = [int(next(stream)[0])]
        start, cpu_start = perf_counter(), process_time()
        tokens += [int(token) for token, _ in stream]
        return tokens, perf_counter() - start, process_time() - cpu_start

    return decode


def ondevice_decoder(folder: Path) -> Decode:
    """`MLXVerifier.run`, greedy."""
    from ondevice.sampling import Law, SamplingParams
    from ondevice.units import RunRequest
    from ondevice.verifier import MLXVerifier

    verifier = MLXVerifier.open(folder)

    def decode(prompt: list[int], count: int) -> tuple[list[int], float, float]:
        session = verifier.open_session()
        verifier.prefill(session, prompt[:-1], lambda: False)
        law = Law(SamplingParams(), verifier.vocab_size)
        run = verifier.run(RunRequest(session, 0, prompt[-1], count, law), lambda: False)
        tokens = list(next(run).tokens)
        start, cpu_start = perf_counter(), process_time()
        tokens += [token for verdict in run for token in verdict.tokens]
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
        verifier.close_session(session)
        return tokens, seconds, cpu_seconds

    return decode


DECODERS = dict(zip(SIDES, (mlx_lm_decoder, ondevice_decoder), strict=True))


def prompt_of(count: int) -> list[int]:
    """Token ids that every vocabulary has; what they mean does not matter for speed."""
    return [10 + (7 * index) % 200 for index in range(count)]


def measure_speed(folder: Path, tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds per token of both sides and their ratio, for each clock; turns alternate."""
    decoders = {side: DECODERS[side](folder) for side in SIDES}
    times: dict[str, dict[str, list[float]]]
    times = {clock: {side: [] for side in SIDES} for clock in CLOCKS}
    for turn in range(-1, repeats):  # turn -1 warms up
        texts = {}
        for side in SIDES if turn % 2 else SIDES[::-1]:
            texts[side], *seconds = decoders[side](prompt_of(PROMPT_TOKENS), tokens)
            for clock, value in zip(CLOCKS, seconds, strict=True):
                if turn >= 0:
                    times[clock][side].append(1e3 * value / (tokens - 1))
        if texts[SIDES[0]] != texts[SIDES[1]]:
            raise SystemExit("the two sides decoded different tokens: the times mean nothing")
    return {clock: summary(sides) for clock, sides in times.items()}


def summary(sides: dict[str, list[float]]) -> dict[str, Any]:
    """Spread of each side's times and of the turns' ratios."""
    ratios = [ours / theirs for theirs, ours in zip(*sides.values(), strict=True)]
    return {**{side: spread(values) for side, values in sides.items()}, "ratio": spread(ratios)}


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def measure_memory(folder: Path, tokens: int) -> dict[str, dict[str, int]]:
    """Peak bytes of each side in a process of its own."""
    command = [sys.executable, __file__, str(folder), "--tokens", str(tokens), "--memory-of"]
    return {
        side: json.loads(subprocess.run([*command, side], check=True, capture_output=True).stdout)
        for side in SIDES
    }


def peak_memory(folder: Path, side: str, tokens: int) -> dict[str, int]:
    """Decode once, and report this process's peaks in bytes."""
    import mlx.core as mx

    DECODERS[side](folder)(prompt_of(PROMPT_TOKENS), tokens)
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"mlx_bytes": mx.get_peak_memory(), "resident_bytes": resident}


def table(speed: dict[str, dict[str, Any]], memory: dict[str, dict[str, int]]) -> str:
    """The figures as aligned text: times as median (quartiles)."""
    theirs, ours = (memory[side] for side in SIDES)
    header = f"{'':16}{'wall ms/token':>28}{'CPU ms/token':>28}{'MLX MiB':>10}{'RSS MiB':>10}"
    lines = [header]
    for name in (*SIDES, "ratio"):
        times = "".join(f"{shown(speed[clock][name]):>28}" for clock in CLOCKS)
        if name == "ratio":
            peaks = [f"{ours[key] / theirs[key]:.3f}" for key in ours]
        else:
            peaks = [f"{value / 2**20:.1f}" for value in memory[name].values()]
        lines.append(f"{name:16}{times}{peaks[0]:>10}{peaks[1]:>10}")
    return "\n".join(lines)


def shown(value: dict[str, float]) -> str:
    """Median and quartiles in one cell."""
    return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description="plain decoding against mlx-lm's generate_step")
    parser.add_argument("folder", type=Path, help="an MLX model folder")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a turn (32)")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each side (15)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(peak_memory(options.folder, options.memory_of, options.tokens)))
        return
    memory = measure_memory(options.folder, options.tokens)
    speed = measure_speed(options.folder, options.tokens, options.repeats)
    print(json.dumps({"speed": speed, "memory": memory}) if options.json else table(speed, memory))


if __name__ == "__main__":
    main()
