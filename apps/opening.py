"""Opening a pair for a person who waits: what it is doing is on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice import blas
from ondevice.apps.terminal import keys_unseen, stdout_kept_clean, waiting
from ondevice.engine import Engine
from ondevice.errors import ArtifactError
from ondevice.home import pairs_folder
from ondevice.models.pairs import pair_names


def open_engine(pair: str, *, measure: bool = True) -> Engine:
    """The pair's engine; a named pair is downloaded and converted first. Raises UserError.

    measure: where its costs on this machine are not known yet, measure them.
    """
    blas.prepare()
    with stdout_kept_clean(), keys_unseen():
        with waiting(f"opening {pair}"):
            from ondevice.converters.pair import prepare_pair

        folder = prepare_pair(pair)
        with explained(folder), waiting(f"loading {pair}"):
            engine = Engine.open_folder(folder, measure=False)
        if measure:
            engine.measure_costs()
    return engine


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """An ArtifactError about the pair in `folder` ends with its remedy, if we know one."""
    try:
        yield
    except ArtifactError as error:
        if not (advice := remedy(folder)):
            raise
        raise ArtifactError(f"{error} ({advice})") from error


def remedy(folder: Path) -> str:
    """How to mend the damaged pair `folder`; "" unless it is one that is made on demand."""
    made_here = folder.parent == pairs_folder() and folder.name in pair_names()
    return f"delete {folder}: it is made anew" if made_here else ""


def placement(engine: Engine) -> list[str]:
    """What runs where on this machine, one line a unit."""
    import mlx.core as mx

    device = "GPU" if mx.default_device().type == mx.gpu else "CPU"
    drafted = engine.drafter_place or f"none ({engine.model.no_drafter})"
    return [f"drafter: {drafted}", f"verifier: MLX on {device}"]
