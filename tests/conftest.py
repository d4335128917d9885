"""Tiny models shared by the whole suite; read-only: a test that changes files copies them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny
from applemac import counted, mac, tools_here  # noqa: F401  # fixtures
from commandline import Run, runner

from ondevice import blas
from ondevice.calibration import Calibration
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.pair import write_pair
from ondevice.converters.verifier import write_verifier
from ondevice.costs import table_from
from ondevice.coststore import CostRecord, identity_of, record_path
from ondevice.deadline import Deadline
from ondevice.engine import Engine
from ondevice.home import HOME_VARIABLE, home_folder
from ondevice.models.pairs import DrafterRecipe

if TYPE_CHECKING:
    from ondevice.apps.baselines import MlxLmPlain

# Before any test module imports MLX, which would keep its slow BLAS.
blas.prepare()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's downloads and pairs, in a home whose measured costs are the suite's own."""
    users, home = home_folder(), tmp_path_factory.mktemp("home")
    for shared in ("downloads", "pairs"):
        (users / shared).mkdir(parents=True, exist_ok=True)
        (home / shared).symlink_to(users / shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Engines wait for their drafters as long as it takes, unless a test gives them a deadline.

    A test machine may be busy, or stopped for a while: its drafters are late without being hung.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ondevice.engine.Deadline", lambda: Deadline(floor_s=86_400.0))
        yield


@pytest.fixture(scope="session")
def tiny_model() -> tiny.TinyModel:
    return tiny.tiny_model()


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny_model: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return open_checkpoint(tiny.write_folder(tiny_model, folder))


@pytest.fixture(scope="session")
def tiny_verifier_folder(
    tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tiny-verifier") / "verifier"
    write_verifier(tiny_checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_pair(
    tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, home: Path
) -> Path:
    """Folder of a pair: the tiny verifier in float32 and a drafter of its first layer.

    Its costs count as measured, so that opening it is quick and says nothing: about what a
    calibration finds for it.
    """
    folder = tmp_path_factory.mktemp("tiny-pair") / "pair"
    recipe = DrafterRecipe(layers=(0,), row_counts=(1, 8), context_sizes=(64, 256))
    write_pair(tiny_checkpoint, folder, name="tiny", drafter=recipe, quiet=True)
    identity = identity_of(folder, "emulator-fp32")
    verifier_ms = [0.9 + 0.03 * rows for rows in range(1, 17)]
    table = table_from(verifier_ms, [(1, 0.45), (8, 0.95)], plain_ms=1.1)
    CostRecord.of(identity, Calibration(table, took_s=0.0, spread=0.0)).write(record_path(identity))
    return folder


@pytest.fixture(scope="session")
def twin_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot tell token 2i from token 2i + 1: their logits are the same numbers."""
    model = tiny.tiny_model(seed=3)
    embedding = model.tensors["model.embed_tokens.weight"]
    embedding[1::2] = embedding[0::2]
    folder = tmp_path_factory.mktemp("twins")
    checkpoint = open_checkpoint(tiny.write_folder(model, folder / "llama"))
    recipe = DrafterRecipe(layers=(0,), row_counts=(1, 8), context_sizes=(256,))
    write_pair(checkpoint, folder / "pair", name="twins", drafter=recipe, quiet=True)
    return folder / "pair"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a memory disk of so many bytes; only root may."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size_bytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount a small disk")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


@pytest.fixture(scope="module")
def engine(tiny_pair: Path) -> Iterator[Engine]:
    """The tiny pair, opened once a file."""
    with Engine.open_folder(tiny_pair) as engine:
        yield engine


@pytest.fixture(scope="module")
def mlx_lm(tiny_pair: Path, engine: Engine) -> MlxLmPlain:
    """mlx-lm on the same verifier, on this thread."""
    from ondevice.apps.baselines import MlxLmPlain  # brings MLX

    return MlxLmPlain(tiny_pair / "verifier", engine.model.end_tokens)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, in this process; see `commandline`."""
    return runner(capfd, monkeypatch)


@pytest.fixture
def speculating(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny pair as `profile` opens it, with a drafter that is right in 8 of 10 places."""
    from profiling import open_given

    from ondevice.apps import profile
    from ondevice.costs import StepCosts

    # Costs stay as given: the tiny verifier is so quick that no draft would be worth its time.
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr(profile, "open_engine", lambda _: open_given(tiny_pair, 0.8))
    return tiny_pair
