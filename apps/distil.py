"""`ondevice distil`: from a verifier to a pair whose drafter was taught on it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ondevice.apps.failures import say
from ondevice.artifact import PAIR_FILE, refuse_occupied
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.distil.material import Material
from ondevice.converters.distil.recipe import Recipe
from ondevice.converters.distil.run import Distillation, Effort
from ondevice.converters.distil.workers import Workers, prepared_workers
from ondevice.converters.download import fetch_weights
from ondevice.converters.pair import VERIFIER_FOLDER, write_pair
from ondevice.converters.progress import Reporter
from ondevice.converters.trained import TrainedDrafter, check_trained, read_trained
from ondevice.errors import BadRequest, UnknownPair
from ondevice.home import downloads_folder, home_folder, locked, make_writable
from ondevice.models.pairs import DrafterRecipe, known_pair, pair_names

CACHE_BYTES = 1 << 30
"""Freed buffers that MLX may keep; batches have many shapes, and each keeps its own."""

SMALL_RATE = 3e-4
"""Learning rate where training begins with a drafter that has learned already."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call. source: a known pair, the folder of a pair, or a checkpoint.

    work: checkpoints, texts, weights and card; output: the pair that is written at the end. None
    takes folders of the home. start: a trained drafter; None takes the pair's own when there is
    material of the user's.
    """

    source: str
    effort: Effort
    material: Material
    recipe: Recipe
    work: Path | None = None
    output: Path | None = None
    start: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    checkpoint: Checkpoint
    licence: str
    trained: Path | None = None


def request(
    source: str,
    hours: float,
    texts: Sequence[Path],
    prompts: Sequence[Path],
    layers: str | None,
    rows: int | None,
    seed: int,
    output: Path | None,
    work: Path | None,
    start: Path | None,
    as_json: bool,
) -> Request:
    """The command line's words as a request; BadRequest for layers or rows that are none."""
    chosen: dict[str, Any] = {"seed": seed}
    if layers is not None:
        chosen["layers"] = _indices(layers)
    if rows is not None:
        chosen["rows"] = rows
    try:
        recipe = Recipe(**chosen)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise BadRequest(
            f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']}"
        ) from None
    material = Material(tuple(texts), tuple(prompts))
    return Request(source, Effort(hours), material, recipe, work, output, start, as_json)


def _indices(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadRequest(f"layers: expected indices such as 0,1,2, got {text!r}") from None


def run(request: Request) -> None:
    """Make the data, train, measure, convert; prints what came of it.

    Raises BadRequest for parameters out of range and material that cannot be read, UnsupportedModel
    for a verifier that cannot be distilled, CacheUnwritable when a disk is full: what was finished
    is kept, and the same call goes on with it.
    """
    effort = request.effort.checked()
    count = prepared_workers()  # nothing else of ours runs meanwhile
    source = _source(request.source)
    work = request.work or home_folder() / "distil" / source.name
    output = request.output or home_folder() / "distilled" / source.name
    start = _start(request, source)
    recipe = request.recipe
    if start is not None and "rate" not in recipe.model_fields_set:
        recipe = recipe.model_copy(update={"rate": SMALL_RATE})
    if output.resolve() == work.resolve():
        raise BadRequest(f"--work and --output: expected two folders, got {output} for both")
    refuse_occupied(output, PAIR_FILE)  # now, not after the hours
    checkpoint, workers = source.checkpoint, Workers(count)
    distillation = Distillation(checkpoint, recipe, request.material, work, start, workers=workers)
    distillation.check()
    for folder, option in ((output.parent, "--output"), (work, "--work")):
        make_writable(folder, f"give another folder with {option}")
    with locked(work, lambda: say(f"Waiting for another run in {work}")), workers:
        distillation.claim()
        try:
            _distil(distillation, effort, source, output, request.as_json)
        except KeyboardInterrupt:
            say(f"Stopped; the same command goes on with what is finished in {work}")
            raise


def _distil(
    run: Distillation, effort: Effort, source: _Source, output: Path, as_json: bool
) -> None:
    import mlx.core as mx

    from ondevice.converters.distil.finish import make_card, write_drafter

    mx.set_cache_limit(CACHE_BYTES)
    texts = run.make_data(effort)
    student, position = run.train(texts, effort)
    drafter = write_drafter(run, student, run.rows(texts))
    card = make_card(run, drafter, texts, position, licence=source.licence)
    recipe = DrafterRecipe(trained=str(drafter.path.absolute()))
    write_pair(source.checkpoint, output, name=source.name, drafter=recipe)
    if as_json:
        content = {"pair": str(output), "work": str(run.work), "card": card.model_dump(mode="json")}
        print(json.dumps(content))
    else:
        print(card.readme())
        print(f"Talk with it: ondevice chat {output}")


def _start(request: Request, source: _Source) -> TrainedDrafter | None:
    own = request.material.texts or request.material.prompts
    path = request.start or (source.trained if own else None)
    if path is None:
        return None
    trained = read_trained(path)
    check_trained(trained, source.checkpoint)
    for name in ("layers", "rows"):
        if name in request.recipe.model_fields_set:
            raise BadRequest(
                f"{name}: training begins with {path.name}, which has its own; leave --{name} out"
            )
    return trained


def _source(name: str) -> _Source:
    if name in pair_names():
        pair = known_pair(name)
        reporter = Reporter()
        checkpoint = open_checkpoint(fetch_weights(pair.source, downloads_folder(), reporter))
        return _Source(name, checkpoint, pair.licence, pair.drafter.trained_path)
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        raise UnknownPair(
            f"no pair or model {name!r}: expected one of {', '.join(pair_names())}, the folder of "
            "a pair, a Hugging Face folder or a .gguf file"
        )
    inner = path / VERIFIER_FOLDER if (path / PAIR_FILE).is_file() else path
    checkpoint = open_checkpoint(inner)
    return _Source(path.resolve().stem, checkpoint, "that of the verifier")
