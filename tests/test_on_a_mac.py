"""A whole evening on a Mac, played on the stand-ins; and what only a real one can show."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from commandline import runner
from engines import open_here

from ondevice import energy, ladder
from ondevice.apps import doctor
from ondevice.apps.opening import placement
from ondevice.coreml.compiled import compiled_model
from ondevice.coreml.package import Package
from ondevice.engine import Engine
from ondevice.machine import Machine, this_machine
from ondevice.probe import examine
from ondevice.session import Options

MAC = Machine("Apple M9 Pro", 12, 12, 36_000_000_000, "macOS 27.1 (29B12)", True)


@pytest.fixture(name="pair")
def pair_fixture(mac, tiny_pair, tmp_path, monkeypatch) -> Path:
    for module in (ladder, energy, doctor):
        monkeypatch.setattr(module, "this_machine", lambda: MAC)
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


def test_doctor_then_chat_on_the_neural_engine(pair, tiny_pair, capfd, monkeypatch):
    """Examined and measured once; then the same text as in the emulator, with its energy."""
    run = runner(capfd, monkeypatch)
    status, out, err = run("doctor", pair, "--calibrate")
    assert status == 0
    assert err.splitlines()[:3] == [
        "Examining the drafter on this Mac, once; this may take some minutes",
        "  pyobjc: compiling and loading 4 functions",
        "  pyobjc: computing the reference",
    ]
    assert err.count("pyobjc: running") == 1
    page = " ".join(out.split())
    assert "Apple M9 Pro, 12 cores" in page
    assert "Neural Engine present" in page
    assert "heat nominal; low-power mode off" in page
    assert "zeus-apple-silicon: cpu alive" in page
    assert "pyobjc 100% of the cost on the Neural Engine by Core ML's plan" in page
    options = ("-p", "hello", "--max-tokens", "8", "--strategy", "pipelined", "--json")
    status, out, err = run("chat", pair, *options)
    assert status == 0
    assert "Examining" not in err
    answer = json.loads(out)
    stats = answer["stats"]
    assert stats["energy_mj"]["cpu"] is not None
    assert stats["energy_idle_mw"]
    assert (stats["thermal_state"], stats["low_power_mode"]) == ("nominal", False)
    with open_here(tiny_pair) as emulated:
        options = Options(max_tokens=8, strategy="plain")
        assert list(emulated.generate("hello", options).token_ids) == answer["token_ids"]


def test_the_chat_says_which_runtime_and_why(pair, mac, monkeypatch):
    """Two lines of the placement; every reason has its own test among the examinations."""
    reasons = {"pyobjc": "its logits are not finite", "coremltools": "caches of 19 MB", "mlx": ""}
    monkeypatch.setattr(
        ladder,
        "examine",
        lambda kind, *_: ladder.ProbeReport(
            runtime=kind, reason=reasons[kind], row_counts=[1, 8], context_sizes=[64, 256]
        ),
    )
    with Engine.open_folder(pair, measure=False, quiet=True) as engine:
        assert placement(engine) == [
            "drafter: MLX on the GPU; not pyobjc: its logits are not finite; not coremltools: "
            "caches of 19 MB",
            "verifier: MLX on CPU",
        ]
        answer = engine.generate([5, 6, 7], Options(max_tokens=4, strategy="sequential"))
        assert len(answer.token_ids) == 4
    reasons["pyobjc"] = ""
    ladder.forget(pair / "drafter")
    with Engine.open_folder(pair, measure=False, quiet=True) as engine:
        assert placement(engine)[0] == (
            "drafter: Core ML on the Neural Engine, through PyObjC (where it runs is not proven: "
            "Core ML's plan cannot be read)"
        )


on_a_mac = pytest.mark.skipif(
    sys.platform != "darwin" or not this_machine().apple_silicon,
    reason="needs macOS on Apple silicon",
)


@pytest.mark.mac
@on_a_mac
def test_the_real_core_ml_agrees_with_the_emulator(tiny_pair):
    from ondevice.coreml.emulator import Emulator
    from ondevice.coreml.pyobjc import PyObjCRuntime

    path = tiny_pair / "drafter" / "drafter.mlpackage"
    runtime = PyObjCRuntime(Package.open(path), compiled_model(path))
    emulator = Emulator.open(path, "fp16")
    for name, signature in runtime.functions.items():
        inputs = {key: runtime.buffer(spec) for key, spec in signature.inputs.items()}
        for array in inputs.values():
            array[...] = 0.25
        got, expected = runtime.predict(name, inputs), emulator.predict(name, inputs)
        for key, array in expected.items():
            assert abs(got[key].astype("f4") - array.astype("f4")).max() < 0.05 * abs(array).max()


@pytest.mark.mac
@on_a_mac
@pytest.mark.parametrize("kind", ["pyobjc", "coremltools", "mlx"])
def test_a_real_examination_ends_with_a_verdict(tiny_pair, kind):
    """What it says is the machine's business (a tiny program may be given to the CPU)."""
    report = examine(kind, tiny_pair / "drafter", tiny_pair / "verifier")
    print(report.model_dump_json(indent=2))
    assert report.functions or report.reason


@pytest.mark.mac
@on_a_mac
def test_real_counters_and_conditions_are_read():
    from ondevice.apps.findings import look_at_counters
    from ondevice.conditions import conditions_now

    print(look_at_counters())
    assert conditions_now().thermal_state is not None
