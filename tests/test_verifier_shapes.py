"""What a verifier may be given: trees, chains or the root alone, and the folder it comes from."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gpt2, mamba
from mlx_lm.models.llama import Model, ModelArgs
from verifying import VOCAB, folder_of, next_logits, sliding_model, tokens_of

from ondevice.artifact import VERIFIER_FILE
from ondevice.errors import ArtifactError, UnitFailed, UnsupportedModel
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import Law, SamplingParams
from ondevice.units import RunRequest, VerifyRequest
from ondevice.verifier import MLXVerifier

TREE = (VerifyRow(0, 5, ROOT_ROW), VerifyRow(1, 6, 0), VerifyRow(2, 7, 0))


def never() -> bool:
    return False


def tiny_gpt2():
    mx.random.seed(2)
    model = gpt2.Model(
        gpt2.ModelArgs(
            model_type="gpt2",
            n_ctx=128,
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=128,
            layer_norm_epsilon=1e-5,
            vocab_size=VOCAB,
        )
    )
    mx.eval(model.parameters())
    return model


def tiny_mamba():
    mx.random.seed(3)
    model = mamba.Model(
        mamba.ModelArgs(
            model_type="mamba",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            state_size=8,
            num_hidden_layers=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        )
    )
    mx.eval(model.parameters())
    return model


def tiny_llama(**changes):
    mx.random.seed(4)
    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    model = Model(ModelArgs(**{**sizes, **changes}))
    mx.eval(model.parameters())
    return model


def plain_tokens(model, text, count):
    """Greedy decoding in order, from scratch each time."""
    text = list(text)
    for _ in range(count):
        text.append(int(np.argmax(next_logits(model, text))))
    return text[-count:]


@pytest.mark.parametrize(
    ("make", "shape", "reason"),
    [
        (tiny_llama, "tree", ""),
        (lambda: sliding_model(4), "tree", ""),
        (tiny_gpt2, "chain", "gpt2: its learned position embeddings are read in order"),
        (tiny_mamba, "plain", "mamba keeps a state that cannot be rolled back"),
        (
            lambda: tiny_llama(rope_scaling={"type": "dynamic", "factor": 2.0}),
            "plain",
            "dynamic NTK",
        ),
    ],
    ids=["llama", "sliding window", "gpt2", "mamba", "dynamic NTK"],
)
def test_each_family_gets_the_rows_it_can_take_and_decodes_exactly(make, shape, reason):
    verifier, model, prompt = MLXVerifier(make(), VOCAB, 128), make(), tokens_of(1, 12)
    assert verifier.shape == shape
    assert reason in verifier.shape_reason
    assert (verifier.shape_reason == "") == (shape == "tree")
    session, law = verifier.open_session(), Law(SamplingParams(), VOCAB)
    verifier.prefill(session, prompt, never)
    text = [*prompt, 5]
    if shape != "tree":
        with pytest.raises(UnitFailed, match=f"takes {shape} rows only"):
            verifier.verify([VerifyRequest(session, 0, TREE, "coupled", law)])
    right = plain_tokens(model, text, 2)
    chain = {"plain": [5], "chain": [5, right[0], 0], "tree": [5, right[0], 0]}[shape]
    rows = tuple(VerifyRow(i, token, i - 1) for i, token in enumerate(chain))
    (verdict,) = verifier.verify([VerifyRequest(session, 1, rows, "coupled", law)])
    assert list(verdict.tokens) == right[: len(chain[:2])]
    text += verdict.tokens
    verifier.truncate(session, len(prompt) - 2)  # further back than a rotating cache could go
    verifier.prefill(session, text[len(prompt) - 2 : -1], never)
    run = verifier.run(RunRequest(session, 2, text[-1], 6, law), never)
    assert [token for each in run for token in each.tokens] == plain_tokens(model, text, 6)
    verifier.close()


class FirstPositionOnly(type(tiny_llama().layers[0].self_attn.rope)):
    """A rope that reads one position for all rows: the fault that the probe is there to find."""

    def __call__(self, x, offset=0):
        first = offset[0] if isinstance(offset, mx.array) else offset
        return super().__call__(x, first)


def test_the_probe_finds_a_model_whose_rows_ignore_their_positions():
    model = tiny_llama()
    for layer in model.layers:
        layer.self_attn.rope = FirstPositionOnly(16)
    verifier = MLXVerifier(model, VOCAB, 64)
    assert verifier.shape == "chain"
    assert "in the probe tree rows differed" in verifier.shape_reason
    assert verifier.probe_error > 0.01


def test_the_probe_passes_beyond_the_original_context():
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    model = tiny_llama(rope_scaling=scaling)
    verifier = MLXVerifier(model, VOCAB, 128, far=200)
    assert verifier.shape == "tree"
    assert verifier.probe_error < 1e-4


def test_a_closed_verifier_gives_the_model_its_modules_back():
    model = tiny_llama()
    ropes = [layer.self_attn.rope for layer in model.layers]
    norm = model.model.norm
    MLXVerifier(model, VOCAB, 64).close()
    assert [layer.self_attn.rope for layer in model.layers] == ropes
    assert model.model.norm is norm


# Folders


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "verifier"
    shutil.copytree(folder_of("gqa tied"), copy)
    return copy


def test_a_folder_gives_its_sizes(folder):
    verifier = MLXVerifier.open(folder)
    assert (verifier.vocab_size, verifier.context) == (VOCAB, 4096)


def test_a_folder_that_mlx_lm_made_has_no_manifest_and_opens(folder):
    (folder / VERIFIER_FILE).unlink()
    assert MLXVerifier.open(folder).shape == "tree"


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    refused(folder, ArtifactError, "config.json is missing, its manifest names it")
    (folder / VERIFIER_FILE).unlink()
    refused(folder, ArtifactError, r"its config.json cannot be read \(No such file or directory\)")


def test_weights_that_do_not_match_their_manifest_are_refused(folder):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(folder, ArtifactError, "does not match its manifest: sha256 expected")


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, ArtifactError, "is missing, its manifest names it")
    (folder / VERIFIER_FILE).unlink()
    refused(folder, ArtifactError, "cannot be loaded")


def test_truncated_weights_are_refused_even_without_a_manifest(folder):
    (folder / VERIFIER_FILE).unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(folder, ArtifactError, "cannot be loaded")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "nosuch"}, UnsupportedModel, "nosuch"),
        ({"vocab_size": "many"}, ArtifactError, "cannot be loaded"),
        ({"hidden_size": 32}, ArtifactError, "cannot be loaded"),
        ({"max_position_embeddings": None}, ArtifactError, "must be a positive integer"),
    ],
    ids=["family", "vocabulary", "hidden size", "context"],
)
def test_a_configuration_that_does_not_fit_is_refused(folder, change, error, message):
    (folder / VERIFIER_FILE).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    refused(folder, error, message)


def refused(folder, error, message):
    with pytest.raises(error, match=message) as caught:
        MLXVerifier.open(folder)
    assert "\n" not in str(caught.value)
