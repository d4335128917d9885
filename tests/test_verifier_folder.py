"""A verifier folder opens only with the files that were written, and with all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ondevice.artifact import VERIFIER_FILE, VerifierManifest
from ondevice.errors import ArtifactError
from ondevice.mlxfolder import load_folder
from ondevice.verifierfolder import check_verifier_folder


@pytest.fixture
def folder(tiny_verifier_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_verifier_folder, tmp_path / "verifier"))


def refused(call: Callable[[Path], object], folder: Path, *words: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        call(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "convert the pair again" in message
    for word in words:
        assert word in message


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_folder_as_written_opens(folder: Path) -> None:
    assert check_verifier_folder(folder) == VerifierManifest.read(folder / VERIFIER_FILE)
    assert load_folder(folder).context == 4096


@pytest.mark.parametrize("name", ["model-zz.safetensors", "model.safetensors.safetensors"])
def test_weights_that_no_manifest_names_are_not_loaded(folder: Path, name: str) -> None:
    extra = {"model.norm.weight": mx.zeros((64,))}
    mx.save_safetensors(str(folder / name), extra)
    for call in (check_verifier_folder, load_folder):
        refused(call, folder, name, "take it away")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"rope_theta": 20000.0}),
        ("config.json", {"rms_norm_eps": 0.1}),
        ("generation_config.json", {"eos_token_id": [5]}),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"}),
        ("tokenizer.json", {"post_processor": None, "truncation": None}),
    ],
)
def test_a_configuration_that_was_edited_is_refused(
    folder: Path, name: str, changes: dict[str, Any]
) -> None:
    edit(folder / name, **changes)
    for call in (check_verifier_folder, load_folder):
        refused(call, folder, name, "does not match its manifest")


def test_an_edited_chat_template_is_refused(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "Answer in rhymes.")
    refused(check_verifier_folder, folder, "chat_template.jinja")


@pytest.mark.parametrize(
    "name",
    [
        "special_tokens_map.json",
        "added_tokens.json",
        "hf_quant_config.json",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/.hidden.jinja",
    ],
)
def test_a_file_too_many_is_refused(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    refused(check_verifier_folder, folder, name)


def test_a_link_to_a_folder_of_templates_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    refused(check_verifier_folder, folder, "additional_chat_templates")


def test_what_finder_leaves_behind_is_ignored(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"\0")
    (folder / "._model.safetensors").write_bytes(b"\0")
    assert load_folder(folder).context == 4096


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_file_too_few_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(check_verifier_folder, folder, name, "missing")


def test_a_folder_in_the_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(check_verifier_folder, folder, "config.json", "missing")


def test_a_manifest_that_names_no_file_vouches_for_none(folder: Path) -> None:
    edit(folder / VERIFIER_FILE, files_sha256={})
    for call in (check_verifier_folder, load_folder):
        refused(call, folder, "files_sha256")


def test_a_manifest_of_the_old_format_is_refused(folder: Path) -> None:
    content = json.loads((folder / VERIFIER_FILE).read_text())
    content["weights_sha256"] = content.pop("files_sha256")
    content["format"] = "ondevice-verifier-1"
    (folder / VERIFIER_FILE).write_text(json.dumps(content))
    refused(check_verifier_folder, folder, "format")


def test_a_folder_without_a_manifest_is_none_of_ours(folder: Path) -> None:
    (folder / VERIFIER_FILE).unlink()
    refused(check_verifier_folder, folder, VERIFIER_FILE)
    assert load_folder(folder).context == 4096
