"""One answer: what is printed is the engine's text, on stdout alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import COMMAND, Run, runner

from ondevice.apps import chat as chat_command
from ondevice.apps.chat import one_shot_prompt
from ondevice.apps.terminal import shown, statistics_line, stdout_kept_clean
from ondevice.engine import Engine
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES
from ondevice.session import Options
from ondevice.statistics import Statistics

PROMPT = "Where is the river?"
STATS_KEYS = {
    *("strategy", "reason", "prompt_tokens", "completion_tokens", "ttft_ms", "decode_tok_s"),
    *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("mean_acceptance_length", "draft_acceptance_rate", "drafter_busy", "verifier_busy"),
    *("energy_mj", "energy_reason"),
}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capfd, monkeypatch)


@pytest.fixture(scope="module")
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with Engine.open_folder(tiny_pair) as engine:
        yield engine


def plain(engine: Engine, prompt: str, sampling: SamplingParams | None = None) -> tuple[int, ...]:
    options = Options(sampling or SamplingParams(), max_tokens=24, strategy="plain")
    return engine.generate(prompt, options).token_ids


# Text


def test_the_answer_is_raw_text_and_a_newline(run: Run, engine: Engine, tiny_pair: Path) -> None:
    answer = engine.generate(PROMPT, Options(max_tokens=24))
    result = run("chat", tiny_pair, "-p", PROMPT, "--max-tokens", 24)
    assert result == (0, answer.text + "\n", "")


def test_stdin_is_a_prompt_and_follows_that_of_p(run: Run, engine: Engine, tiny_pair: Path) -> None:
    for arguments, stdin, prompt in (
        (["-p", "Count."], "one\ntwo\n", "Count.\n\none\ntwo"),
        ([], "one\ntwo\n", "one\ntwo"),
    ):
        result = run("chat", tiny_pair, *arguments, "--max-tokens", 24, "--json", stdin=stdin)
        assert tuple(json.loads(result[1])["token_ids"]) == plain(engine, prompt)


def test_a_missing_stdin_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert one_shot_prompt("hello") == "hello"


def test_the_system_message_comes_first(run: Run, engine: Engine, tiny_pair: Path) -> None:
    with engine.session(system="Be brief.") as session:
        expected = session.generate(PROMPT, Options(max_tokens=24)).token_ids
    _, out, _ = run(
        *("chat", tiny_pair, "-p", PROMPT, "--system", "Be brief.", "--max-tokens", 24, "--json")
    )
    assert tuple(json.loads(out)["token_ids"]) == expected != plain(engine, PROMPT)


def test_a_stop_text_ends_the_answer_and_is_not_shown(
    run: Run, engine: Engine, tiny_pair: Path
) -> None:
    text = engine.generate(PROMPT, Options(max_tokens=24)).text
    stop = text[len(text) // 2 :][:2]
    _, out, _ = run(
        *("chat", tiny_pair, "-p", PROMPT, "--max-tokens", 24, "--json"),
        *("--stop", "never said", "--stop", stop),
    )
    answer = json.loads(out)
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text[: text.index(stop)]


# JSON


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ([], SamplingParams()),
        (["--temperature", 0.8, "--seed", 7], SamplingParams(temperature=0.8, seed=7)),
        (
            [
                *("--temperature", 1.2, "--seed", 3, "--repetition-penalty", 1.3),
                *("--top-p", 0.9, "--top-k", 40, "--min-p", 0.02),
            ],
            SamplingParams(1.2, 40, 0.9, 0.02, 1.3, seed=3),
        ),
    ],
    ids=["greedy", "seeded", "cut"],
)
def test_every_strategy_prints_the_tokens_of_plain_decoding(
    run: Run,
    engine: Engine,
    tiny_pair: Path,
    strategy: str,
    options: list[object],
    sampling: SamplingParams,
) -> None:
    status, out, err = run(
        *("chat", tiny_pair, "-p", PROMPT, "--max-tokens", 24, "--json"),
        *("--strategy", strategy, *options),
    )
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert out == json.dumps(answer) + "\n"
    assert set(answer) == {"text", "token_ids", "finish_reason", "stats"}
    assert set(answer["stats"]) >= STATS_KEYS
    assert answer["stats"]["strategy"] == strategy
    assert answer["finish_reason"] == "length"
    assert tuple(answer["token_ids"]) == plain(engine, PROMPT, sampling)


def test_a_seed_that_was_drawn_is_reported_and_gives_the_text_again(
    run: Run, tiny_pair: Path
) -> None:
    line = ("chat", tiny_pair, "-p", PROMPT, "--max-tokens", 24, "--json", "--temperature", 1)
    first = json.loads(run(*line)[1])
    again = json.loads(run(*line, "--seed", first["stats"]["seed"])[1])
    assert again["text"] == first["text"]


def test_json_is_alone_on_stdout_whatever_is_printed_on_the_way(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with stdout_kept_clean():
        print("from Python")
        subprocess.run(["echo", "from a child"], check=True)
    print("{}")
    out, err = capfd.readouterr()
    assert out == "{}\n"
    assert {"from Python", "from a child"} == set(err.splitlines())


# Figures


def test_figures_are_one_line_on_stderr(run: Run, tiny_pair: Path) -> None:
    status, out, err = run("chat", tiny_pair, "-p", PROMPT, "--max-tokens", 24, "--stats")
    assert status == 0
    assert "tok/s" not in out
    assert re.fullmatch(
        r"24 tokens  [\d.]+ tok/s  ttft \d+ ms  accepted [\d./na]+ of [\d./na]+ per step  "
        r"drafter [\d/na]+%?  verifier \d+%  "
        r"([a-z]+ \d+ offered, \d+ verified, \d+ accepted  )+(window W \d+ N \d+ G \d+  )?"
        r"(parked|pipelined|weightless): .*(acceptance|accepted) .*\n",
        err,
    )


def test_figures_that_were_not_measured_are_na() -> None:
    nothing = Statistics(
        strategy="plain",
        reason="plain, as set",
        prompt_tokens=5,
        completion_tokens=1,
        ttft_ms=None,
        decode_tok_s=None,
        num_spec_steps=0,
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
        mean_acceptance_length=None,
        draft_acceptance_rate=None,
        drafter_busy=None,
        verifier_busy=None,
        drafter_window=0,
        proposers={},
        lookahead=None,
        seed=0,
        energy_mj=None,
        energy_reason="none",
    )
    assert statistics_line(nothing) == (
        "1 token  n/a tok/s  ttft n/a  accepted n/a of n/a per step  drafter n/a  verifier n/a  "
        "plain, as set"
    )
    weightless = replace(
        nothing,
        proposers={"lookup": {"offered": 9, "verified": 5, "accepted": 2}},
        lookahead={"W": 7, "N": 4, "G": 7},
    )
    assert statistics_line(weightless).endswith(
        "  lookup 9 offered, 5 verified, 2 accepted  window W 7 N 4 G 7  plain, as set"
    )


def test_a_terminal_is_not_given_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a\x1b]0;title\x07b\n\tc\x9bd é"
    assert shown(said) == said
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown(said) == "a\ufffd]0;title\ufffdb\n\tc\ufffdd é"


# Pipes and signals


def test_json_needs_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(chat_command.BadRequest, match="--json"):
        chat_command.run(chat_command.Request("no-such-pair", Options(), as_json=True))


def test_a_reader_that_leaves_early_is_no_error(tiny_pair: Path) -> None:
    done = _start(tiny_pair, "--max-tokens", "3000")
    assert done.stdout is not None
    assert done.stdout.read(1)
    done.stdout.close()
    assert done.stderr is not None
    assert done.stderr.read() == b""
    assert done.wait(20) == 141
    done.stderr.close()


def test_an_interrupted_answer_ends_with_status_130_and_no_word(tiny_pair: Path) -> None:
    answering = _start(tiny_pair, "--max-tokens", "3000")
    assert answering.stdout is not None
    assert answering.stdout.read(1)
    answering.send_signal(signal.SIGINT)
    _, err = answering.communicate(timeout=20)
    assert (answering.returncode, err) == (130, b"")


def _start(pair: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, "chat", str(pair), "-p", "Tell me more.", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
