"""`ondevice distil` from the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny

from ondevice.apps import distil as command
from ondevice.apps.cli import main
from ondevice.artifact import DRAFTER_FILE, DrafterManifest
from ondevice.converters.distil.card import Card
from ondevice.converters.distil.material import Material, read_prompts
from ondevice.converters.distil.recipe import Recipe
from ondevice.converters.distil.run import Distillation, Effort
from ondevice.engine import Engine
from ondevice.errors import BadRequest
from ondevice.session import Options

TINY = Recipe(
    rows=384,
    layers=(0, 1),
    question_tokens=24,
    answer_tokens=24,
    decode_rows=16,
    batch_tokens=512,
    step_batches=1,
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.tiny_model(vocab_size=400)
    return tiny.write_folder(model, tmp_path_factory.mktemp("distil") / "llama")


def run(verifier: Path, folder: Path, **changes: object) -> Card:
    """A whole run with little effort; its card."""
    settings: dict[str, object] = {
        "effort": Effort(data_tokens=3000, train_tokens=6000),
        "material": Material(),
        "recipe": TINY,
    }
    request = command.Request(
        str(verifier),
        work=folder / "work",
        output=folder / "pair",
        as_json=True,
        **(settings | changes),  # type: ignore[arg-type]
    )
    command.run(request)
    return Card.model_validate_json((folder / "work" / "card.json").read_text())


@pytest.mark.slow
def test_a_run_ends_with_a_pair_that_answers(verifier: Path, tmp_path: Path) -> None:
    card = run(verifier, tmp_path)
    manifest = DrafterManifest.read(tmp_path / "pair" / "drafter" / DRAFTER_FILE)
    assert manifest.head_rows == 384
    assert card.data.learned_tokens >= 3000
    assert card.training.tokens >= 6000
    assert card.file_bytes == (tmp_path / "work" / card.file).stat().st_size
    table = card.acceptance["Held-out prompts, greedy"]
    assert set(table) == {"all", "code", "summary", "chat", "translation"}
    readme = (tmp_path / "work" / "README.md").read_text()
    assert f"{table['all']['with_loops']['first_choice']:.1%}" in readme
    with Engine.open_folder(tmp_path / "pair") as engine:
        plain = engine.generate("hello", Options(max_tokens=12, strategy="plain"))
        drafted = engine.generate("hello", Options(max_tokens=12, strategy="sequential"))
    assert plain.token_ids == drafted.token_ids


@pytest.mark.slow
def test_text_of_a_domain_is_learned_from_a_drafter_that_is_there(
    verifier: Path, tmp_path: Path
) -> None:
    general = run(verifier, tmp_path / "general")
    text = tmp_path / "domain.txt"
    text.write_text("the cat sat on the mat, and the hat. " * 200, encoding="utf-8")
    start = tmp_path / "general" / "work" / general.file
    recipe = TINY.model_copy(update={"layers": None, "rate": 3e-3})
    recipe = Recipe(**recipe.model_dump(exclude={"layers", "rows"}))
    card = run(
        verifier, tmp_path / "domain", material=Material(texts=(text,)), recipe=recipe, start=start
    )
    assert card.started_from == start.name
    after = card.acceptance["Held-out text"]["all"]["with_loops"]["first_choice"]
    before = card.before["Held-out text"]["all"]["with_loops"]["first_choice"]
    assert after > before + 0.05
    assert card.before.keys() == card.acceptance.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hours", "0"], "hours: expected a finite number above 0, got 0"),
        (["--layers", "0,x"], "layers: expected indices such as 0,1,2, got '0,x'"),
        (["--layers", "5"], "layers: expected indices from 0 to 1, got [5]"),
        (["--rows", "512"], "rows: expected at most the 400 tokens of the vocabulary, got 512"),
        (["--rows", "0"], "rows: "),
        (["--text", "nothing.txt"], "nothing.txt cannot be read: No such file"),
        (["--start", "nothing.safetensors"], "nothing.safetensors is no trained drafter"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    verifier: Path,
    tmp_path: Path,
    arguments: Sequence[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["distil", str(verifier), "--work", str(tmp_path / "work"), *arguments])
    err = capsys.readouterr().err
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_occupied_output_is_refused_before_any_work(
    verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "mine")]
    assert main(["distil", str(verifier), *places]) == 2
    assert "is not empty and is no artifact of ours" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes.txt"]


def test_an_interrupted_run_says_that_it_can_go_on(
    verifier: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Distillation, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(verifier, tmp_path)
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(verifier, tmp_path).training.tokens >= 6000


def test_one_folder_cannot_be_work_and_output(
    verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = str(tmp_path / "both")
    assert main(["distil", str(verifier), "--work", both, "--output", both]) == 2
    assert "--work and --output" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


def test_another_family_is_named(
    verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in verifier.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert main(["distil", str(other), "--work", str(tmp_path / "work")]) == 2
    assert "mamba" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"x": 1}', "[1]", '{"turns": []}', "{", '{"prompt": " "}'])
def test_prompts_without_a_prompt_are_named_by_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three"]}\n')
    assert read_prompts(file) == ["one", "two"]
    file.write_text(f'{{"prompt": "one"}}\n{line}\n')
    with pytest.raises(BadRequest, match="line 2: expected an object"):
        read_prompts(file)
