"""How engines end: closed in time, late, twice, by nobody, or with the program."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import tiny

from ondevice.engine import Engine
from ondevice.errors import Closed
from ondevice.schedule import STRATEGIES
from ondevice.session import Options

PROMPT = [9, 40, 77, 41, 9]
SHORT = Options(max_tokens=16)


def test_engines_closed_in_the_middle_of_an_answer_use_the_same_threads(tiny_pair):
    counts = []
    for _ in range(3):
        engine = Engine.open_folder(tiny_pair)
        stream = engine.session().stream(PROMPT, Options(max_tokens=2000, strategy="plain"))
        next(stream)
        engine.close()
        stream.close()
        counts.append(threading.active_count())
    assert counts[1] == counts[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_that_ends_in_the_middle_of_an_answer_exits_cleanly(tiny_pair, strategy):
    code = (
        "from pathlib import Path\n"
        "from ondevice import Engine, Options\n"
        f"engine = Engine.open_folder(Path({str(tiny_pair)!r}))\n"
        f"options = Options(max_tokens=3000, strategy={strategy!r})\n"
        "stream = engine.session().stream([9, 40, 77], options)\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_session_keeps_its_engine(tiny_pair):
    session = Engine.open_folder(tiny_pair).session()
    gc.collect()
    assert session.generate(PROMPT, SHORT).token_ids
    session.close()


def test_use_after_close_is_named(tiny_pair):
    engine = Engine.open_folder(tiny_pair)
    session = engine.session()
    held = session.stream(PROMPT, Options(max_tokens=3000))
    next(held)
    engine.close()
    engine.close()
    assert list(held)[-1].answer.finish_reason == "cancelled"
    with pytest.raises(Closed):
        session.generate(PROMPT, SHORT)
    with pytest.raises(Closed):
        engine.session()
    with pytest.raises(Closed):
        engine.generate(PROMPT, SHORT)


def test_a_session_opened_while_its_engine_closes_is_refused_or_cancelled(tiny_pair):
    for _ in range(6):
        engine = Engine.open_folder(tiny_pair)
        ended = []

        def talk(engine: Engine = engine, ended: list[str] = ended) -> None:
            try:
                while True:
                    with engine.session() as session:
                        session.generate(PROMPT, SHORT)
            except Closed:
                ended.append("closed")

        readers = [threading.Thread(target=talk, daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        engine.close()
        for reader in readers:
            reader.join(30)
        assert ended == ["closed"] * 2


def test_a_conversion_beside_an_open_engine_leaves_a_clean_exit(tiny_pair, tmp_path):
    folder = tiny.write_folder(tiny.tiny_model(), tmp_path / "llama")
    code = (
        "from pathlib import Path\n"
        "from ondevice import Engine, Options\n"
        f"engine = Engine.open_folder({str(tiny_pair)!r}, quiet=True)\n"
        "engine.generate([9, 40, 77], Options(max_tokens=4))\n"
        "from ondevice.converters.checkpoint import open_checkpoint\n"
        "from ondevice.converters.pair import write_pair\n"
        "from ondevice.models.pairs import DrafterRecipe\n"
        "recipe = DrafterRecipe(layers=(0,), row_counts=(1, 8), context_sizes=(64,))\n"
        f"pair = Path({str(tmp_path / 'pair')!r})\n"
        f"checkpoint = open_checkpoint(Path({str(folder)!r}))\n"
        "write_pair(checkpoint, pair, name='tiny', drafter=recipe, quiet=True)\n"
        "Engine.open_folder(pair, quiet=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
