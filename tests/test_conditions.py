"""Heat and low-power mode: in every result, and the worst of a run is what is said of it."""

from __future__ import annotations

import json

import pytest
from commandline import runner

from ondevice.apps.benchtable import slowed_lines
from ondevice.conditions import THERMAL_STATES, Conditions, worst

FAIR, SERIOUS, CRITICAL = (Conditions(state, False) for state in THERMAL_STATES[1:])


@pytest.mark.usefixtures("counted")
def test_the_worst_counts_and_what_is_not_known_does_not() -> None:
    assert worst([SERIOUS, CRITICAL, FAIR]) == CRITICAL
    assert worst([FAIR, Conditions("nominal", True)]) == Conditions("fair", True)
    assert worst([FAIR, Conditions()]) == FAIR
    assert worst([Conditions()]) == worst([]) == Conditions()
    assert worst([CRITICAL, Conditions("9", False)]).thermal_state == "9"  # newer than this code
    assert Conditions("9", False).slowed


@pytest.fixture(name="run")
def run_fixture(capfd, monkeypatch):
    return runner(capfd, monkeypatch)


HOT = {"thermal_state": "serious", "low_power_mode": True}
WHY = (
    "speeds are lower than this machine's: the machine is slowed down by heat (thermal state "
    "serious); low-power mode is on"
)


def test_a_slowed_machine_is_in_every_result(mac, run, tiny_pair) -> None:
    mac.order(thermal=2, low_power=True)
    few = ("--max-tokens", 4, "--limit", 1, "--strategy", "plain")

    def result_of(*command: object) -> dict:
        status, out, err = run(*command, "--json")
        assert status == 0, err
        return json.loads(out)

    stats = result_of("chat", tiny_pair, "-p", "hi", *few[:2], *few[4:])["stats"]
    assert {name: stats[name] for name in HOT} == HOT
    benched = result_of("bench", tiny_pair, *few)
    assert benched["conditions"] == HOT
    for answer in benched["answers"]:  # mlx-lm's too
        assert {name: answer[name] for name in HOT} == HOT
    assert len({answer["side"] for answer in benched["answers"]}) > 1
    assert result_of("profile", tiny_pair, *few)["conditions"] == HOT
    assert result_of("doctor", tiny_pair)["conditions"] == HOT
    assert slowed_lines(Conditions(**HOT)) == [WHY]
    assert slowed_lines(FAIR) == []
