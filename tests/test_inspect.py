"""`inspect` says what an artifact is, and what no longer is what its manifest states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
from commandline import Run, assert_one_line

from ondevice.artifact import DrafterManifest, file_sha256
from ondevice.converters import pair as pair_module
from ondevice.converters.checkpoint import Checkpoint
from ondevice.probereport import ProbeReport


def test_a_pair_is_shown_whole(run: Run, tiny_pair: Path, tiny_checkpoint: Checkpoint) -> None:
    status, out, err = run("inspect", tiny_pair)
    assert (status, err) == (0, "")
    lines = {tuple(line.split()) for line in out.splitlines()}
    manifest = DrafterManifest.read(tiny_pair / "drafter" / "drafter.json")
    for line in (
        ("pair", str(tiny_pair)),
        ("family", "llama"),
        ("context", "4096", "tokens"),
        ("context", "64,", "256", "slots"),
        ("heads", "4", "query,", "2", "key/value,", "of", "32"),
        ("rows", "a", "step", "1,", "8"),
        ("tokenizer", "sha256", tiny_checkpoint.tokenizer_sha256[:12]),
        ("weights", "sha256", manifest.weights_sha256[:12]),
        ("hashes", "match"),
        ("op", "t1_s64", "t1_s256", "t8_s64", "t8_s256"),
    ):
        assert line in lines
    assert out.isascii()
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (".", "pair"),
        ("verifier", "verifier"),
        ("drafter", "drafter"),
        ("drafter/drafter.mlpackage", "package"),
    ],
)
def test_json_of_every_kind_is_one_object(run: Run, tiny_pair: Path, part: str, kind: str) -> None:
    status, out, err = run("inspect", tiny_pair / part, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert out == json.dumps(found) + "\n"
    assert found["kind"] == kind


def test_the_graph_is_that_of_the_package(run: Run, tiny_pair: Path) -> None:
    coremltools = pytest.importorskip("coremltools")
    path = tiny_pair / "drafter" / "drafter.mlpackage"
    found = json.loads(run("inspect", path, "--json")[1])
    spec = coremltools.models.utils.load_spec(str(path))
    program = spec.mlProgram.functions
    assert set(found["functions"]) == set(program)
    for name, function in program.items():
        (block,) = function.block_specializations.values()
        used = [op.type for op in block.operations if op.type != "const"]
        counts = {op: used.count(op) for op in used if not op.startswith("constexpr")}
        assert found["functions"][name]["ops"] == counts
        assert list(found["functions"][name]["inputs"]) == [each.name for each in function.inputs]
        assert list(found["functions"][name]["outputs"]) == list(block.outputs)
    weights = path / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    assert found["weights_sha256"] == file_sha256(weights)
    assert found["weights_bytes"] == weights.stat().st_size


def test_what_was_altered_does_not_match(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    pair = Path(shutil.copytree(tiny_pair, tmp_path / "pair"))
    file = pair / "drafter" / "drafter.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    tiny.write_json(file, manifest | {"weights_sha256": "0" * 64})
    found = json.loads(run("inspect", pair, "--json")[1])
    assert found["verifier"]["matches_manifest"] is True
    assert found["drafter"]["matches_manifest"] is False
    assert "DO NOT MATCH" in run("inspect", pair)[1]

    weights = pair / "verifier" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    found = json.loads(run("inspect", pair / "verifier", "--json")[1])
    assert found["matches_manifest"] is False


def test_examinations_are_shown_by_machine_with_the_reasons(
    run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    pair = Path(shutil.copytree(tiny_pair, tmp_path / "pair"))
    assert "examined on" not in run("inspect", pair)[1]
    refused = ProbeReport(
        runtime="pyobjc", reason="its logits are not finite", cpu="Apple M9", system="macOS 27.1"
    )
    slow = refused.model_copy(update={"runtime": "coremltools", "reason": "it is too slow"})
    taken = refused.model_copy(update={"runtime": "mlx", "reason": "", "step_ms": {8: 5.25}})
    other = taken.model_copy(update={"cpu": "Apple M2", "runtime": "pyobjc", "agreement": 0.995})
    verdicts = pair / "drafter" / "verdicts"
    verdicts.mkdir()
    for number, report in enumerate((taken, slow, other, refused)):
        report.write(verdicts / f"{number}.json")
    (verdicts / "broken.json").write_text("{", encoding="utf-8")
    for part in (pair, pair / "drafter"):
        status, out, err = run("inspect", part)
        assert (status, err) == (0, "")
        lines = [" ".join(line.split()) for line in out.splitlines()]
        first = lines.index("examined on Apple M2, macOS 27.1")
        assert lines[first + 1] == (
            "pyobjc 99.5% of first choices among the emulator's three; a step of 8 rows 5.2 ms"
        )
        assert lines[first + 2 : first + 6] == [
            "examined on Apple M9, macOS 27.1",
            "pyobjc refused: its logits are not finite",
            "coremltools refused: it is too slow",
            "mlx a step of 8 rows 5.2 ms",
        ]
    found = json.loads(run("inspect", pair, "--json")[1])["drafter"]["examinations"]
    assert [each["runtime"] for each in found] == ["pyobjc", "pyobjc", "coremltools", "mlx"]


def test_a_converted_pair_may_be_called_by_its_name(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    assert_one_line(run("inspect", "smollm2"), 2, "not been converted", "ondevice chat smollm2")
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "smollm2").symlink_to(tiny_pair)
    assert json.loads(run("inspect", "smollm2", "--json")[1])["manifest"]["name"] == "tiny"


def test_a_damaged_pair_of_ours_has_the_same_remedy_everywhere(
    run: Run, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    monkeypatch.setattr(pair_module, "prepare_pair", lambda _: folder)
    folder = Path(shutil.copytree(tiny_pair, tmp_path / "pairs" / "smollm2"))
    remedy = f"delete {folder}: it is made anew"
    assert remedy not in run("inspect", "smollm2")[1]
    file = folder / "drafter" / "drafter.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    tiny.write_json(file, manifest | {"weights_sha256": "0" * 64})
    assert remedy in run("inspect", "smollm2")[1]
    (folder / "pair.json").write_text("{", encoding="utf-8")
    for line in (["inspect", "smollm2"], ["inspect", folder], ["chat", "smollm2", "-p", "hello"]):
        assert_one_line(run(*line), 2, "pair.json", remedy)

    other = Path(shutil.copytree(folder, tmp_path / "mine"))
    result = run("inspect", other)
    assert_one_line(result, 2, "pair.json")
    assert "delete" not in result[2]


def test_what_is_no_artifact_is_one_line(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    assert_one_line(run("inspect", tmp_path / "weights.gguf"), 2, "is a file, not a folder")
    (tmp_path / "weights.gguf").unlink()
    assert_one_line(run("inspect", tmp_path / "nothing"), 2, "nothing")
    assert_one_line(run("inspect", tmp_path), 2, "pair.json", "Manifest.json")
    (tmp_path / "Manifest.json").write_text("{}", encoding="utf-8")
    assert_one_line(run("inspect", tmp_path), 2, "no Core ML package")
    (tmp_path / "pair.json").write_text("[]", encoding="utf-8")
    assert_one_line(run("inspect", tmp_path), 2, "pair.json")
