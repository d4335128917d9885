"""Artifacts take their place whole or not at all, and manifests with impossible values are none."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ondevice import artifact
from ondevice.artifact import (
    PairManifest,
    VerifierManifest,
    check_tokenizer,
    replacing,
    sweep,
    unwritable,
)
from ondevice.errors import ArtifactError, CacheUnwritable
from ondevice.home import make_writable


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "content").write_text(text)
    return path


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Makes a folder a mount point, which no rename moves; only root may."""
    mounts: list[Path] = []

    def mount(folder: Path) -> None:
        command = ["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount")
        mounts.append(folder)

    yield mount
    for folder in mounts:
        subprocess.run(["umount", str(folder)], check=False, capture_output=True)


@pytest.mark.parametrize("name", ["old", "new", "pair"])
def test_a_folder_of_any_name_is_replaced(tmp_path: Path, name: str) -> None:
    target = folder_with(tmp_path / name, "before")
    with replacing(target) as fresh:
        assert fresh.name == name
        folder_with(fresh, "after")
    assert (target / "content").read_text() == "after"
    assert list(tmp_path.iterdir()) == [target]


def test_a_block_that_wrote_nothing_costs_the_old_folder_nothing(tmp_path: Path) -> None:
    target = folder_with(tmp_path / "pair", "before")
    with pytest.raises(FileNotFoundError), replacing(target):
        pass
    assert (target / "content").read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_result_that_cannot_be_moved_leaves_the_old_folder(
    tmp_path: Path, mounted: Callable[[Path], None]
) -> None:
    target = folder_with(tmp_path / "pair", "before")
    with pytest.raises(CacheUnwritable, match="cannot write"), replacing(target) as fresh:
        mounted(folder_with(fresh, "after"))
    assert (target / "content").read_text() == "before"


class Killed(BaseException):
    """Ends a process without its cleaning up, as far as a test can."""


def killed_while_replacing(target: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    """What is left when a kill comes after so many renames of an old folder and a new one."""

    def kill(fresh: Path, to: Path, aside: Path) -> None:
        if moves:
            to.rename(aside)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "_take_place", kill)
        patch.setattr(artifact.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed), replacing(target) as fresh:
            folder_with(fresh, "after")


@pytest.mark.parametrize("moves", [0, 1])
def test_sweeping_brings_an_old_artifact_back_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    target = folder_with(tmp_path / "pair", "before")
    killed_while_replacing(target, monkeypatch, moves)
    assert target.exists() == (moves == 0)
    assert len(list(tmp_path.iterdir())) == 2 - moves
    sweep(target)
    assert (target / "content").read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["pair", "*", "[a-z]*", "?"])
def test_sweeping_leaves_folders_of_others_alone(tmp_path: Path, name: str) -> None:
    others = {
        folder_with(tmp_path / other, "mine") for other in (".pair.backup", ".pair.d", ".ssh")
    }
    sweep(tmp_path / name)
    assert set(tmp_path.iterdir()) == others


def test_a_folder_that_cannot_be_moved_aside_is_kept(
    tmp_path: Path, mounted: Callable[[Path], None]
) -> None:
    target = tmp_path / "pair"
    target.mkdir()
    mounted(target)
    (target / "content").write_text("before")
    with pytest.raises(CacheUnwritable) as caught, replacing(target) as fresh:
        folder_with(fresh, "after")
    assert "\n" not in str(caught.value)
    assert (target / "content").read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "pair"
    target.write_text("before")
    with pytest.raises(CacheUnwritable, match="is a file, not a folder"), replacing(target) as new:
        folder_with(new, "after")
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("below", ["", "home", "home/deeper"])
def test_a_file_in_the_way_is_named_and_no_space_is_asked_for(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheUnwritable) as caught:
        make_writable(tmp_path / "file" / below)
    message = str(caught.value)
    assert f"{tmp_path / 'file'} is a file, not a folder" in message
    assert "ONDEVICE_HOME" in message
    assert "free space" not in message


@pytest.mark.parametrize(
    ("number", "full"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.ENOENT, False),
        (errno.EACCES, False),
        (errno.EROFS, False),
    ],
)
def test_space_is_asked_for_only_when_the_disk_is_full(
    tmp_path: Path, number: int, full: bool
) -> None:
    message = str(unwritable(tmp_path, OSError(number, os.strerror(number))))
    assert ("free space" in message) == full
    assert os.strerror(number) in message
    assert "ONDEVICE_HOME" in message


def test_a_file_system_that_refuses_folders_is_no_full_disk() -> None:
    with pytest.raises(CacheUnwritable) as caught:
        make_writable(Path("/proc/ondevice"))
    assert "free space" not in str(caught.value)


@pytest.mark.parametrize("part", ["verifier", "drafter"])
@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b"])
def test_parts_of_a_pair_are_plain_names_inside_it(tmp_path: Path, part: str, name: str) -> None:
    content = {"name": "x", "tokenizer_sha256": "0" * 64}
    file = tmp_path / "pair.json"
    file.write_text(json.dumps(content | {part: "other.name"}))
    assert getattr(PairManifest.read(file), part) == "other.name"
    file.write_text(json.dumps(content | {part: name}))
    with pytest.raises(ArtifactError, match="inside the pair") as caught:
        PairManifest.read(file)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_cannot_be_read_names_its_path_once(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        PairManifest.read(tmp_path / "pair.json")
    assert str(caught.value).count(str(tmp_path)) == 1


def test_what_is_for_another_tokenizer_is_refused_by_name() -> None:
    verifier = VerifierManifest(
        family="llama",
        dtype="float32",
        context=8,
        vocab_size=8,
        files_sha256={"config.json": "0" * 64},
        tokenizer_sha256="ab" * 32,
        sources=[],
        converter_version="0",
    )
    check_tokenizer("the pair", "ab" * 32, verifier)
    with pytest.raises(ArtifactError, match=r"^the pair is for tokenizer cdcd.* abab.* convert"):
        check_tokenizer("the pair", "cd" * 32, verifier)
