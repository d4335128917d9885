"""Reading GGUF files: exact weights, llama.cpp's row order undone, tokenizer from metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import gguf_bytes
import mlx.core as mx
import numpy as np
import pytest
import tiny
from refusing import assert_refused

from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.tokenizer import tokenizer_digest, tokenizer_from_folder
from ondevice.converters.verifier import write_verifier
from ondevice.errors import BadCheckpoint, UnsupportedModel

TEXT = "the thin  thing's 12345 änd\n\n\tin it <|user|>x"


def _with_metadata(tmp_path: Path, **changes: Any) -> Path:
    model = tiny.tiny_model()
    metadata = tiny.gguf_metadata(model.config)
    for key, value in changes.items():
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return tiny.write_gguf(model, tmp_path / "model.gguf", metadata)


def _plain_metadata(model: tiny.TinyModel) -> dict[str, Any]:
    return {
        key: value if isinstance(value, (str, list)) else np.array(value).tolist()
        for key, value in tiny.gguf_metadata(model.config).items()
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False}, {"num_kv_heads": 1}, {"head_dim": 64, "num_kv_heads": 4}],
)
def test_gguf_and_folder_of_one_model_read_alike(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.tiny_model(seed=3, **changes)
    gguf = open_checkpoint(tiny.write_gguf(model, tmp_path / "model.gguf"))
    folder = open_checkpoint(tiny.write_folder(model, tmp_path / "model"))
    assert gguf.config == folder.config == model.config
    assert gguf.eos_token_ids == folder.eos_token_ids
    assert gguf.tokenizer_sha256 == folder.tokenizer_sha256
    assert gguf.names() == folder.names()
    for name, tensor in model.tensors.items():
        np.testing.assert_array_equal(gguf.tensor(name), tensor)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_quantised_weight_is_the_block_s_own_value(kind: str, tmp_path: Path) -> None:
    model = tiny.tiny_model(seed=7)
    stored, exact = {}, {}
    for name, tensor in model.tensors.items():
        blocks = "F32" if tensor.ndim == 1 else kind
        heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
        count = next((heads[key] for key in heads if key in name), None)
        rows = tensor if count is None else tiny.interleaved(tensor, count)
        stored[tiny.gguf_name(name)], values = gguf_bytes.quantised(blocks, rows)
        exact[name] = values if count is None else _back(values, count)
    file = gguf_bytes.write(tmp_path / "model.gguf", _plain_metadata(model), stored)
    checkpoint = open_checkpoint(file)
    for name, values in exact.items():
        # One fused multiply-add instead of two roundings is the only freedom left.
        np.testing.assert_allclose(checkpoint.tensor(name), values, rtol=0, atol=1e-6)
        assert np.abs(values - model.tensors[name]).max() < 1.0


def _back(rows: np.ndarray, heads: int) -> np.ndarray:
    head_dim = rows.shape[0] // heads
    order = np.argsort(np.arange(head_dim).reshape(2, head_dim // 2).T.ravel())
    return rows.reshape(heads, head_dim, -1)[:, order].reshape(rows.shape)


def test_llama3_scaling_is_recovered_from_the_table_of_divisors(tmp_path: Path) -> None:
    from ondevice.models.rope import Llama3Scaling

    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    model = tiny.tiny_model(rope_theta=500000.0, rope_scaling=scaling)
    frequencies = 500000.0 ** (-np.arange(0, 32, 2) / 32)
    turns = 8192 * frequencies / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / (blend + (1 - blend) / 32)).astype(np.float32)
    good = tiny.write_gguf(model, tmp_path / "a.gguf", extra={"rope_freqs.weight": divisors})
    assert open_checkpoint(good).config == model.config
    other = tiny.write_gguf(model, tmp_path / "b.gguf", extra={"rope_freqs.weight": divisors**2})
    assert "rope_freqs" in assert_refused(UnsupportedModel, other)


def test_exported_folder_keeps_tokenizer_identity_ids_and_template(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_gguf(tiny.tiny_model(), tmp_path / "model.gguf"))
    write_verifier(checkpoint, tmp_path / "verifier")
    exported = tokenizer_from_folder(tmp_path / "verifier")
    assert tokenizer_digest(exported) == checkpoint.tokenizer_sha256
    assert exported.encode(TEXT) == checkpoint.tokenizer.encode(TEXT)
    assert exported.decode(exported.encode(TEXT)) == TEXT
    assert exported.chat_template == checkpoint.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert (exported.bos_token_id, exported.eos_token_id) == (1, 0)


def test_tokenizer_identity_changes_with_meaning_and_not_with_the_template(tmp_path: Path) -> None:
    base = open_checkpoint(_with_metadata(tmp_path)).tokenizer_sha256
    template = {"tokenizer.chat_template": "{{ messages }}"}
    assert open_checkpoint(_with_metadata(tmp_path, **template)).tokenizer_sha256 == base
    swapped = tiny.vocabulary()
    swapped[50], swapped[51] = swapped[51], swapped[50]
    for change in (
        {"tokenizer.ggml.tokens": swapped},
        {"tokenizer.ggml.merges": list(reversed(tiny.MERGES))},
        {"tokenizer.ggml.pre": "smollm"},
        {"tokenizer.ggml.token_type": mx.array([1] * len(swapped), dtype=mx.int32)},
    ):
        assert open_checkpoint(_with_metadata(tmp_path, **change)).tokenizer_sha256 != base


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_survives_every_splitting_rule(pre: str, tmp_path: Path) -> None:
    tokenizer = open_checkpoint(_with_metadata(tmp_path, **{"tokenizer.ggml.pre": pre})).tokenizer
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_begin_token_is_added_when_the_metadata_says_so(tmp_path: Path) -> None:
    add = {"tokenizer.ggml.add_bos_token": mx.array(True)}
    assert open_checkpoint(_with_metadata(tmp_path, **add)).tokenizer.encode("in")[0] == 1
    assert open_checkpoint(_with_metadata(tmp_path)).tokenizer.encode("in")[0] != 1


def test_end_of_turn_token_also_ends_a_text(tmp_path: Path) -> None:
    eot = {"tokenizer.ggml.eot_token_id": mx.array(3, dtype=mx.uint32)}
    assert open_checkpoint(_with_metadata(tmp_path, **eot)).eos_token_ids == (0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": mx.array(8, dtype=mx.uint32)}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling"),
        ({"llama.rope.dimension_count": mx.array(16, dtype=mx.uint32)}, "dimension_count"),
        ({"llama.attention.head_count_kv": mx.array([2, 1], dtype=mx.uint32)}, "differ by layer"),
    ],
)
def test_what_is_not_plain_llama_is_refused_by_name(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    message = assert_refused(UnsupportedModel, _with_metadata(tmp_path, **change))
    assert named in message
    assert "supported: " in message


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "x"}])
def test_another_tokenizer_is_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"model\.gguf: tokenizer .* supported: "):
        _ = open_checkpoint(_with_metadata(tmp_path, **change)).tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.merges": ["q nosuchtoken"]},
    ],
)
def test_a_damaged_tokenizer_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.gguf: ") as caught:
        _ = open_checkpoint(_with_metadata(tmp_path, **change)).tokenizer
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count"])
def test_missing_metadata_is_named(key: str, tmp_path: Path) -> None:
    assert key in assert_refused(BadCheckpoint, _with_metadata(tmp_path, **{key: None}))


def test_a_gguf_cut_anywhere_is_refused_with_both_sizes(tmp_path: Path) -> None:
    file = tiny.write_gguf(tiny.tiny_model(), tmp_path / "model.gguf")
    whole = file.read_bytes()
    for kept in [*range(0, 6000, 377), *range(6000, len(whole), 40_001), len(whole) - 64]:
        file.write_bytes(whole[:kept])
        message = assert_refused(BadCheckpoint, file)
        assert kept < 16 or str(kept) in message


def test_garbage_after_the_magic_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    for _ in range(50):
        file.write_bytes(b"GGUF\x03\0\0\0" + rng.bytes(500))
        assert_refused(BadCheckpoint, file)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" * 100)
    assert "GGUF" in assert_refused(BadCheckpoint, tmp_path / "model.bin")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_other_tensor_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (kind, (264, 256), b"\0" * (264 * 512))}
    file = gguf_bytes.write(tmp_path / "model.gguf", {"general.architecture": "llama"}, tensors)
    message = assert_refused(UnsupportedModel, file)
    assert f"of type {kind}" in message
    assert "Q4_1" in message


def test_misshapen_and_missing_tensors_are_named(tmp_path: Path) -> None:
    changes = {"llama.feed_forward_length": mx.array(128, dtype=mx.uint32)}
    message = assert_refused(BadCheckpoint, _with_metadata(tmp_path, **changes))
    assert "gate_proj" in message
    assert "[128, 64]" in message
    changes = {"llama.block_count": mx.array(5, dtype=mx.uint32)}
    assert "model.layers.2" in assert_refused(BadCheckpoint, _with_metadata(tmp_path, **changes))


def test_bfloat16_is_read_without_a_rounding(tmp_path: Path) -> None:
    """mx.load makes it float16, in which small weights lose their last bits."""
    model = tiny.tiny_model(seed=7)
    stored, exact = {}, {}
    for name, tensor in model.tensors.items():
        words = ((tensor * np.float32(1e-4)).view(np.uint32) >> 16).astype(np.uint16)
        exact[name] = (words.astype(np.uint32) << 16).view(np.float32)
        for part, count in (("q_proj", model.config.num_heads), ("k_proj", 2)):
            if part in name:
                exact[name] = tiny.interleaved(exact[name], count)
        words = (exact[name].view(np.uint32) >> 16).astype("<u2")
        stored[tiny.gguf_name(name)] = ("BF16", tensor.shape, words.tobytes())
    file = gguf_bytes.write(tmp_path / "bf16.gguf", _plain_metadata(model), stored)
    checkpoint = open_checkpoint(file)
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(checkpoint.tensor(name), exact[name])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_gguf_and_its_folder_read_alike(family: str, tmp_path: Path) -> None:
    families.write_checkpoint(family, tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    arrays = {tiny.gguf_name(name): mx.array(folder.tensor(name)) for name in folder.names()}
    metadata = {
        key.replace("llama.", f"{family}."): value
        for key, value in tiny.gguf_metadata(folder.config).items()
    }
    metadata["general.architecture"] = family
    mx.save_gguf(str(tmp_path / "model.gguf"), arrays, metadata)
    gguf = open_checkpoint(tmp_path / "model.gguf")
    assert gguf.config == folder.config
    assert gguf.names() == folder.names()
    for name in folder.names():
        np.testing.assert_array_equal(gguf.tensor(name), folder.tensor(name))
