"""The end of a distillation: the file, its figures, its card, and the pair that uses it."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ondevice.artifact import file_sha256, replacing
from ondevice.converters.distil.card import Card, Tables, TrainingAmount, data_amount
from ondevice.converters.distil.evaluation import Passage, drafter_model, evaluate
from ondevice.converters.distil.greedy import greedy_answers
from ondevice.converters.distil.learner import Learner
from ondevice.converters.distil.run import Distillation
from ondevice.converters.distil.shards import Text
from ondevice.converters.distil.training import Position
from ondevice.converters.distil.watch import Watch
from ondevice.converters.trained import TrainedDrafter, TrainedHeader, read_trained, write_trained
from ondevice.models.pairs import models_folder

WEIGHTS_FILE = "drafter.safetensors"
HELDOUT_FILE = "heldout.jsonl"
_ANSWER_TOKENS = 256
_EVALUATION_ROWS = 40
_MAX_WINDOWS = 80  # of a text's held-out part: 20,000 tokens


def write_drafter(run: Distillation, learner: Learner, rows: Sequence[int]) -> TrainedDrafter:
    """The student as a file in the work folder, read back as it was rounded."""
    path = run.work / WEIGHTS_FILE
    header = TrainedHeader(
        layers=run.layers,
        verifier=run.checkpoint.label,
        verifier_sha256=tuple(source.sha256 for source in run.checkpoint.sources),
        tokenizer_sha256=run.checkpoint.tokenizer_sha256,
    )
    write_trained(path, header, rows, learner.weights())
    return read_trained(path)


def make_card(
    run: Distillation,
    drafter: TrainedDrafter,
    texts: Sequence[Text],
    position: Position,
    *,
    licence: str,
    framework: str = "MLX",
    prompts: int | None = None,
) -> Card:
    """Measure `drafter` and write its card in the work folder.

    prompts: as many of the held-out ones, all by default.
    """
    sets = _sets(run, prompts)
    acceptance = {name: _measure(run, drafter, passages) for name, passages in sets.items()}
    before = {}
    if run.start is not None:
        before = {name: _measure(run, run.start, passages) for name, passages in sets.items()}
    seconds = position.seconds
    card = Card(
        verifier=run.checkpoint.label,
        verifier_sources=run.checkpoint.sources,
        tokenizer_sha256=run.checkpoint.tokenizer_sha256,
        licence=licence,
        recipe=run.recipe,
        layers=run.layers,
        rows=len(drafter.row_to_token),
        parameters=sum(values.size for values in drafter.tensors.values()),
        file=drafter.path.name,
        file_bytes=drafter.path.stat().st_size,
        file_sha256=drafter.source.sha256,
        data=data_amount(texts, run.data_seconds()),
        training=TrainingAmount(
            steps=position.steps,
            tokens=position.tokens,
            seconds=seconds,
            tok_s=position.tokens / seconds if seconds else None,
            framework=framework,
            validations=position.validations,
        ),
        started_from=None if run.start is None else run.start.path.name,
        acceptance=acceptance,
        before=before,
        heldout_sha256=file_sha256(models_folder() / HELDOUT_FILE),
        peak_memory_bytes=peak_memory_bytes(),
        converter_version=version("ondevice"),
    )
    card.write(run.work)
    return card


def peak_memory_bytes() -> int:
    """Most memory that this process has held so far."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def _measure(run: Distillation, drafter: TrainedDrafter, passages: Sequence[Passage]) -> Tables:
    model = drafter_model(run.verifier, drafter.row_to_token, drafter.tensors)
    with Watch(f"Measuring acceptance of {drafter.path.name}", run.quiet) as watch:

        def report(done: int) -> None:
            watch.update(done / len(passages), f"{done} of {len(passages)} texts")

        return evaluate(run.verifier, model, drafter.row_to_token, passages, report)


def _sets(run: Distillation, limit: int | None) -> dict[str, list[Passage]]:
    sets: dict[str, list[Passage]] = {}
    if run.checkpoint.tokenizer.chat_template:
        sets["Held-out prompts, greedy"] = heldout_passages(run, limit)
    if run.material.texts:
        windows = run.windows[1][:_MAX_WINDOWS]
        sets["Held-out text"] = [Passage("text", window, 1) for window in windows]
    return sets


def heldout_passages(run: Distillation, limit: int | None = None) -> list[Passage]:
    """The verifier's greedy answers to the held-out prompts, made once for a work folder."""
    path = run.work / "heldout.json"
    if not path.exists():
        made = read_passages(run, models_folder() / HELDOUT_FILE, limit)
        kept = [{"category": p.category, "tokens": p.tokens, "start": p.start} for p in made]
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(kept), encoding="utf-8")
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Passage(e["category"], tuple(e["tokens"]), e["start"]) for e in entries]


def read_passages(run: Distillation, path: Path, limit: int | None = None) -> list[Passage]:
    """The verifier's greedy answers to the prompts of a .jsonl file with categories."""
    from ondevice.converters.distil.decoder import RowDecoder

    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:limit]
    tokenizer = run.checkpoint.tokenizer
    prompts = []
    for entry in entries:
        message = [{"role": "user", "content": entry["turns"][0]}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(str(text), add_special_tokens=False))
    slots = max(map(len, prompts)) + _ANSWER_TOKENS
    rows = min(_EVALUATION_ROWS, len(prompts))
    decoder = RowDecoder(run.verifier, rows, -(-slots // 32) * 32, ())
    stops = set(run.checkpoint.eos_token_ids)
    with Watch("Answering held-out prompts", run.quiet) as watch:

        def report(share: float, steps: int) -> None:
            watch.update(share, f"{steps} steps of {rows} rows")

        answers = greedy_answers(decoder, prompts, stops, _ANSWER_TOKENS, report)
    return [
        Passage(entry["category"], (*prompt, *answer), len(prompt))
        for entry, prompt, answer in zip(entries, prompts, answers, strict=True)
    ]
