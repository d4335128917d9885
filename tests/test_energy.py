"""Energy of an answer: what counters say, idle subtracted; null with a reason, never 0."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from ondevice import energy
from ondevice.apps.terminal import statistics_line
from ondevice.conditions import Conditions, conditions_now
from ondevice.energy import AppleCounters, EnergyUse, Meter, RaplCounters, Unreadable, open_meter
from ondevice.engine import Engine
from ondevice.home import HOME_VARIABLE
from ondevice.machine import Machine
from ondevice.power import Power
from ondevice.session import Options
from ondevice.statistics import Tally

pytestmark = pytest.mark.usefixtures("counted")

MAC = Machine("Apple M9 Pro", 12, 12, 36_000_000_000, "macOS 27.1 (29B12)", True)


class Counters:
    """mJ to order."""

    name = "counters"

    def __init__(self, **rails: float | None) -> None:
        self.rails = rails
        self.open: set[str] = set()

    def begin(self, label: str) -> None:
        assert label not in self.open
        self.open.add(label)

    def end(self, label: str) -> dict[str, float | None]:
        self.open.remove(label)
        return dict(self.rails)


def used(meter: Meter, busy_ms: dict[str, float] | None = None, last_ms: float = 60) -> EnergyUse:
    window = meter.begin()
    time.sleep(last_ms / 1e3)
    return window.end(busy_ms or {})


def test_rails_are_what_the_counters_say_and_windows_may_overlap():
    meter = Meter(Counters(cpu=10.0, gpu=20.0))
    outer = meter.begin()
    assert used(meter).rails_mj == {"cpu": 10.0, "gpu": 20.0}
    time.sleep(0.02)
    assert outer.end({}).reason is None


def test_idle_is_subtracted_and_stated_and_never_makes_less_than_nothing():
    meter = Meter(Counters(cpu=10.0, gpu=20.0, ane=1.0))
    meter.idle_mw = {"cpu": 1e6, "gpu": 100.0}
    use = used(meter, last_ms=100)
    assert use.rails_mj["cpu"] == 0.0
    assert 5 < use.rails_mj["gpu"] < 10.5
    assert use.rails_mj["ane"] == 1.0
    assert use.idle_mw == meter.idle_mw


@pytest.mark.parametrize(
    ("rails", "busy_ms", "rail", "reason"),
    [
        ({"ane": None}, {"ane": 500.0}, "ane", "ane: this machine has no such counter"),
        ({"ane": 0}, {"ane": 812.0}, "ane", "ane: its counter stayed at 0 for 812 ms of work"),
        ({"gpu": 0}, {"gpu": 40.0}, "gpu", "gpu: its counter stayed at 0 for 40 ms of work"),
        ({"ane": 0}, {"ane": 30.0}, None, None),
        ({"ane": 0}, {}, None, None),
    ],
)
def test_a_missing_or_dead_counter_is_null_with_a_reason(rails, busy_ms, rail, reason):
    use = used(Meter(Counters(**rails)), busy_ms)
    assert use.reason == reason
    assert [name for name, mj in use.rails_mj.items() if mj is None] == ([rail] if rail else [])


def test_cpu_and_memory_always_work():
    reason = used(Meter(Counters(cpu=0, dram=0)), last_ms=60).reason
    assert "cpu: its counter stayed at 0" in reason
    assert "dram: its counter stayed at 0" in reason


def test_too_short_a_window_is_noise(monkeypatch):
    monkeypatch.setattr(energy, "LEAST_MS", 60_000.0)
    use = used(Meter(Counters(cpu=10.0)), last_ms=0)
    assert (use.rails_mj, use.reason) == (None, "the answer took less than 60000 ms")


def test_counters_that_fail_on_the_way_are_given_up_with_their_reason():
    counters = Counters(cpu=10.0)
    meter = Meter(counters)
    window = meter.begin()
    counters.open.clear()
    assert window.end({}).rails_mj is None
    assert meter.reason.startswith("counters failed: ")
    assert meter.name is None
    assert used(meter).reason == meter.reason


def test_energy_per_token_and_of_rejected_drafts():
    use = EnergyUse({"cpu": 30.0, "ane": 8.0, "dram": None}, None)
    assert use.per_token_mj(10) == {"cpu": 3.0, "ane": 0.8}
    assert use.per_token_mj(0) is None
    assert use.rejected_mj("ane", drafted=20, accepted=5) == 6.0
    assert use.rejected_mj("ane", drafted=0, accepted=0) is None
    assert use.rejected_mj(None, drafted=20, accepted=5) is None
    assert use.rejected_mj("dram", drafted=20, accepted=5) is None
    assert EnergyUse(None, "none").per_token_mj(10) is None


def test_idle_is_measured_once_for_a_machine(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    first = Meter(Counters(cpu=200.0, ane=None))
    first.know_idle()
    assert first.idle_mw.keys() == {"cpu"}
    assert 300 < first.idle_mw["cpu"] <= 1010
    second = Meter(Counters(cpu=999.0))
    second.know_idle()
    assert second.idle_mw == first.idle_mw
    (tmp_path / "idle.json").write_text("rubbish")
    third = Meter(Counters(cpu=400.0))
    third.know_idle()
    assert third.idle_mw["cpu"] > first.idle_mw["cpu"]
    assert json.loads((tmp_path / "idle.json").read_text())
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "idle.json"))  # cannot be written
    fourth = Meter(Counters(cpu=100.0))
    fourth.know_idle()
    assert fourth.idle_mw
    nothing = Meter(None, "none")
    nothing.know_idle()
    assert nothing.idle_mw is None
    broken = Meter(Counters(cpu=1.0))
    broken._source.open = ()  # type: ignore[union-attr]
    broken.know_idle()
    assert broken.idle_mw is None


# On a Mac


def test_apples_counters_are_rails(mac):
    meter = Meter(AppleCounters())
    use = used(meter, {"gpu": 100.0, "ane": 100.0}, last_ms=200)
    assert use.reason is None
    assert use.rails_mj.keys() == {"cpu", "gpu", "ane", "dram"}
    assert use.rails_mj["gpu"] == pytest.approx(8.5 / 2 * use.rails_mj["ane"], rel=0.05)


def test_apples_counters_may_be_missing_dead_or_fail(mac):
    meter = Meter(AppleCounters())
    mac.order(rails_absent=["ane_mj", "gpu_sram_mj"], rails_dead=["gpu_mj", "cpu_total_mj"])
    use = used(meter, {"gpu": 200.0, "ane": 200.0}, last_ms=100)
    assert use.rails_mj["ane"] is use.rails_mj["gpu"] is use.rails_mj["cpu"] is None
    assert use.rails_mj["dram"] > 50
    assert "ane: this machine has no such counter" in use.reason
    assert "gpu: its counter stayed at 0 for 200 ms of work" in use.reason
    mac.order(end_window=1)
    assert used(meter).reason == "zeus-apple-silicon failed: the subscription is gone"
    mac.order(monitor=1)
    with pytest.raises(Unreadable, match="Failed to create subscription"):
        AppleCounters()


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(energy, "this_machine", lambda: MAC)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    meter = open_meter()
    assert meter.name is None
    assert meter.reason.startswith("no energy counters (import of zeus_apple_silicon halted")
    assert meter.begin().end({}).reason.endswith(": pip install zeus-apple-silicon")


def test_a_macs_heat_and_low_power_mode_are_read(mac):
    assert conditions_now() == Conditions("nominal", False)
    assert conditions_now().slowed == ""
    mac.order(thermal=2, low_power=True)
    assert conditions_now() == Conditions("serious", True)
    assert conditions_now().slowed == (
        "the machine is slowed down by heat (thermal state serious); low-power mode is on"
    )
    mac.order(thermal=9)
    assert conditions_now().thermal_state == "9"


def test_elsewhere_nothing_is_said_of_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "Foundation", None)
    assert conditions_now() == Conditions()
    assert Conditions().slowed == ""


# On Linux


def zone(root: Path, name: str, label: str, used_uj: int, range_uj: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, value in (("name", label), ("energy_uj", used_uj), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_rapl_adds_up_packages_and_memory_and_follows_a_counter_that_begins_anew(tmp_path):
    one = zone(tmp_path, "intel-rapl:0", "package-0", 999_000)
    two = zone(tmp_path, "intel-rapl:1", "package-1", 5_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 7_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1)
    (tmp_path / "intel-rapl:2").mkdir()
    source = RaplCounters(tmp_path)
    source.begin("w")
    for folder, now in ((one, 2_000), (two, 9_000), (memory, 17_000)):
        (folder / "energy_uj").write_text(str(now))
    assert source.end("w") == {"cpu": pytest.approx(3.0 + 4.0), "dram": pytest.approx(10.0)}


def test_rapl_that_is_not_there_or_not_for_us_says_so(tmp_path, monkeypatch):
    with pytest.raises(Unreadable, match="has no RAPL zones on this machine"):
        RaplCounters(tmp_path)
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (folder / "energy_uj").unlink()
    (folder / "energy_uj").mkdir()  # root reads everything, so a file of mode 0 proves nothing
    with pytest.raises(Unreadable, match=r"cannot be read \(Is a directory\)") as raised:
        RaplCounters(tmp_path)
    assert raised.value.remedy == f"sudo chmod a+r {tmp_path}/intel-rapl:*/energy_uj"


def test_this_machine_has_counters_or_a_reason():
    meter = open_meter()
    assert bool(meter.name) != bool(meter.reason)
    if sys.platform == "linux" and not os.path.isdir("/sys/class/powercap"):
        assert "no RAPL zones" in meter.reason


# In an answer


def test_an_answer_has_all_of_it(mac):
    power = Power(Meter(AppleCounters()), "gpu", "ane")
    tally = Tally("pipelined", prompt_tokens=3, asked_ns=0)
    tally.tokens, tally.steps, tally.drafted, tally.accepted = 10, 4, 20, 5
    tally.verifier_ns, tally.drafter_ns = 90_000_000, 50_000_000
    assert power.busy_ms(tally) == {"gpu": 90.0, "ane": 50.0}
    window = power.meter.begin()
    time.sleep(0.1)
    mac.order(thermal=1)
    use = window.end(power.busy_ms(tally))
    stats = power.added(tally.summary("because", 1), use).as_json()
    assert stats["energy_mj"]["ane"] > 0
    assert stats["energy_per_token_mj"]["gpu"] == stats["energy_mj"]["gpu"] / 10
    assert stats["energy_rejected_drafts_mj"] == stats["energy_mj"]["ane"] * 0.75
    assert (stats["thermal_state"], stats["low_power_mode"]) == ("fair", False)
    assert stats["energy_reason"] is None
    shared = Power(power.meter, "gpu", None).added(tally.summary("because", 1), use)
    assert shared.energy_rejected_drafts_mj is None
    assert shared.energy_reason == "rejected drafts: the drafter shares its rail with others"
    line = statistics_line(power.added(tally.summary("because", 1), use))
    assert re.search(
        r"  energy cpu \d+\.\d, gpu \d+\.\d, ane \d+\.\d, dram \d+\.\d mJ/token  ", line
    )


def test_a_session_without_counters_says_why(tiny_pair):
    with Engine.open_folder(tiny_pair, measure=False, quiet=True) as engine:
        stats = engine.generate([5, 6, 7], Options(max_tokens=3)).stats
    assert (stats.energy_mj is None) <= bool(stats.energy_reason)
