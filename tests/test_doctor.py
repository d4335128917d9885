"""`ondevice doctor`: what is said follows from what was found."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import assert_one_line, runner
from rich.console import Console

from ondevice.apps import doctor, findings
from ondevice.apps.costtable import speculation_lines
from ondevice.apps.doctor import (
    Examination,
    as_json,
    meaning,
    missing,
    pair_lines,
    placement_rows,
    print_examination,
)
from ondevice.apps.findings import Counters, anonymous, look_at_counters, runtimes_of
from ondevice.blas import BlasReport
from ondevice.calibration import Calibration
from ondevice.conditions import Conditions
from ondevice.costs import CostPoint, CostTable, table_from
from ondevice.coststore import CostRecord
from ondevice.machine import Machine, this_machine
from ondevice.probereport import FunctionReport, ProbeReport

MAC = Machine("Apple M9 Pro", 12, 12, 38_654_705_664, "macOS 27.1 (29B12)", True)
LINUX = Machine("AMD EPYC", 2, 2, 25_000_000_000, "Debian GNU/Linux 12, kernel 6.1", False)
# Of 1 to 8 rows: 3 rows cost more than 4. Plain 10 ms a token; the drafter 5 ms for 8 rows.
FORWARDS_MS = (11.0, 12.0, 16.0, 12.5, 17.0, 18.0, 19.0, 15.0)
TABLE = table_from(
    FORWARDS_MS, [(1, 2.5), (8, 5.0)], plain_ms=10.0, verifier_slowdown=1.2, drafter_slowdown=1.1
)
DEEP = replace(
    TABLE,
    plain=(CostPoint(1, 128, 10.0, 12.0), CostPoint(1, 1024, 14.0, 15.0)),
    verifier=tuple(
        CostPoint(rows, context, 10.0 + rows + context / 100, 20.0 + rows)
        for rows in (1, 4)
        for context in (128, 1024)
    ),
)


@pytest.fixture(name="run")
def run_fixture(capfd, monkeypatch):
    return runner(capfd, monkeypatch)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def record_of(table: CostTable = TABLE, **changes) -> CostRecord:
    measured = Calibration(table, took_s=9.5, spread=0.03)
    return CostRecord.of({"cpu": "one"}, replace(measured, **changes))


def found(**changes) -> Examination:
    plain = Examination(
        machine=LINUX,
        blas=BlasReport(True, "libopenblas.so.0", 1),
        device="CPU",
        versions={"ondevice": "0.1.0"},
        home=Path("/home/me/.cache/ondevice"),
        free_bytes=50_000_000_000,
        pair="smollm2",
        folder=Path("/pairs/smollm2"),
        record=record_of(),
    )
    return replace(plain, **changes)


def rendered(what: Examination, width: int = 120, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_examination(what, Console(file=file, width=width, highlight=False, markup=False))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_measured_pair_is_a_table_with_its_cliffs() -> None:
    lines = rendered(found()).splitlines()
    (three,) = [line for line in lines if line.startswith("3 rows")]
    (four,) = [line for line in lines if line.startswith("4 rows")]
    assert "16.0 ms" in three
    assert "19.2 ms" in three
    assert "1.45" in three
    assert three.rstrip().endswith("more than 4")
    assert "more than" not in four
    assert three.count("▄") > four.count("▄") > 0
    assert max(lines, key=lambda line: line.count("▄")).startswith("7 rows")
    assert any("measured 20" in line and "9.5 s" in line for line in lines)


def test_what_a_round_must_bring_follows_from_the_costs() -> None:
    text = " ".join(speculation_lines(TABLE))
    # Beside: 12.5 and 15 ms, 1.2 times as long, against 10 ms a plain token; in turn 5 ms more.
    assert "4 and 8 rows must commit more than 1.50 and 1.80 tokens" in text
    assert "more than 1.75 and 2.00 when it comes after a drafter step of 8 rows" in text
    assert "1.20 times as long, a drafter step 1.10 times" in text
    assert "3 to 4" in text


def test_two_contexts_stand_side_by_side() -> None:
    text = rendered(found(record=record_of(DEEP)))
    assert "at 128" in text
    assert "at 1024" in text
    (four,) = [line for line in text.splitlines() if line.startswith("4 rows")]
    assert four.split()[2::2][:2] == ["15.3", "24.0"]
    assert "At 1024 tokens of context a round of 4 rows must commit more than 1.71 tokens" in (
        " ".join(text.split())
    )


@pytest.mark.parametrize("width", [44, 60, 80, 200])
def test_nothing_is_cut_off_however_narrow(width: int) -> None:
    examined = found(record=record_of(DEEP))
    text = rendered(examined, width)
    words = set(" ".join(pair_lines(examined) + meaning(examined)).split())
    assert words | {"15.3", "24.2", "24.0"} <= set(text.split())
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_without_the_sign_gets_another() -> None:
    assert "#" in rendered(found(), encoding="ascii")


def test_a_pair_without_a_drafter_claims_nothing_about_speculation() -> None:
    plain = (CostPoint(1, 128, 10.0, 10.0),)
    examined = found(record=record_of(CostTable(plain, plain)))
    assert pair_lines(examined) == [
        "There is no speculation with this pair, so only plain decoding was measured."
    ]
    text = rendered(examined)
    assert "plain, a token  10.0 ms" in text
    assert "rows" not in text
    assert "drafter" not in text.split("pair smollm2")[1].replace("a drafter", "")


def test_each_machine_is_told_what_it_means() -> None:
    assert "This is no Mac" in meaning(found())[0]
    mac = found(machine=MAC, device="GPU", blas=BlasReport(needed=False))
    (line,) = meaning(mac)
    assert "on the GPU, through MLX" in line
    assert "Neural Engine, if it passes an examination" in line
    slow = meaning(found(blas=BlasReport(True)))
    assert any("30 times slower" in line and "apt-get install" in line for line in slow)
    one_core = meaning(found(machine=replace(LINUX, usable_cores=1)))
    assert any("gains nothing" in line for line in one_core)
    full = meaning(found(free_bytes=10**8))
    assert any("0.1 GB free" in line and "ONDEVICE_HOME" in line for line in full)


def test_an_unsure_or_partly_assumed_table_says_so() -> None:
    busy = pair_lines(found(record=record_of(spread=0.4)))
    assert any("differed by 40%" in line for line in busy)
    once = pair_lines(found(record=record_of(spread=None)))
    assert any("measured once" in line for line in once)
    assumed = pair_lines(found(record=record_of(trouble="the drafter could not be measured: hm")))
    assert any("hm" in line and "assumed" in line for line in assumed)
    (failed,) = pair_lines(found(record=None, trouble="the verifier could not be measured: hm"))
    assert "hm" in failed
    assert not any("assumed" in line or "busy" in line for line in pair_lines(found()))


def test_an_unconverted_pair_is_not_converted_by_looking(run, own_home) -> None:
    status, out, err = run("doctor")
    assert (status, err) == (0, "")
    assert "Not converted yet" in out
    assert not own_home.exists()


def test_json_has_everything_and_calibrate_measures(run, tiny_pair) -> None:
    status, out, err = run("doctor", tiny_pair, "--json")
    assert (status, err) == (0, "")
    before = json.loads(out)
    assert before["machine"]["cpu"] == this_machine().cpu
    assert before["machine"]["memory_bytes"] > 10**8
    assert before["versions"].keys() >= {"mlx", "mlx-lm", "coremltools"}
    if not this_machine().apple_silicon:
        assert before["core_ml_runtimes"] == ["emulator"]
    assert before["energy_counters"]["name"] or before["energy_counters"]["trouble"]
    assert before["pair"]["placement"]["verifier"].startswith("MLX on the")
    assert before["missing"][-1]["mend"] == f"ondevice doctor {tiny_pair} --calibrate"
    assert before["home"]["free_bytes"] > 0
    assert before["pair"]["path"] == str(tiny_pair)
    assert before["pair"]["costs"] is None
    assert "Not measured" in before["pair"]["meaning"][0]
    status, out, err = run("doctor", tiny_pair, "--calibrate", "--json")
    assert status == 0
    assert err == "Measuring tiny on this machine\n"
    first = json.loads(out)["pair"]["costs"]
    assert first["identity"]["drafter runtime"] == "emulator-fp32"
    assert first["table"]["drafter"][0]["alone_ms"] > 0
    status, out, _ = run("doctor", tiny_pair, "--json")
    assert json.loads(out)["pair"]["costs"] == first
    status, out, err = run("doctor", tiny_pair, "--calibrate")
    assert err.startswith("Measuring")
    assert "12 rows" in out
    status, out, _ = run("doctor", tiny_pair, "--json")
    assert json.loads(out)["pair"]["costs"]["measured_at"] > first["measured_at"]


def test_what_is_missing_comes_with_the_command_that_mends_it(monkeypatch):
    assert missing(found()) == []
    lacks = dict(missing(found(blas=BlasReport(True), folder=None, record=None)))
    assert lacks == {
        "a fast BLAS for MLX": "apt-get install libopenblas0-pthread",
        "the pair smollm2, not converted": "ondevice chat smollm2",
    }
    assert dict(missing(found(record=None))) == {
        "what the pair's steps take here": "ondevice doctor smollm2 --calibrate"
    }
    counters = Counters(trouble="no energy counters (No module)", remedy="pip install it")
    monkeypatch.setattr(findings, "find_spec", lambda name: None)
    on_mac = found(machine=MAC, counters=counters, runtimes=tuple(runtimes_of(MAC)))
    assert dict(missing(on_mac)) == {
        "PyObjC's frameworks CoreML and Quartz": (
            "pip install pyobjc-framework-CoreML pyobjc-framework-Quartz"
        ),
        "a coremltools with Core ML in it": ("pip install --force-reinstall --no-deps coremltools"),
        "no energy counters (No module)": "pip install it",
        "an examination of the pair's drafter on this Mac": ("ondevice doctor smollm2 --calibrate"),
    }
    old = replace(MAC, system="macOS 14.5 (23F79)")
    (first, *_) = runtimes_of(old)
    assert (first.trouble, first.remedy) == (
        "macOS 15 or newer, for the Neural Engine",
        "softwareupdate --list",
    )


def test_where_the_pair_runs_on_a_mac_and_why_not_elsewhere():
    refused = ProbeReport(runtime="pyobjc", reason="Core ML does not load t1_s512: no")
    function = FunctionReport(first_call_ms=9, ane_share=0.97, elsewhere={"exp on the CPU": 2})
    accepted = ProbeReport(
        runtime="coremltools", reason="", functions={"t8_s512": function}, agreement=0.995,
        positions=200, step_ms={8: 5.25}, beside_ms={8: 6.0}, thermal_state="serious",
        low_power_mode=True,
    )  # fmt: skip
    examined = found(machine=MAC, device="GPU", verdicts=(refused, accepted))
    assert placement_rows(examined) == [
        ("verifier", "MLX on the GPU"),
        ("pyobjc", "refused: Core ML does not load t1_s512: no"),
        (
            "coremltools",
            "97% of the cost on the Neural Engine by Core ML's plan; t8_s512 has 2 exp on the "
            "CPU; 99.5% of first choices among the emulator's three; a step of 8 rows 5.2 ms, "
            "6.0 ms beside the GPU; measured in thermal state serious; measured in low-power mode",
        ),
    ]
    assert as_json(examined)["pair"]["examinations"][1]["step_ms"] == {"8": 5.25}
    slowed = found(conditions=Conditions("serious", True))
    assert any("slowed down by heat" in line for line in meaning(slowed))
    assert "serious; low-power mode on" in rendered(slowed)


def test_dead_counters_are_told_from_live_ones(mac, monkeypatch):
    from ondevice import energy

    monkeypatch.setattr(energy, "this_machine", lambda: MAC)
    mac.order(rails_dead=["ane_mj", "gpu_mj", "gpu_sram_mj"], rails_absent=["dram_mj"])
    seen = look_at_counters()
    assert seen.rails == {"cpu": "alive", "gpu": "dead", "ane": "not tried", "dram": "absent"}
    assert str(seen) == "zeus-apple-silicon: cpu alive, gpu dead, ane not tried, dram absent"


def test_a_report_names_nobody_and_no_place(run, tiny_pair, tmp_path):
    file = tmp_path / "report.txt"
    status, out, _ = run("doctor", tiny_pair, "--report", file)
    assert status == 0
    text = file.read_text()
    assert str(tiny_pair) in " ".join(out.split()) or "cache folder" in out
    assert str(tmp_path) not in text
    assert "/tmp" not in text
    assert "(a path)" in text
    for line in ("processor", "energy", "where", "what that means"):
        assert line in text
    assert_one_line(run("doctor", tiny_pair, "--report", tmp_path), 2, "is a folder")
    assert file.is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open /Users/ann/x y/b.txt: no", "open (a path) y/b.txt: no"),
        ("~/Library/Caches/ondevice, 7 GB", "(a path), 7 GB"),
        ("GPU/CPU and 3/4 of it", "GPU/CPU and 3/4 of it"),
        ("https://host/a/b is a link", "https://host/a/b is a link"),
        ("/sys/class/powercap has none", "/sys/class/powercap has none"),
    ],
)
def test_paths_are_taken_out_and_nothing_else(text, expected):
    assert anonymous(text) == expected


def test_names_are_taken_out(monkeypatch):
    monkeypatch.setattr(findings.getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(findings.platform, "node", lambda: "anns-mac.local")
    assert anonymous("ann on anns-mac.local, annual") == "(a name) on (a name), annual"


def test_relative_paths_and_the_one_that_was_typed_are_hidden_too() -> None:
    assert anonymous("pair clients/acme/pair/drafter has no weights") == (
        "pair (a path) has no weights"
    )
    said = anonymous("where acme/pair runs: 12 tok/s, acme/pair/drafter/x.bin", "acme/pair")
    assert said == "where (a path) runs: 12 tok/s, (a path)"


def test_a_wrong_pair_is_the_users_mistake(run, tmp_path: Path) -> None:
    assert_one_line(run("doctor", "no-such-pair"), 2, "no-such-pair")
    assert_one_line(run("doctor", tmp_path), 2, "is no pair: expected pair.json in it")
    assert_one_line(run("doctor", "no-such-pair", "--calibrate"), 2, "no-such-pair")


def test_a_mac_is_read_from_its_own_figures(monkeypatch) -> None:
    from ondevice import machine

    answers = {"machdep.cpu.brand_string": "Apple M9", "kern.osversion": "29B12"}
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: ("27.1", ("", "", ""), "arm64"))

    def sysctl(command, **_):
        assert command[:2] == ["sysctl", "-n"]
        return type("Done", (), {"stdout": answers[command[2]] + "\n"})

    monkeypatch.setattr(machine.subprocess, "run", sysctl)
    here = machine.this_machine.__wrapped__()
    assert (here.cpu, here.system) == ("Apple M9", "macOS 27.1 (29B12)")
    assert here.apple_silicon


def test_plain_answers_do_not_wait_for_a_calibration(run, tiny_pair, own_home) -> None:
    options = ("-p", "hello", "--max-tokens", "3")
    status, _, err = run("chat", tiny_pair, *options, "--strategy", "plain")
    assert (status, err) == (0, "")
    assert not own_home.exists()
    status, _, err = run("chat", tiny_pair, *options)
    assert (status, err) == (0, "Measuring tiny on this machine\n")
    assert doctor.stored_for(tiny_pair) is not None
