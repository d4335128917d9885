"""Reading Hugging Face folders: what is written is what is read, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from refusing import assert_refused

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.errors import BadCheckpoint, UnsupportedModel


def _edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | changes)
    return folder


@pytest.fixture
def folder(tiny_model: tiny.TinyModel, tmp_path: Path) -> Path:
    return tiny.write_folder(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_back_widened_exactly(
    tiny_model: tiny.TinyModel, dtype: str, shards: int, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny.write_folder(tiny_model, tmp_path / "m", dtype, shards))
    assert checkpoint.names() == list(tiny_model.tensors)
    for name, written in tiny_model.tensors.items():
        expected = np.array(mx.array(written).astype(getattr(mx, dtype)).astype(mx.float32))
        read = checkpoint.tensor(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("new_rope", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": tiny.LLAMA3, "rope_theta": 500000.0},
        {"tied_embeddings": False, "num_kv_heads": 1},
    ],
)
def test_configuration_is_read_in_both_ways_of_writing_rope(
    changes: dict[str, Any], new_rope: bool, tmp_path: Path
) -> None:
    model = tiny.tiny_model(**changes)
    folder = tiny.write_folder(model, tmp_path / "model", new_rope=new_rope)
    assert open_checkpoint(folder).config == model.config


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    model = tiny.tiny_model(num_kv_heads=4, tied_embeddings=False, head_dim=16)
    folder = tiny.write_folder(model, tmp_path / "model")
    kept = {"model_type", "vocab_size", "hidden_size", "intermediate_size"}
    kept |= {"num_hidden_layers", "num_attention_heads"}
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", {key: config[key] for key in kept})
    ours, theirs = open_checkpoint(folder).config, LlamaConfig.from_pretrained(folder)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.context == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings


def test_only_the_model_s_own_tensors_have_names(tiny_checkpoint: Checkpoint) -> None:
    assert "lm_head.weight" not in tiny_checkpoint.names()
    with pytest.raises(KeyError):
        tiny_checkpoint.tensor("lm_head.weight")


def test_a_tensor_read_in_one_thread_is_used_in_another(tiny_checkpoint: Checkpoint) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        sums = list(
            pool.map(lambda name: tiny_checkpoint.tensor(name).sum(), ["model.norm.weight"])
        )
    assert sums[0] == tiny_checkpoint.tensor("model.norm.weight").sum()


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert open_checkpoint(folder).eos_token_ids == (0,)
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": [3, 0]})
    assert open_checkpoint(folder).eos_token_ids == (3, 0)
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": 9999})
    assert "below 264" in assert_refused(BadCheckpoint, folder)


def test_sources_carry_the_hash_of_each_file(folder: Path) -> None:
    from ondevice.artifact import file_sha256

    for source in open_checkpoint(folder).sources:
        assert source.sha256 == file_sha256(folder / source.name)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    assert "no model at" in assert_refused(BadCheckpoint, tmp_path / "nowhere")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert f"expected {missing}" in assert_refused(BadCheckpoint, folder)


def test_a_missing_shard_is_named(tiny_model: tiny.TinyModel, tmp_path: Path) -> None:
    folder = tiny.write_folder(tiny_model, tmp_path / "model", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002" in assert_refused(BadCheckpoint, folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_truncated_safetensors_is_refused_at_open(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    message = assert_refused(BadCheckpoint, folder)
    assert "model.safetensors" in message
    assert "download it again" in message


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_a_damaged_config_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in assert_refused(BadCheckpoint, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": 0},
        {"vocab_size": None},
        {"num_key_value_heads": 3},
        {"head_dim": 31},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_impossible_sizes_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    assert_refused(BadCheckpoint, _edit_config(folder, **changes))


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    message = assert_refused(BadCheckpoint, _edit_config(folder, intermediate_size=128))
    assert "model.layers.0.mlp.gate_proj.weight" in message
    assert "[128, 64]" in message
    assert "[96, 64]" in message


def test_a_missing_tensor_is_named(folder: Path) -> None:
    message = assert_refused(BadCheckpoint, _edit_config(folder, num_hidden_layers=3))
    assert "model.layers.2.input_layernorm.weight" in message


@pytest.mark.parametrize("family", ["falcon", "gemma3", "mixtral", None])
def test_another_family_is_refused_by_name_with_the_list(folder: Path, family: str | None) -> None:
    message = assert_refused(UnsupportedModel, _edit_config(folder, model_type=family))
    assert repr(family) in message
    assert "supported: llama" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"final_logit_softcapping": 30.0}, "soft-capping"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_a_feature_that_no_drafter_has_is_refused_by_name(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    message = assert_refused(UnsupportedModel, _edit_config(folder, **changes))
    assert named in message
    assert "supported" in message


def test_biases_that_the_configuration_promises_must_be_there(folder: Path) -> None:
    message = assert_refused(BadCheckpoint, _edit_config(folder, attention_bias=True))
    assert "expected tensor model.layers.0.self_attn.q_proj.bias" in message


def test_an_adapter_s_tensor_is_refused_by_name(tiny_model: tiny.TinyModel, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.lora_a": np.ones((64, 4), np.float32)}
    model = tiny.TinyModel(tiny_model.config, tiny_model.tensors | extra)
    assert "lora_a" in assert_refused(
        UnsupportedModel, tiny.write_folder(model, tmp_path / "model")
    )


def test_a_redundant_head_of_a_tied_model_is_left_alone(
    tiny_model: tiny.TinyModel, tmp_path: Path
) -> None:
    head = {"lm_head.weight": tiny_model.tensors["model.embed_tokens.weight"]}
    model = tiny.TinyModel(tiny_model.config, tiny_model.tensors | head)
    checkpoint = open_checkpoint(tiny.write_folder(model, tmp_path / "model"))
    assert checkpoint.names() == list(tiny_model.tensors)


def test_integer_weights_are_refused(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = mx.ones((64,), dtype=mx.int8)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert "I8" in assert_refused(UnsupportedModel, folder)


def test_a_damaged_tokenizer_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json") as caught:
        _ = open_checkpoint(folder).tokenizer
    assert "\n" not in str(caught.value)
