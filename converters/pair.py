"""Verifier and drafter together: the pairs of pairs.toml, made on first use, and a user's own."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from ondevice import blas
from ondevice.artifact import (
    DRAFTER_FILE,
    PAIR_FILE,
    VERIFIER_FILE,
    DrafterManifest,
    PairManifest,
    VerifierManifest,
    file_sha256,
    refuse_occupied,
    replacing,
    sweep,
)
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.download import fetch_weights
from ondevice.converters.progress import Reporter
from ondevice.converters.trained import read_trained
from ondevice.converters.verifier import tensor_bytes, write_verifier
from ondevice.errors import ArtifactError, UnknownPair
from ondevice.home import (
    downloads_folder,
    home_folder,
    locked,
    make_writable,
    pairs_folder,
    require_space,
)
from ondevice.models.pairs import DrafterRecipe, Pair, VerifierRecipe, known_pair, pair_names

VERIFIER_FOLDER, DRAFTER_FOLDER = "verifier", "drafter"
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def prepare_pair(name_or_folder: str | Path, *, quiet: bool = False, rebuild: bool = False) -> Path:
    """Folder of a pair that is ready to run; says on stderr what it does, unless `quiet`.

    A name in pairs.toml is downloaded and converted where that has not been done, or was done by
    another version or recipe (or always, with `rebuild`); a folder that `write_pair` made is
    returned as it is. Raises UnknownPair for anything else, and what downloading and converting
    raise: nothing half-made is left, and finished parts are kept for the next try.
    """
    blas.prepare()
    name = str(name_or_folder)
    if name in pair_names():
        return _prepare_known(name, Reporter(quiet), rebuild)
    # os.path answers False where pathlib raises: a name too long for a path, an unknown ~user.
    folder = os.path.expanduser(name)
    if name and os.path.isfile(os.path.join(folder, PAIR_FILE)):
        return Path(folder)
    if os.path.exists(folder):
        raise UnknownPair(
            f"{folder} is no pair: expected a folder with {PAIR_FILE}; "
            f"known pairs: {', '.join(pair_names())}"
        )
    known_pair(name)
    raise AssertionError("known_pair knows a name that pair_names does not list")


def write_pair(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    name: str,
    drafter: DrafterRecipe,
    verifier: VerifierRecipe | None = None,
    quiet: bool = False,
) -> PairManifest:
    """Convert `checkpoint` to a pair at `folder`, whole or not at all.

    The drafter is cut from the same model, or was taught on it (`drafter.trained`); without
    `verifier` that one is float32. A pair that is there is replaced; BadRequest when `folder` holds
    anything else. Says on stderr what it does, unless `quiet`.
    """
    refuse_occupied(folder, PAIR_FILE)
    reporter = Reporter(quiet)
    verifier = verifier or VerifierRecipe(dtype="float32")
    with replacing(folder) as scratch:
        scratch.mkdir()
        _write_verifier(checkpoint, scratch, verifier, reporter)
        _write_drafter(checkpoint, scratch, drafter, reporter)
        return _write_manifest(checkpoint, scratch, name)


def _prepare_known(name: str, reporter: Reporter, rebuild: bool) -> Path:
    pair, folder = known_pair(name), pairs_folder() / name
    if not rebuild and _complete(folder, pair):
        return folder

    def on_wait() -> None:
        reporter.say("Waiting for another ondevice process to finish converting")

    with locked(home_folder(), on_wait):
        if rebuild or not _complete(folder, pair):
            _build(name, pair, folder, reporter, rebuild)
    return folder


def _build(name: str, pair: Pair, folder: Path, reporter: Reporter, rebuild: bool) -> None:
    """Make what is missing. The home's lock is held, so what is half-made is nobody's."""
    make_writable(folder)
    for part in (VERIFIER_FOLDER, DRAFTER_FOLDER, PAIR_FILE):
        sweep(folder / part)
    checkpoint = open_checkpoint(fetch_weights(pair.source, downloads_folder(), reporter))
    # Taken away first and written last: parts of two recipes are never seen as one pair.
    (folder / PAIR_FILE).unlink(missing_ok=True)
    fresh = rebuild or not _verifier_current(folder, pair)
    if fresh:
        _write_verifier(checkpoint, folder, pair.verifier, reporter)
    if fresh or not _drafter_current(folder, pair):
        _write_drafter(checkpoint, folder, pair.drafter, reporter)
    _write_manifest(checkpoint, folder, name)


def _complete(folder: Path, pair: Pair) -> bool:
    return (
        _named_parts(folder) == (VERIFIER_FOLDER, DRAFTER_FOLDER)
        and _verifier_current(folder, pair)
        and _drafter_current(folder, pair)
    )


def _named_parts(folder: Path) -> tuple[str, str | None] | None:
    try:
        manifest = PairManifest.read(folder / PAIR_FILE)
    except ArtifactError:
        return None
    return manifest.verifier, manifest.drafter


def _verifier_current(folder: Path, pair: Pair) -> bool:
    """Whether the verifier there is what this version would write."""
    try:
        manifest = VerifierManifest.read(folder / VERIFIER_FOLDER / VERIFIER_FILE)
    except ArtifactError:
        return False
    return (
        manifest.dtype == pair.verifier.dtype
        and manifest.converter_version == version("ondevice")
        and [source.sha256 for source in manifest.sources] == [pair.source.member_sha256]
    )


def _drafter_current(folder: Path, pair: Pair) -> bool:
    try:
        manifest = DrafterManifest.read(folder / DRAFTER_FOLDER / DRAFTER_FILE)
    except ArtifactError:
        return False
    recipe = pair.drafter
    trained = recipe.trained_path
    sources = [pair.source.member_sha256, *([file_sha256(trained)] if trained else [])]
    return (
        (recipe.layers is None or recipe.layers == tuple(manifest.layers))
        and recipe.row_counts == tuple(manifest.row_counts)
        and recipe.context_sizes == tuple(manifest.context_sizes)
        and manifest.converter_version == version("ondevice")
        and [source.sha256 for source in manifest.sources] == sources
    )


def _write_verifier(
    checkpoint: Checkpoint, folder: Path, recipe: VerifierRecipe, reporter: Reporter
) -> None:
    sizes = tensor_bytes(checkpoint.config, _WEIGHT_BYTES[recipe.dtype])
    require_space(folder, sum(sizes.values()))
    with reporter.stage(f"Converting the verifier to MLX ({recipe.dtype})", in_bytes=True) as step:
        write_verifier(checkpoint, folder / VERIFIER_FOLDER, recipe.dtype, step)


def _write_drafter(
    checkpoint: Checkpoint, folder: Path, recipe: DrafterRecipe, reporter: Reporter
) -> None:
    trained = read_trained(recipe.trained_path) if recipe.trained_path else None
    layers = trained.header.layers if trained else recipe.layers or ()
    with reporter.stage(f"Building the Core ML drafter ({len(layers)} layers)") as step:
        # Imported when it is due: coremltools takes seconds.
        from ondevice.converters.drafter import convert_drafter

        convert_drafter(
            checkpoint,
            folder / VERIFIER_FOLDER,
            folder / DRAFTER_FOLDER,
            layers=recipe.layers,
            trained=trained,
            row_counts=recipe.row_counts,
            context_sizes=recipe.context_sizes,
            progress=step,
        )


def _write_manifest(checkpoint: Checkpoint, folder: Path, name: str) -> PairManifest:
    manifest = PairManifest(
        name=name,
        verifier=VERIFIER_FOLDER,
        drafter=DRAFTER_FOLDER,
        tokenizer_sha256=checkpoint.tokenizer_sha256,
    )
    manifest.write(folder / PAIR_FILE)
    return manifest
