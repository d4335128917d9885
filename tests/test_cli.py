"""The command line: every mistake is one line and a status, and stdout stays the answer's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import tiny
from commandline import COMMAND, Run, assert_one_line

from ondevice.apps import chat as chat_command
from ondevice.apps.failures import say
from ondevice.converters import pair as pair_module
from ondevice.corpus import MOST_BYTES
from ondevice.errors import UnitFailed
from ondevice.models.pairs import default_pair
from ondevice.schedule import STRATEGIES


@pytest.fixture
def pair_copy(tiny_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


# Demand 10: the user's mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--max-tokens", "0"], ["max tokens", "got 0"]),
        (["--top-p", "0"], ["top-p", "got 0"]),
        (["--top-k", "-3"], ["top-k", "-3"]),
        (["--min-p", "1"], ["min-p", "got 1"]),
        (["--repetition-penalty", "0"], ["repetition penalty", "got 0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--stop", ""], ["stop", "empty"]),
    ],
)
def test_options_are_refused_before_the_pair_is_looked_for(
    run: Run, options: list[str], words: list[str]
) -> None:
    assert_one_line(run("chat", "no-such-pair", "-p", "hello", *options), 2, *words)


def test_an_empty_prompt_is_refused_before_the_pair_is_looked_for(run: Run) -> None:
    assert_one_line(run("chat", "no-such-pair", "-p", ""), 2, "prompt is empty")
    assert_one_line(run("chat", "no-such-pair", stdin=" \n"), 2, "prompt is empty")


def test_an_unknown_pair_is_answered_with_the_known_ones(run: Run) -> None:
    assert_one_line(run("chat", "no-such-pair", "-p", "hello"), 2, "no-such-pair", "smollm2")


def test_a_folder_that_is_no_pair(run: Run, tmp_path: Path) -> None:
    assert_one_line(run("chat", tmp_path, "-p", "hello"), 2, "pair.json")


def test_a_verifier_without_its_config(run: Run, pair_copy: Path) -> None:
    (pair_copy / "verifier" / "config.json").unlink()
    assert_one_line(run("chat", pair_copy, "-p", "hello"), 2, "config.json")


def test_truncated_safetensors(run: Run, pair_copy: Path) -> None:
    weights = pair_copy / "verifier" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert_one_line(run("chat", pair_copy, "-p", "hello"), 2)


def test_a_truncated_gguf(
    run: Run, tiny_model: tiny.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tiny.write_gguf(tiny_model, tmp_path / "model.gguf")
    os.truncate(gguf, gguf.stat().st_size - 1000)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pair_module, "fetch_weights", lambda *_: gguf)
    assert_one_line(run("chat", "-p", "hello"), 2, "model.gguf")
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_drafter_of_another_tokenizer(run: Run, pair_copy: Path) -> None:
    edit_json(pair_copy / "drafter" / "drafter.json", tokenizer_sha256="0" * 64)
    assert_one_line(run("chat", pair_copy, "-p", "hello"), 2, "tokenizer", "00000000")


@pytest.mark.parametrize("name", ["weights_sha256", "ops_sha256", "embedding_sha256"])
def test_a_manifest_with_a_wrong_hash(run: Run, pair_copy: Path, name: str) -> None:
    edit_json(pair_copy / "drafter" / "drafter.json", **{name: "0" * 64})
    assert_one_line(run("chat", pair_copy, "-p", "hello"), 2, "convert")


def test_a_manifest_that_is_not_json(run: Run, pair_copy: Path) -> None:
    (pair_copy / "pair.json").write_text("{", encoding="utf-8")
    assert_one_line(run("chat", pair_copy, "-p", "hello"), 2, "pair.json")


def test_a_prompt_beyond_the_verifiers_context(run: Run, tiny_pair: Path) -> None:
    result = run("chat", tiny_pair, "-p", "x" * 5000)
    assert_one_line(result, 2, "4096", "shorten the prompt")


def test_a_prompt_beyond_the_drafters_context_is_no_mistake(run: Run, tiny_pair: Path) -> None:
    status, out, err = run("chat", tiny_pair, "-p", "x" * 300, "--max-tokens", 200, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["stats"]["prompt_tokens"] > 300


def test_a_cache_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "file" / "home"))
    assert_one_line(run("chat", "-p", "hello"), 2, "ONDEVICE_HOME")


def test_text_that_is_not_utf8_on_stdin(tiny_pair: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", str(tiny_pair)], input=b"caf\xe9", capture_output=True, check=False
    )
    assert_one_line((done.returncode, done.stdout.decode(), done.stderr.decode()), 2, "UTF-8")


# Mistakes in the line itself


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["chat", "--temprature", "1"], ["--temprature", "see ondevice chat --help"]),
        (["chat", "--strategy", "telepathy"], ["'--strategy': 'telepathy'", *STRATEGIES]),
        (["chat", "--top-k", "many"], ["--top-k", "integer", "got 'many'"]),
        (["chat", "--top-k"], ["--top-k", "see ondevice --help"]),
        (["inspect"], ["ARTIFACT", "see ondevice inspect --help"]),
        (["sing"], ["sing", "see ondevice --help"]),
    ],
)
def test_usage_mistakes_are_one_line_that_says_where_help_is(
    run: Run, line: list[str], words: list[str]
) -> None:
    assert_one_line(run(*line), 2, *words)


@pytest.mark.parametrize("command", [[], ["chat"], ["check"], ["bench"], ["simulate"], ["inspect"]])
def test_help_is_plain_and_fits_a_terminal(run: Run, command: list[str]) -> None:
    status, out, err = run(*command, "--help")
    assert (status, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.isascii()


def test_no_command_shows_the_commands(run: Run) -> None:
    status, out, _ = run()
    assert status == 0
    commands = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line]
    assert commands == [
        *("chat", "check", "bench", "profile", "distil", "simulate", "inspect", "doctor"),
        "convert",
    ]


def test_version(run: Run) -> None:
    assert run("--version") == (0, "ondevice 0.1.0\n", "")


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        (["--help"], {"mlx", "coremltools", "transformers", "pydantic"}),
        (["chat", "--help"], {"mlx", "coremltools", "transformers"}),
    ],
)
def test_help_waits_for_no_big_library(line: list[str], slow: set[str]) -> None:
    code = (
        f"import sys; from ondevice.apps.cli import main; main({line}); "
        f"print(sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_default_pair_is_that_of_the_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chat_command, "run", lambda request: asked.append(request.pair))
    assert run("chat", "-p", "hello") == (0, "", "")
    assert asked == [default_pair()]


# Output that goes nowhere


@pytest.fixture
def full_disk() -> Iterator[BinaryIO]:
    if not Path("/dev/full").exists():
        pytest.skip("no device here is always full")
    with open("/dev/full", "wb") as device:
        yield device


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["chat", "-p", "hello"], ["inspect"]])
def test_a_full_disk_is_one_line(full_disk: BinaryIO, tiny_pair: Path, line: list[str]) -> None:
    options = [] if line[0].startswith("--") else [str(tiny_pair)]
    done = subprocess.run(
        [*COMMAND, *line, *options],
        stdout=full_disk,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    expected = ("cannot write the output", "No space left", "free space")
    assert_one_line((done.returncode, "", done.stderr), 2, *expected)


@pytest.mark.parametrize("what", [["inspect"], ["chat", "-p", "hi", "--max-tokens", "2"]])
def test_a_closed_stdout_is_no_failure(tiny_pair: Path, what: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *what, str(tiny_pair)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Our own mistakes, and interruptions


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(chat_command, "run", fail)


def test_our_failures_end_with_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(UnitFailed("the verifier failed:\n out of memory"), monkeypatch)
    expected = "ondevice: the verifier failed: out of memory\n"
    assert run("chat", "-p", "hello") == (1, "", expected)


def test_what_nobody_expected_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(KeyError("rope"), monkeypatch)
    expected = "ondevice: unexpected KeyError: 'rope'; --debug shows where\n"
    assert run("chat", "-p", "hello") == (1, "", expected)


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(KeyError("rope"), monkeypatch)
    status, out, err = run("chat", "-p", "hello", "--debug")
    assert (status, out) == (1, "")
    assert err.startswith("Traceback")
    assert "in fail" in err


def test_an_interrupt_ends_silently(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(KeyboardInterrupt(), monkeypatch)
    assert run("chat", "-p", "hello") == (130, "", "")


def test_a_message_is_always_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    say("one\n  two\r\nthree")
    assert capfd.readouterr().err == "ondevice: one two three\n"


def edit_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    tiny.write_json(file, content | changes)


# Lookahead and lookup


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("7,4", ["--lookahead", "W,N,G", "'7,4'"]),
        ("a,b,c", ["--lookahead", "W,N,G", "'a,b,c'"]),
        ("1,4,7", ["lookahead's W", "2 to 64", "got 1"]),
        ("7,2,7", ["lookahead's N", "3 to 10", "got 2"]),
        ("7,4,0", ["lookahead's G", "1 to 64", "got 0"]),
        ("64,9,7", ["255 rows", "smaller"]),
    ],
)
def test_a_lookahead_shape_that_cannot_be(
    run: Run, tiny_pair: Path, shape: str, words: list[str]
) -> None:
    assert_one_line(run("chat", tiny_pair, "-p", "hello", "--lookahead", shape), 2, *words)


def test_a_lookup_file_that_is_not_there_or_no_text(
    run: Run, tiny_pair: Path, tmp_path: Path
) -> None:
    line = ["chat", tiny_pair, "-p", "hello", "--lookup"]
    assert_one_line(run(*line, tmp_path / "none.txt"), 2, "none.txt", "No such file")
    for content, words in ((b"", "empty"), (b"a\0b", "binary"), (b"\xff\xfe", "UTF-8")):
        (tmp_path / "text.txt").write_bytes(content)
        assert_one_line(run(*line, tmp_path / "text.txt"), 2, "text.txt", words)
    with (tmp_path / "text.txt").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert_one_line(run(*line, tmp_path / "text.txt"), 2, "text.txt", "at most 8")
    for what in (tmp_path, Path("/dev/zero")):
        assert_one_line(run(*line, what), 2, str(what), "no regular file")


def test_a_lookup_file_is_looked_into(run: Run, tiny_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello there, hello again", encoding="utf-8")
    status, out, _ = run(
        "chat", tiny_pair, "-p", "hello", "--lookup", tmp_path / "text.txt", "--strategy", "lookup",
        "--max-tokens", 8, "--json",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["stats"]["strategy"] == "lookup"
