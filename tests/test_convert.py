"""`ondevice convert`: what people have goes in, what runs comes out, and faults are named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_lm.utils import load_model, quantize_model, save_model

from ondevice.apps.cli import main
from ondevice.artifact import DRAFTER_FILE, DrafterManifest, PairManifest
from ondevice.converters.checkpoint import open_checkpoint
from ondevice.engine import Engine
from ondevice.sampling import SamplingParams
from ondevice.session import Options

SMALL = ["--rows", "1,8", "--context", "64"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "qwen"
    families.write_checkpoint("qwen3", folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "gemma"
    families.write_checkpoint("gemma 3", folder, num_hidden_layers=2)
    return folder


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def test_a_pair_of_two_families_speaks_as_the_verifier_alone(
    source: Path, windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pair"
    pair = ["pair", "--verifier", source, "--drafter", windowed, "--out", out, *SMALL]
    assert convert(*pair, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["written"]
    assert said["drafter"]["compression"] == "lut6"
    manifest = DrafterManifest.read(out / "drafter" / DRAFTER_FILE)
    assert manifest.window == 9
    with Engine.open_folder(out, measure=False) as engine:
        texts = []
        for strategy in ("plain", "sequential"):
            session = engine.session()
            options = Options(SamplingParams(), 40, (), strategy)
            texts.append(session.generate("the thing in it", options))
        assert texts[0].token_ids == texts[1].token_ids
        assert texts[1].stats.num_draft_tokens > 0


def test_a_dry_run_writes_nothing_and_says_how_large_it_gets(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("drafter", source, "--out", tmp_path / "d", "--dry-run", "--json", *SMALL) == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["written"]
    assert said["functions"] == ["t1_s64", "t8_s64"]
    assert list(tmp_path.iterdir()) == []
    assert convert("drafter", source, "--out", tmp_path / "d", "--json", *SMALL) == 0
    weights = (tmp_path / "d/drafter.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat()
    assert abs(weights.st_size / said["weight_bytes"] - 1) < 0.05


def test_a_quantised_folder_of_mlx_community_is_taken_as_it_is_and_dequantised_for_a_drafter(
    source: Path, tmp_path: Path
) -> None:
    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size=64, bits=4)
    save_model(tmp_path / "4bit", model)
    (tmp_path / "4bit" / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "4bit" / name)
    checkpoint = open_checkpoint(tmp_path / "4bit")
    name = "model.layers.1.mlp.down_proj"
    weights = mx.load(str(tmp_path / "4bit" / "model.safetensors"))
    parts = [weights[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases")]
    expected = np.array(mx.dequantize(*parts, group_size=64, bits=4))
    np.testing.assert_allclose(checkpoint.tensor(f"{name}.weight"), expected, atol=1e-6)
    assert convert("verifier", tmp_path / "4bit", "--out", tmp_path / "v") == 0
    taken = mx.load(str(tmp_path / "v" / "model.safetensors"))
    assert all(mx.array_equal(taken[key], value).item() for key, value in weights.items())


def test_a_vocabulary_from_a_corpus_is_proposed_from_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("the thing in the tin " * 50, encoding="utf-8")
    picked = ["--drafter-vocab", "256", "--corpus", tmp_path / "corpus.txt"]
    assert convert("drafter", source, "--out", tmp_path / "d", *SMALL, *picked) == 1 + 1
    wide = tmp_path / "wide"
    families.write_checkpoint("qwen3", wide, num_hidden_layers=2, vocab_size=512)
    picked[1] = "384"
    assert convert("drafter", wide, "--out", tmp_path / "d", *SMALL, *picked) == 0
    manifest = DrafterManifest.read(tmp_path / "d" / DRAFTER_FILE)
    assert manifest.row_to_token is not None
    assert len(manifest.row_to_token) == 384
    assert set(range(len(tiny.vocabulary()))) <= set(manifest.row_to_token)


def damaged(folder: Path, source: Path, change: Any) -> Path:
    shutil.copytree(source, folder)
    change(folder)
    return folder


def edit_config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def edit_weights(change: Any) -> Any:
    def apply(folder: Path) -> None:
        weights = dict(mx.load(str(folder / "model.safetensors")))
        change(weights)
        mx.eval(*weights.values())
        mx.save_safetensors(str(folder / "model.safetensors"), weights)

    return apply


def poison(value: float) -> Any:
    def change(weights: dict[str, mx.array]) -> None:
        array = np.array(weights["model.layers.1.mlp.up_proj.weight"])
        array[3, 4] = value
        weights["model.layers.1.mlp.up_proj.weight"] = mx.array(array)

    return edit_weights(change)


def other_head(weights: dict[str, mx.array]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def without_head(weights: dict[str, mx.array]) -> None:
    del weights["lm_head.weight"]


def to_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def to_index(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[str, tuple[Any, str]] = {
    "missing shard": (to_index, "model-00001-of-00002"),
    "shape mismatch": (edit_config(intermediate_size=64), "mlp.gate_proj.weight"),
    "NaN": (poison(float("nan")), "model.layers.1.mlp.up_proj.weight"),
    "infinity": (poison(float("inf")), "model.layers.1.mlp.up_proj.weight"),
    "rope type": (edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "'yarn'"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "tied with a head": (edit_weights(other_head), "lm_head.weight"),
    "adapter": (to_adapter, "adapter"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_one_line_that_names_it(
    fault: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, named = FAULTS[fault]
    folder = damaged(tmp_path / "bad", source, change)
    if fault == "tied with a head":
        edit_config(tie_word_embeddings=True)(folder)
    assert convert("drafter", folder, "--out", tmp_path / "d", *SMALL) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("ondevice:")]
    assert named in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize("kind", ["drafter", "verifier"])
def test_a_model_that_is_untied_without_a_head_is_refused(
    kind: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(tmp_path / "bad", source, edit_weights(without_head))
    more = SMALL if kind == "drafter" else []
    assert convert(kind, folder, "--out", tmp_path / "d", *more) == 2
    assert "tie_word_embeddings false" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["NaN", "no tokenizer", "adapter", "missing shard"])
def test_a_verifier_s_folder_is_looked_at_as_closely(
    fault: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, named = FAULTS[fault]
    folder = damaged(tmp_path / "bad", source, change)
    assert convert("verifier", folder, "--out", tmp_path / "v") == 2
    assert named in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--compression", "lut5"], "lut6, lut4, int8, fp16"),
        (["--layers", "0-9"], "from 0 to 1"),
        (["--layers", "a"], "--layers"),
        (["--context", "100"], "multiples of 32"),
        (["--drafter-vocab", "256"], "--corpus"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], named: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    assert convert("drafter", source, "--out", tmp_path / "d", *arguments) == 2
    assert named in capsys.readouterr().err


def test_a_full_disk_is_named_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert convert("drafter", source, "--out", tmp_path / "d", *SMALL) == 2
    assert "not enough space" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_somebody_elses_is_left_alone(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert convert("verifier", source, "--out", tmp_path / "mine") == 2
    assert "is not empty" in capsys.readouterr().err


def test_an_artifact_of_another_kind_is_left_alone(
    source: Path, tiny_pair: Path, tmp_path: Path, capsys: Any
) -> None:
    pair = Path(shutil.copytree(tiny_pair, tmp_path / "pair"))
    before = sorted(path.name for path in pair.iterdir())
    assert convert("drafter", source, "--out", pair, *SMALL) == 2
    assert f"{pair} holds a pair; expected a drafter to replace" in capsys.readouterr().err
    assert convert("drafter", source, "--out", pair / "verifier", *SMALL) == 2
    assert "holds a verifier" in capsys.readouterr().err
    assert sorted(path.name for path in pair.iterdir()) == before


def test_a_hub_id_is_taken_from_the_cache_when_offline(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(source, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert convert("verifier", "someone/small", "--out", tmp_path / "v", "--dry-run") == 0
    assert convert("verifier", "someone/absent", "--out", tmp_path / "v", "--dry-run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "could not get someone/absent" in error
    assert "HF_HUB_OFFLINE" in error


def test_what_is_neither_a_path_nor_an_id_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert convert("verifier", "./nowhere", "--out", tmp_path / "v") == 2
    assert "no model at ./nowhere" in capsys.readouterr().err


CONVERT = "import sys; from ondevice.apps.cli import main; sys.exit(main(sys.argv[1:]))"


def kill_after(source: Path, out: Path, wait_s: float | None) -> None:
    """Convert, and kill the conversion when `wait_s` have passed; never, for None."""
    command = [sys.executable, "-c", CONVERT, "convert", "pair", "--verifier", str(source)]
    command += ["--drafter", str(source), "--out", str(out), *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "count", [2, pytest.param(20, marks=pytest.mark.slow)], ids=["twice", "twenty times"]
)
def test_a_conversion_that_is_killed_leaves_nothing_that_opens_and_a_later_one_succeeds(
    count: int, source: Path, tmp_path: Path
) -> None:
    work, rng = tmp_path / "work", np.random.default_rng(count)
    out = work / "pair"
    longest_s = 12.0
    if count > 2:  # moments spread over all of a conversion, however slow the machine
        begun = time.monotonic()
        kill_after(source, tmp_path / "timed", None)
        longest_s = 1.1 * (time.monotonic() - begun)
    for _ in range(count):
        kill_after(source, out, float(rng.uniform(0.5, longest_s)))
        if out.exists():
            PairManifest.read(out / "pair.json")
            Engine.open_folder(out, measure=False).close()
    pair = ["pair", "--verifier", source, "--drafter", source, "--out", out, *SMALL]
    assert convert(*pair) == 0
    assert [name for name in os.listdir(work) if not name.startswith(".")] == ["pair"]
    assert not list(work.glob(".pair.*"))
    Engine.open_folder(out, measure=False).close()
