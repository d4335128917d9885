"""coremltools' runtime: the real package, on a stand-in of its binding; always in a process."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import coremltools
import numpy as np
import pytest
from engines import open_here
from processes import is_gone

from ondevice import ladder, probe
from ondevice.coreml import toolsruntime
from ondevice.coreml.compiled import compiled_model
from ondevice.coreml.package import Package
from ondevice.coreml.runtime import TensorSpec
from ondevice.coreml.toolsruntime import CoreMLToolsRuntime
from ondevice.errors import CallMismatch, RuntimeUnavailable, UnitFailed
from ondevice.ladder import Choice, choose, open_process
from ondevice.machine import Machine
from ondevice.probereport import ProbeReport
from ondevice.session import Options

MAC = Machine("Apple M9 Pro", 12, 12, 36_000_000_000, "macOS 27.1 (29B12)", True)
TOOLS = Path(__file__).parent / "mactools"
PROMPT = [9, 40, 77, 41, 9]


@pytest.fixture
def tools(mac, monkeypatch, tmp_path):
    """coremltools that predicts, in the processes that are started from here."""
    fake = tmp_path / "tools" / "coremltools"
    shutil.copytree(TOOLS / "coremltools", fake)
    # Its messages are read without importing it. The real one is imported here already.
    (fake / "proto").symlink_to(Path(coremltools.__file__).parent / "proto")
    monkeypatch.syspath_prepend(str(fake.parent))
    return mac


def package_of(pair: Path) -> Path:
    return pair / "drafter" / "drafter.mlpackage"


def open_runtime(pair: Path) -> CoreMLToolsRuntime:
    path = package_of(pair)
    return CoreMLToolsRuntime(Package.open(path), compiled_model(path, "coremltools"), ["t1_s64"])


def test_inputs_are_single_precision_last_and_are_used_again(tools_here, tiny_pair):
    runtime = open_runtime(tiny_pair)
    specs = runtime.functions["t1_s64"].inputs
    assert {spec.dtype for spec in specs.values()} == {np.dtype(np.float32)}
    ones = {name: np.ones(spec.shape, np.float32) for name, spec in specs.items()}
    first = runtime.predict("t1_s64", ones)
    made = len(toolsruntime._for_ever)
    for _ in range(5):  # the caller's own arrays come and go; Core ML never sees them
        again = runtime.predict("t1_s64", {name: a.copy() for name, a in ones.items()})
        assert all(np.array_equal(again[name], array) for name, array in first.items())
    assert len(toolsruntime._for_ever) == made
    out = {"k_new": runtime.functions["t1_s64"].outputs["k_new"].empty()}
    assert runtime.predict("t1_s64", ones, out)["k_new"] is out["k_new"]
    assert np.array_equal(out["k_new"], first["k_new"])


def test_a_buffer_is_given_out_again_only_when_nobody_has_it(tools_here, tiny_pair):
    runtime = open_runtime(tiny_pair)
    spec = TensorSpec((3, 5), np.dtype(np.float32))
    one, two = runtime.buffer(spec), runtime.buffer(spec)
    assert one is not two
    one[:] = 7
    view, known = one[0], id(one)
    del one
    gc.collect()
    assert id(runtime.buffer(spec)) != known
    del view
    gc.collect()
    again = [runtime.buffer(spec) for _ in range(3)]
    assert known in {id(array) for array in again}
    assert not any(array.any() for array in again)


FAULTS = {
    "tools_compile": "Core ML does not compile the package: Error compiling model: -14",
    "tools_load": "coremltools does not load t1_s64: Error in declaring network.",
    "tools_predict": "Core ML failed in t1_s64: Unable to compute the prediction",
    "tools_garbage": "Core ML gave (64,) for k_new in t1_s64, expected (1, 2, 1, 32)",
}


@pytest.mark.parametrize(("order", "line"), FAULTS.items(), ids=FAULTS)
def test_each_failure_is_one_line(tools_here, tiny_pair, order, line):
    tools_here.order(**{order: 1})

    def run() -> None:
        runtime = open_runtime(tiny_pair)
        specs = runtime.functions["t1_s64"].inputs
        runtime.predict("t1_s64", {name: spec.empty() for name, spec in specs.items()})

    with pytest.raises(UnitFailed) as raised:
        run()
    assert str(raised.value) == line


def test_wrong_calls_are_refused(tools_here, tiny_pair):
    runtime = open_runtime(tiny_pair)
    with pytest.raises(CallMismatch, match="no function t9"):
        runtime.predict("t9", {})
    runtime.close()
    with pytest.raises(UnitFailed, match="closed"):
        runtime.predict("t1_s64", {})


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's coremltools has Core ML in it")
def test_a_coremltools_without_core_ml_cannot_be_had(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="does not compile"):
        open_runtime(tiny_pair)
    with pytest.raises(RuntimeUnavailable, match="coremltools does not load t1_s64"):
        CoreMLToolsRuntime(Package.open(package_of(tiny_pair)), tmp_path, ["t1_s64"])


def test_caches_that_are_too_large_to_convert_are_left_to_others(tiny_pair, monkeypatch):
    from ondevice.artifact import DrafterManifest

    manifest = DrafterManifest.read(tiny_pair / "drafter" / "drafter.json")
    assert probe._fitting("coremltools", manifest).context_sizes == (64, 256)
    slot_bytes = 2 * 2 * 1 * 2 * 32
    monkeypatch.setattr(probe, "MOST_CACHE_BYTES", 64 * slot_bytes + 1)
    assert probe._fitting("coremltools", manifest).context_sizes == (64,)
    assert probe._fitting("pyobjc", manifest).context_sizes == (64, 256)
    monkeypatch.setattr(probe, "MOST_CACHE_BYTES", 1)
    with pytest.raises(RuntimeUnavailable, match=r"caches of 0 MB would be converted in every"):
        probe._fitting("coremltools", manifest)


def test_it_takes_over_when_pyobjc_is_refused(tools, tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "this_machine", lambda: MAC)
    drafter = Path(shutil.copytree(tiny_pair / "drafter", tmp_path / "drafter"))
    tools.order(load=1)
    choice = choose(drafter, tiny_pair / "verifier")
    assert choice.kind == "coremltools"
    assert choice.line.startswith(
        "Core ML on the Neural Engine, through coremltools (100% of the cost by Core ML's plan); "
        "not pyobjc: Core ML does not load t1_s64"
    )
    assert choice.reports[-1].agreement == 1.0
    assert choice.reports[-1].soak_calls == 256


# The worker process, as the engine uses it: same text whatever becomes of it


def accepted(kind: str) -> Choice:
    report = ProbeReport(runtime=kind, reason="", row_counts=[1, 8], context_sizes=[64, 256])
    return Choice(kind, (report,))


@pytest.fixture(scope="module")
def plain_ids(tiny_pair) -> tuple[int, ...]:
    with open_here(tiny_pair) as engine:
        return engine.generate(PROMPT, Options(max_tokens=24, strategy="plain")).token_ids


@pytest.mark.parametrize("fault", [{}, {"tools_garbage": 1}], ids=str)
def test_the_text_is_the_same_whatever_the_worker_answers(tools, tiny_pair, plain_ids, fault):
    def in_process(_):
        made = open_process(tiny_pair / "drafter", tiny_pair / "verifier", accepted("coremltools"))
        processes.append(made.process_id)
        return made

    processes: list[int] = []
    tools.order(**fault)
    with open_here(tiny_pair, drafter=in_process) as engine:
        answer = engine.generate(PROMPT, Options(max_tokens=24, strategy="pipelined"))
    assert answer.token_ids == plain_ids
    if fault:
        assert "without the drafter since it failed: Core ML" in answer.stats.reason
    else:
        assert "failed" not in answer.stats.reason
    assert all(map(is_gone, processes))


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
def test_200_opens_and_closes_leave_nothing(tiny_pair):
    before, handles = shared_memory(), len(os.listdir("/proc/self/fd"))
    processes = []
    for _ in range(200):
        made = open_process(tiny_pair / "drafter", tiny_pair / "verifier", Choice("emulator"))
        processes.append(made.process_id)
        made.close()
    assert all(map(is_gone, processes))
    assert shared_memory() <= before
    assert len(os.listdir("/proc/self/fd")) <= handles + 2


def test_a_parent_that_is_killed_takes_its_worker_along(tiny_pair):
    """Also one that examines."""
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from ondevice.childprocess import ChildProcess
        from ondevice.ladder import Choice, open_process
        made = open_process(Path(sys.argv[1]), Path(sys.argv[2]), Choice("emulator"))
        examining = ChildProcess("ondevice.probe")
        print(made.process_id, examining.process_id, flush=True)
        time.sleep(600)
        """
    )
    before = shared_memory()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, tiny_pair / "drafter", tiny_pair / "verifier"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    workers = [int(number) for number in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(map(is_gone, workers))
    assert shared_memory() <= before
