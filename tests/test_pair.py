"""Pairs: made whole or not at all, made once, and made again when the recipe changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from ondevice import home
from ondevice.artifact import (
    PAIR_FILE,
    DrafterManifest,
    PairManifest,
    VerifierManifest,
    file_sha256,
)
from ondevice.converters import pair as pair_module
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.pair import prepare_pair, write_pair
from ondevice.converters.trained import TrainedHeader, read_trained, write_trained
from ondevice.errors import BadRequest, CacheUnwritable, UnknownPair
from ondevice.models.pairs import (
    DrafterRecipe,
    Pair,
    VerifierRecipe,
    WheelSource,
    default_pair,
    known_pair,
    pair_names,
)

RECIPE = DrafterRecipe(layers=(0, 1), row_counts=(1,), context_sizes=(32,))


def test_default_pair_is_known_and_pinned() -> None:
    assert pair_names()[0] == default_pair() == "smollm2"
    pair = known_pair("smollm2")
    assert pair.source.wheel_sha256.startswith("bcc81830")
    assert pair.source.member_sha256.startswith("b179c952")
    assert pair.drafter.row_counts == (1, 8, 64)
    assert pair.drafter.context_sizes == (512, 2048)
    trained = pair.drafter.trained_path
    assert trained is not None
    assert trained.stat().st_size <= 20_000_000
    assert read_trained(trained).header.verifier_sha256 == (pair.source.member_sha256,)


def test_manifests_of_a_pair_agree(tiny_pair: Path, tiny_checkpoint: Checkpoint) -> None:
    pair = PairManifest.read(tiny_pair / PAIR_FILE)
    verifier = VerifierManifest.read(tiny_pair / "verifier" / "ondevice.json")
    drafter = DrafterManifest.read(tiny_pair / "drafter" / "drafter.json")
    identities = {part.tokenizer_sha256 for part in (pair, verifier, drafter)}
    assert identities == {tiny_checkpoint.tokenizer_sha256}
    assert verifier.sources == drafter.sources == tiny_checkpoint.sources
    assert drafter.layers == [0]
    assert prepare_pair(tiny_pair) == tiny_pair


@pytest.mark.parametrize("made", [False, True], ids=["missing", "not a pair"])
def test_what_is_no_pair_is_refused_with_the_known_names(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    with pytest.raises(UnknownPair, match="smollm2") as caught:
        prepare_pair(folder)
    assert "\n" not in str(caught.value)


def test_what_is_no_pair_is_told_in_a_user_s_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UnknownPair) as caught:
            prepare_pair(path)
        assert str(caught.value) == (
            f"{path} is no pair: expected a folder with pair.json; known pairs: smollm2"
        )


@pytest.mark.parametrize("name", ["", "x" * 5000, "~no-such-user/pair", "a\0b"])
def test_a_name_that_is_no_path_is_no_pair(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tiny_pair)
    with pytest.raises(UnknownPair, match=r"no pair '.*smollm2"):
        prepare_pair(name)


def test_a_folder_with_other_files_is_never_replaced(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BadRequest, match="not empty"):
        write_pair(tiny_checkpoint, tmp_path, name="x", quiet=True, drafter=RECIPE)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failing_drafter_leaves_no_pair(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = DrafterRecipe(layers=(7,), row_counts=(1,), context_sizes=(32,))
    with pytest.raises(BadRequest):
        write_pair(tiny_checkpoint, tmp_path / "pair", name="x", quiet=True, drafter=bad)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A tiny model under the name "tiny", its weights as if they had been downloaded already."""
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    home.downloads_folder().mkdir(parents=True)
    weights = tiny.write_gguf(tiny.tiny_model(), home.downloads_folder() / "tiny.gguf")
    raw = weights.read_bytes()
    source = WheelSource(
        distribution="tiny-weights",
        version="1.0",
        wheel_bytes=len(raw),
        wheel_sha256="0" * 64,
        member="tiny/tiny.gguf",
        member_bytes=len(raw),
        member_sha256=hashlib.sha256(raw).hexdigest(),
    )
    pair = Pair(
        description="tiny",
        source=source,
        verifier=VerifierRecipe(dtype="float32"),
        drafter=RECIPE,
    )
    _make_known(pair, monkeypatch)
    return pair


def _make_known(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "known_pair", lambda name: pair)
    monkeypatch.setattr(pair_module, "pair_names", lambda: ["tiny"])


def _times(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_mtime_ns for name in ("verifier", "drafter", PAIR_FILE)}


def test_a_known_pair_is_made_once(known: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    folder = prepare_pair("tiny")
    assert folder == home.pairs_folder() / "tiny"
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Converting the verifier to MLX (float32)",
        "Building the Core ML drafter (2 layers)",
    ]
    before = _times(folder)
    assert prepare_pair("tiny") == folder
    assert capfd.readouterr().err == ""
    assert _times(folder) == before
    names = {path.name for path in folder.iterdir()}
    assert names == {"verifier", "drafter", PAIR_FILE}


