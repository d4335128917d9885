"""Costs are kept for what they were measured on, and for nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ondevice import coststore, machine
from ondevice import engine as engine_module
from ondevice.artifact import PAIR_FILE
from ondevice.blas import BlasReport
from ondevice.calibration import ROW_COUNTS, Calibration
from ondevice.converters.pair import write_pair
from ondevice.costs import ASSUMED, CostPoint, CostTable, table_from
from ondevice.coststore import (
    MOST_TRIES,
    CostRecord,
    identity_of,
    known_or_measured,
    record_path,
    stored,
    stored_for,
)
from ondevice.engine import Engine
from ondevice.errors import ArtifactError, UnitFailed
from ondevice.models.pairs import DrafterRecipe
from ondevice.session import Options

IDENTITY = {"pair": "abc", coststore.RUNTIME: "virtual", "cpu": "one"}
TABLE = table_from([20.0, 21.5, 30.0], [(1, 4.0), (8, 6.0)], verifier_slowdown=1.2)
SURE = Calibration(TABLE, took_s=2.0, spread=0.02)


class Measuring:
    """Counts calibrations, and returns what it was given, the last one for ever."""

    def __init__(self, *found: Calibration) -> None:
        self.found, self.count = found, 0

    def __call__(self) -> Calibration:
        self.count += 1
        return self.found[min(self.count, len(self.found)) - 1]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_was_measured_is_read_back_unchanged_and_not_measured_again() -> None:
    measure = Measuring(SURE)
    first = known_or_measured(IDENTITY, measure)
    second = known_or_measured(IDENTITY, measure)
    assert measure.count == 1
    assert second == first == stored(IDENTITY)
    assert second.table == TABLE
    assert known_or_measured(IDENTITY, measure, again=True).table == TABLE
    assert measure.count == 2


def test_another_identity_is_another_table() -> None:
    measure = Measuring(SURE)
    known_or_measured(IDENTITY, measure)
    for name in IDENTITY:
        assert stored(IDENTITY | {name: "other"}) is None


def test_every_part_of_the_identity_makes_another_key(tiny_pair, tmp_path, monkeypatch) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    here = machine.this_machine()
    keys = [record_path(identity_of(pair, "emulator"))]
    keys.append(record_path(identity_of(pair, "another")))
    for change in ({"cpu": "M9"}, {"cores": 99}, {"usable_cores": 98}, {"system": "macOS (25A1)"}):
        monkeypatch.setattr(
            coststore, "this_machine", lambda change=change: replace(here, **change)
        )
        keys.append(record_path(identity_of(pair, "emulator")))
    monkeypatch.setattr(coststore, "this_machine", lambda: here)
    monkeypatch.setattr(coststore.blas, "prepare", lambda: BlasReport(True, "libfast.so", 7))
    keys.append(record_path(identity_of(pair, "emulator")))
    for package in coststore.VERSIONED:
        with monkeypatch.context() as patch:
            patch.setattr(
                coststore, "version", lambda name, package=package: "9" * (name == package)
            )
            keys.append(record_path(identity_of(pair, "emulator")))
    for file in (PAIR_FILE, "verifier/ondevice.json", "drafter/drafter.json"):
        (pair / file).write_text((pair / file).read_text() + " ")
        keys.append(record_path(identity_of(pair, "emulator")))
    assert len(set(keys)) == len(keys) == 14


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "ondevice-costs-2"}', "\udcff"],
)
def test_a_damaged_file_is_measured_again(text: str) -> None:
    measure = Measuring(SURE)
    known_or_measured(IDENTITY, measure)
    record_path(IDENTITY).write_text(text, errors="surrogateescape")
    assert known_or_measured(IDENTITY, measure).table == TABLE
    assert measure.count == 2
    assert stored(IDENTITY) is not None


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("table", "verifier", 0, "alone_ms"), -1.0),
        (("table", "plain", 0, "beside_ms"), "NaN"),
        (("table", "plain", 0, "beside_ms"), 0.0),
        (("table", "drafter", 0, "rows"), 0),
        (("table", "verifier"), []),
        (("table", "plain"), []),
        (("identity", "cpu"), "another machine's file under this name"),
        (("format",), "ondevice-costs-1"),
        (("more",), 1),
    ],
)
def test_a_foreign_or_impossible_file_is_no_table(where, value) -> None:
    known_or_measured(IDENTITY, Measuring(SURE))
    path = record_path(IDENTITY)
    data = at = json.loads(path.read_text())
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path.write_text(json.dumps(data).replace('"NaN"', "NaN"))
    assert stored(IDENTITY) is None


def test_a_folder_in_place_of_the_file_is_replaced() -> None:
    record_path(IDENTITY).mkdir(parents=True)
    assert stored(IDENTITY) is None
    known_or_measured(IDENTITY, Measuring(SURE))
    assert stored(IDENTITY) is not None


def test_an_unwritable_home_costs_a_note_and_no_second_measurement(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "file" / "home"))
    said: list[str] = []
    measure = Measuring(SURE)
    assert known_or_measured(IDENTITY, measure, say=said.append).table == TABLE
    assert measure.count == 1
    (note,) = said
    assert "not kept" in note
    assert "ONDEVICE_HOME" in note


def test_a_full_disk_costs_a_note_and_no_second_measurement(small_disk, monkeypatch) -> None:
    folder = small_disk(64 * 1024)
    monkeypatch.setenv("ONDEVICE_HOME", str(folder))
    wide = CostTable(tuple(CostPoint(n, 0, 1.0, 1.0) for n in range(1, 2000)), TABLE.plain)
    measure, said = Measuring(replace(SURE, table=wide)), []
    assert known_or_measured(IDENTITY, measure, say=said.append).table == wide
    assert measure.count == len(said) == 1
    assert stored(IDENTITY) is None
    assert not list((folder / "costs").glob("*.json"))


@pytest.mark.parametrize("spread", [None, 0.5])
def test_an_unsure_table_is_measured_again_a_few_times_and_the_better_one_kept(spread) -> None:
    worse = replace(SURE, spread=spread, took_s=1.0)
    better = replace(SURE, spread=0.4, took_s=2.0)
    measure = Measuring(worse, better, worse)
    for _ in range(MOST_TRIES + 2):
        record = known_or_measured(IDENTITY, measure)
    assert measure.count == MOST_TRIES
    assert record.took_s == 2.0
    assert not record.sure


def test_a_sure_table_takes_the_place_of_an_unsure_one_for_good() -> None:
    measure = Measuring(replace(SURE, spread=0.9), SURE)
    for _ in range(4):
        record = known_or_measured(IDENTITY, measure)
    assert measure.count == 2
    assert record.sure


def test_two_processes_measure_once(own_home: Path) -> None:
    code = (
        "import sys, time\n"
        "from ondevice.calibration import Calibration\n"
        "from ondevice.costs import ASSUMED\n"
        "from ondevice.coststore import known_or_measured\n"
        "def measure():\n"
        "    print('measured', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return Calibration(ASSUMED, 0.5, 0.0)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        f"found = known_or_measured({IDENTITY!r}, measure)\n"
        "print(len(found.table.verifier), flush=True)\n"
    )
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    outputs = []
    for each in running:  # both are told before one is waited for
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in running:
        outputs += each.communicate(timeout=60)[0].split()
        assert each.returncode == 0
    assert sorted(outputs) == [str(len(ASSUMED.verifier))] * 2 + ["measured"]


def test_the_newest_table_of_a_pair_is_found_whatever_runs_its_drafter(tiny_pair) -> None:
    assert stored_for(tiny_pair) is None
    for runtime, took_s in (("emulator", 1.0), ("another", 2.0)):
        measured = Measuring(replace(SURE, took_s=took_s))
        known_or_measured(identity_of(tiny_pair, runtime), measured)
    known_or_measured(identity_of(tiny_pair, "emulator") | {"cpu": "another"}, Measuring(SURE))
    (coststore.costs_folder() / "damaged.json").write_text("{")
    record = stored_for(tiny_pair)
    assert record is not None
    assert record.took_s == 2.0


def test_a_folder_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        identity_of(tmp_path, None)


# Engines


def test_an_engine_measures_its_pair_once_and_the_next_one_reads(
    tiny_pair, monkeypatch, capfd
) -> None:
    with Engine.open_folder(tiny_pair) as engine:
        first = engine.cost_record
        assert first is not None
        assert engine.cost_trouble == ""
        assert engine.costs.table == first.table
        assert engine.costs.verifier.row_counts == list(ROW_COUNTS)
        assert engine.costs.drafter.row_counts == [1, 8]
        for points in (first.table.verifier, first.table.plain, first.table.drafter):
            assert all(0 < point.alone_ms <= point.beside_ms for point in points)
        assert len(engine.generate([9, 40, 77], Options(max_tokens=4)).token_ids) == 4
    out, err = capfd.readouterr()
    assert (out, err) == ("", "Measuring tiny on this machine\n")

    def never(*_: object, **__: object) -> Calibration:
        raise AssertionError("measured again")

    record = first.model_copy(update={"spread": 0.0})  # whatever else runs here just now
    record.write(record_path(record.identity))
    monkeypatch.setattr(coststore, "calibrate", never)
    with Engine.open_folder(tiny_pair) as engine:
        assert engine.cost_record == record
    assert capfd.readouterr() == ("", "")


def test_a_pair_without_a_drafter_has_the_verifiers_figures(
    tiny_checkpoint, tmp_path, capfd
) -> None:
    recipe = DrafterRecipe(layers=(0,), row_counts=(1,), context_sizes=(64,))
    write_pair(tiny_checkpoint, tmp_path / "pair", name="plain", drafter=recipe, quiet=True)
    manifest = json.loads((tmp_path / "pair" / PAIR_FILE).read_text())
    (tmp_path / "pair" / PAIR_FILE).write_text(json.dumps(manifest | {"drafter": None}))
    with Engine.open_folder(tmp_path / "pair", quiet=True) as engine:
        assert engine.cost_record is not None
        rows = {point.rows for point in engine.cost_record.table.verifier}
        assert rows == set(ROW_COUNTS)
        assert engine.cost_record.table.drafter == ()
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_is_not_to_measure_assumes(tiny_pair, own_home) -> None:
    with Engine.open_folder(tiny_pair, measure=False) as engine:
        assert engine.costs.table == ASSUMED
        assert engine.cost_record is None
    assert not own_home.exists()


def test_an_engine_of_parts_has_the_costs_it_is_given(engine) -> None:
    def verifier():
        raise UnitFailed("not needed here")

    parts = engine.model.tokenizer, engine.model.end_tokens, verifier, None
    with pytest.raises(UnitFailed):
        Engine(*parts, costs=TABLE)

    class Unit:
        context, vocab_size, shape, shape_reason = 100, 10, "tree", ""

        def close(self):
            pass

    with Engine(*parts[:2], Unit, None, costs=TABLE) as made:
        made.measure_costs()
        assert made.costs.table == TABLE
        assert made.cost_record is None


def test_a_verifier_that_cannot_be_measured_answers_all_the_same(tiny_pair, monkeypatch) -> None:
    def failing(*_: object, **__: object) -> Calibration:
        raise UnitFailed("out of memory")

    monkeypatch.setattr(coststore, "calibrate", failing)
    with Engine.open_folder(tiny_pair, quiet=True) as engine:
        assert "out of memory" in engine.cost_trouble
        assert engine.costs.table == ASSUMED
        assert len(engine.generate([9, 40, 77], Options(max_tokens=4)).token_ids) == 4


def test_an_interrupted_calibration_closes_the_engine(tiny_pair, monkeypatch) -> None:
    closed: list[Engine] = []
    close = Engine.close

    def interrupted(*_: object, **__: object) -> CostRecord:
        raise KeyboardInterrupt

    monkeypatch.setattr(coststore, "calibrate", interrupted)
    monkeypatch.setattr(
        engine_module.Engine, "close", lambda self: (closed.append(self), close(self))
    )
    with pytest.raises(KeyboardInterrupt):
        Engine.open_folder(tiny_pair, quiet=True)
    assert len(closed) == 1
    assert stored_for(tiny_pair) is None
