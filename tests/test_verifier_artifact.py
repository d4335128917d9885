"""The MLX folder: mlx-lm itself is the judge of what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny

from ondevice.artifact import VERIFIER_FILE, VerifierManifest, file_sha256
from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.verifier import plan_shards, write_verifier
from ondevice.errors import BadCheckpoint, CacheUnwritable

TOKENS = [1, 40, 99, 7, 200, 13, 13, 258, 90, 61, 3, 77] * 12


def _mlx_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    model, _ = mlx_lm.load(str(folder))[:2]
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "rope_theta": 500000.0},
        {"rope_scaling": tiny.LLAMA3},
        {"head_dim": 64, "tied_embeddings": False, "rope_scaling": tiny.LLAMA3},
    ],
    ids=["tied-gqa", "untied", "mha", "mqa-theta", "llama3", "wide-heads"],
)
def test_mlx_lm_logits_equal_the_formulas_in_float64(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.tiny_model(seed=5, **changes)
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "source"))
    write_verifier(checkpoint, tmp_path / "verifier")
    expected = tiny.logits_by_hand(model, TOKENS)
    assert expected.std() > 1
    np.testing.assert_allclose(_mlx_logits(tmp_path / "verifier", TOKENS), expected, atol=1e-3)


def test_llama3_scaling_changes_the_logits_of_the_formulas() -> None:
    plain, scaled = tiny.tiny_model(seed=5), tiny.tiny_model(seed=5, rope_scaling=tiny.LLAMA3)
    difference = tiny.logits_by_hand(plain, TOKENS) - tiny.logits_by_hand(scaled, TOKENS)
    assert np.abs(difference).max() > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_rounded_once_to_the_named_dtype(
    dtype: Any, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_verifier(tiny_checkpoint, tmp_path / "verifier", dtype)
    written = mx.load(str(tmp_path / "verifier" / "model.safetensors"))
    for name in tiny_checkpoint.names():
        expected = mx.array(tiny_checkpoint.tensor(name)).astype(getattr(mx, dtype))
        assert written[name].dtype == getattr(mx, dtype)
        assert mx.array_equal(written[name], expected), name


def test_sharded_folder_is_the_same_model(
    tiny_checkpoint: Checkpoint, tiny_verifier_folder: Path, tmp_path: Path
) -> None:
    manifest = write_verifier(tiny_checkpoint, tmp_path / "verifier", shard_bytes=100_000)
    shards = sorted(file.name for file in (tmp_path / "verifier").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards == sorted(name for name in manifest.files_sha256 if name in shards)
    assert "model.safetensors.index.json" in manifest.files_sha256
    np.testing.assert_array_equal(
        _mlx_logits(tmp_path / "verifier", TOKENS), _mlx_logits(tiny_verifier_folder, TOKENS)
    )
    reread = open_checkpoint(tmp_path / "verifier")
    for name in tiny_checkpoint.names():
        np.testing.assert_array_equal(reread.tensor(name), tiny_checkpoint.tensor(name))


def test_shards_keep_order_and_stay_under_the_limit_unless_one_tensor_is_larger() -> None:
    sizes = {"a": 60, "b": 50, "c": 50, "d": 250, "e": 1}
    assert plan_shards(sizes, 100) == [["a"], ["b", "c"], ["d"], ["e"]]


def test_manifest_names_sources_tokenizer_and_the_bytes_written(
    tiny_checkpoint: Checkpoint, tiny_verifier_folder: Path
) -> None:
    manifest = VerifierManifest.read(tiny_verifier_folder / VERIFIER_FILE)
    assert manifest.files_sha256 == {
        name: file_sha256(tiny_verifier_folder / name)
        for name in (
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    }
    assert manifest.tokenizer_sha256 == tiny_checkpoint.tokenizer_sha256
    assert {source.name for source in manifest.sources} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (manifest.family, manifest.dtype, manifest.context) == ("llama", "float32", 4096)


def test_mlx_lm_finds_chat_template_and_every_end_token(
    tiny_model: tiny.TinyModel, tmp_path: Path
) -> None:
    source = tiny.write_folder(tiny_model, tmp_path / "source")
    tiny.write_json(source / "generation_config.json", {"eos_token_id": [0, 3]})
    write_verifier(open_checkpoint(source), tmp_path / "verifier")
    _, tokenizer = mlx_lm.load(str(tmp_path / "verifier"))[:2]
    assert set(tokenizer.eos_token_ids) == {0, 3}
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "in the"}], add_generation_prompt=True
    )
    assert tokenizer.decode(ids) == "<|user|>in the<|end|><|assistant|>"
    assert ids[0] == 2
    assert ids[-2:] == [0, 3]


def test_transformers_reads_the_config_that_was_written(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    model = tiny.tiny_model(rope_scaling=tiny.LLAMA3, tied_embeddings=False)
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "source"))
    write_verifier(checkpoint, tmp_path / "verifier")
    config = LlamaConfig.from_pretrained(tmp_path / "verifier")
    assert config.tie_word_embeddings is False
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["factor"] == tiny.LLAMA3.factor


def test_progress_reaches_the_whole(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_verifier(
        tiny_checkpoint,
        tmp_path / "verifier",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_a_failed_conversion_leaves_the_old_folder_and_nothing_else(
    tiny_model: tiny.TinyModel, tmp_path: Path
) -> None:
    source = tiny.write_folder(tiny_model, tmp_path / "source")
    checkpoint = open_checkpoint(source)
    write_verifier(checkpoint, tmp_path / "out" / "verifier")
    before = (tmp_path / "out" / "verifier" / VERIFIER_FILE).read_bytes()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_verifier(checkpoint, tmp_path / "out" / "verifier", "float16", progress=stop)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["verifier"]
    assert (tmp_path / "out" / "verifier" / VERIFIER_FILE).read_bytes() == before


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = tiny.tiny_model(vocab_size=100)
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "source"))
    with pytest.raises(BadCheckpoint, match="at most 100 tokens"):
        write_verifier(checkpoint, tmp_path / "verifier")
    assert not (tmp_path / "verifier").exists()


def test_a_folder_that_cannot_be_made_is_one_line(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheUnwritable) as caught:
        write_verifier(tiny_checkpoint, tmp_path / "file" / "verifier")
    assert "\n" not in str(caught.value)


def test_tie_word_embeddings_is_always_stated(tiny_verifier_folder: Path) -> None:
    config = json.loads((tiny_verifier_folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize("size_bytes", [4096, 16_384, 200_000])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    tiny_checkpoint: Checkpoint, small_disk: Callable[[int], Path], size_bytes: int
) -> None:
    disk = small_disk(size_bytes)
    with pytest.raises(CacheUnwritable, match="free space") as caught:
        write_verifier(tiny_checkpoint, disk / "verifier")
    assert "\n" not in str(caught.value)
    assert list(disk.iterdir()) == []