def test_another_recipe_makes_only_what_it_changes(
    known: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_pair("tiny", quiet=True)
    before = _times(folder)
    drafter = RECIPE.model_copy(update={"layers": (1,)})
    _make_known(known.model_copy(update={"drafter": drafter}), monkeypatch)
    prepare_pair("tiny", quiet=True)
    after = _times(folder)
    assert after["verifier"] == before["verifier"]
    assert after["drafter"] > before["drafter"]
    assert DrafterManifest.read(folder / "drafter" / "drafter.json").layers == [1]


def test_a_drafter_is_made_again_when_the_trained_file_is_another(
    known: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(home.downloads_folder() / "tiny.gguf")
    path = tmp_path / "drafter.safetensors"

    def train(layer: int) -> str:
        own = {
            name.replace(f"layers.{layer}.", "layers.0."): checkpoint.tensor(name)
            for name in checkpoint.names()
            if f"layers.{layer}." in name or name == "model.norm.weight"
        }
        header = TrainedHeader(
            layers=(layer,),
            verifier="tiny",
            verifier_sha256=(known.source.member_sha256,),
            tokenizer_sha256=checkpoint.tokenizer_sha256,
        )
        write_trained(path, header, range(128), own)
        return file_sha256(path)

    recipe = RECIPE.model_copy(update={"layers": None, "trained": str(path)})
    _make_known(known.model_copy(update={"drafter": recipe}), monkeypatch)
    for layer in (0, 1):
        digest = train(layer)
        folder = prepare_pair("tiny", quiet=True)
        manifest = DrafterManifest.read(folder / "drafter" / "drafter.json")
        assert manifest.layers == [layer]
        assert manifest.head_rows == 128
        assert manifest.sources[-1].sha256 == digest
    before = _times(folder)
    assert prepare_pair("tiny", quiet=True) == folder
    assert _times(folder) == before


@pytest.mark.parametrize(
    "damage", ["drafter/drafter.json", "verifier/ondevice.json", PAIR_FILE], ids=lambda path: path
)
def test_a_part_that_an_interrupted_run_did_not_finish_is_made_again(
    known: Pair, damage: str
) -> None:
    folder = prepare_pair("tiny", quiet=True)
    (folder / damage).unlink()
    (folder / ".drafter.left.ondevice-new").mkdir()
    prepare_pair("tiny", quiet=True)
    assert (folder / damage).is_file()
    assert PairManifest.read(folder / PAIR_FILE).name == "tiny"
    assert not (folder / ".drafter.left.ondevice-new").exists()


def test_a_pair_whose_verifier_has_the_old_manifest_is_made_again(known: Pair) -> None:
    folder = prepare_pair("tiny", quiet=True)
    file = folder / "verifier" / "ondevice.json"
    content = json.loads(file.read_text())
    hashes = content.pop("files_sha256")
    content |= {
        "format": "ondevice-verifier-1",
        "weights_sha256": {"model.safetensors": hashes["model.safetensors"]},
    }
    file.write_text(json.dumps(content))
    prepare_pair("tiny", quiet=True)
    assert VerifierManifest.read(file).files_sha256 == hashes


@pytest.mark.parametrize("verifier", ["../elsewhere", "other"])
def test_a_known_pair_whose_manifest_names_other_folders_is_made_again(
    known: Pair, verifier: str
) -> None:
    folder = prepare_pair("tiny", quiet=True)
    content = json.loads((folder / PAIR_FILE).read_text())
    (folder / PAIR_FILE).write_text(json.dumps(content | {"verifier": verifier}))
    prepare_pair("tiny", quiet=True)
    assert PairManifest.read(folder / PAIR_FILE).verifier == "verifier"


def test_ctrl_c_in_the_drafter_keeps_the_verifier_and_shows_no_pair(
    known: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair_module, "_write_drafter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_pair("tiny", quiet=True)
    folder = home.pairs_folder() / "tiny"
    assert [path.name for path in folder.iterdir()] == ["verifier"]
    time_ns = (folder / "verifier").stat().st_mtime_ns
    assert prepare_pair("tiny", quiet=True) == folder
    assert (folder / "verifier").stat().st_mtime_ns == time_ns


def test_rebuild_replaces_everything(known: Pair) -> None:
    folder = prepare_pair("tiny", quiet=True)
    before = _times(folder)
    prepare_pair("tiny", quiet=True, rebuild=True)
    after = _times(folder)
    assert all(after[name] > before[name] for name in before)


def test_an_unwritable_cache_is_one_line(
    known: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CacheUnwritable, match="ONDEVICE_HOME") as caught:
        prepare_pair("tiny")
    assert "\n" not in str(caught.value)


def test_home_is_the_variable_or_the_platform_s_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import platformdirs

    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    assert home.home_folder() == tmp_path
    monkeypatch.setenv("ONDEVICE_HOME", "")
    assert home.home_folder() == platformdirs.user_cache_path("ondevice")


def test_two_processes_never_hold_the_lock_together(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ondevice.home import locked\n"
        "folder = Path(sys.argv[1])\n"
        "for _ in range(20):\n"
        "    with locked(folder):\n"
        "        (folder / 'inside').touch(exist_ok=False)\n"
        "        time.sleep(0.002)\n"
        "        (folder / 'inside').unlink()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]


def test_who_waits_for_the_lock_is_told_and_a_dead_holder_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ondevice.home import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        waited: list[bool] = []

        def on_wait() -> None:
            waited.append(True)
            holder.kill()

        with home.locked(tmp_path, on_wait):
            assert waited == [True]


@pytest.mark.slow
def test_smollm2_from_a_local_wheel_knows_the_capital_of_france(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the network, or PIP_FIND_LINKS with the wheel; proves llama.cpp's row order undone."""
    import mlx_lm

    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    folder = prepare_pair("smollm2")
    model, tokenizer = mlx_lm.load(str(folder / "verifier"))[:2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
    shutil.rmtree(folder)
