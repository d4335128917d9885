"""`doctor` on Linux: every field of its page against another source than the one it reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from commandline import assert_one_line, runner

from ondevice.apps import doctor
from ondevice.apps.doctor import examine, print_examination
from ondevice.apps.findings import write_report
from ondevice.home import home_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's own files")


@pytest.fixture(name="run")
def run_fixture(capfd, monkeypatch):
    return runner(capfd, monkeypatch)


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def loaded_libraries(word: str) -> set[str]:
    """Files of this process's memory map."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if word in line.rpartition("/")[2]}


def test_every_field_is_what_others_say(run, tiny_pair, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    status, out, err = run("doctor", tiny_pair, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found.keys() == {
        "machine", "versions", "mlx_device", "blas", "core_ml_runtimes", "runtimes",
        "energy_counters", "conditions", "missing", "home", "meaning", "pair",
    }  # fmt: skip
    machine = found["machine"]
    processors = Path("/proc/cpuinfo").read_text()
    models = re.findall(r"^model name\s*: (.*)$", processors, re.M)
    assert machine["cpu"] == (models[0].strip() if models else told("uname", "-m"))
    assert machine["cores"] == int(told("nproc", "--all"))
    assert machine["usable_cores"] == len(os.sched_getaffinity(0))
    kib = int(re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())[1])
    assert machine["memory_bytes"] == kib * 1024
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _release().read_text(), re.M))
    assert machine["system"] == f"{release['PRETTY_NAME']}, kernel {told('uname', '-r')}"
    assert machine["apple_silicon"] is False

    versions = dict(found["versions"])
    assert versions.pop("python") == sys.version.split()[0]
    for name, stated in versions.items():
        assert stated == metadata.version(name)
    assert {"ondevice", "mlx", "mlx-lm", "coremltools", "numpy", "transformers"} == set(versions)

    import mlx.core as mx

    assert found["mlx_device"] == ("GPU" if mx.metal.is_available() else "CPU")
    _check_blas(found["blas"])
    assert found["core_ml_runtimes"] == ["emulator"]
    assert [each["name"] for each in found["runtimes"]] == ["emulator"]
    assert found["conditions"] == {"thermal_state": None, "low_power_mode": None}
    counters = found["energy_counters"]
    zones = list(Path("/sys/class").glob("powercap/intel-rapl:*/energy_uj"))
    readable = bool(zones) and all(os.access(path, os.R_OK) for path in zones)
    assert (counters["name"] is not None) == readable
    assert bool(counters["trouble"]) != readable

    assert found["home"]["path"] == str(tmp_path)
    free = int(told("df", "--output=avail", "-B1", str(tmp_path)).split()[-1])
    assert found["home"]["free_bytes"] == pytest.approx(free, rel=0.05)
    pair = found["pair"]
    assert (pair["name"], pair["path"], pair["damage"]) == (str(tiny_pair), str(tiny_pair), "")
    assert pair["placement"] == {
        "verifier": f"MLX on the {found['mlx_device']}",
        "drafter": "emulated Core ML on the CPU",
    }
    assert pair["costs"] is None  # of this home
    lacks = {each["what"]: each["mend"] for each in found["missing"]}
    assert lacks["what the pair's steps take here"] == f"ondevice doctor {tiny_pair} --calibrate"


def _release() -> Path:
    places = Path("/etc/os-release"), Path("/usr/lib/os-release")
    return next(path for path in places if path.exists())


def _check_blas(stated: dict) -> None:
    """An OpenBLAS that was loaded is in the memory map, and has that many threads."""
    import ctypes

    files = loaded_libraries("libopenblas")
    system = {path for path in files if "site-packages" not in path}  # numpy brings one of its own
    assert (stated["library"] is not None) == bool(system)
    if stated["library"] is not None:
        assert any(path.rpartition("/")[2].startswith("libopenblas") for path in system)
        library = ctypes.CDLL(stated["library"])
        assert stated["threads"] == library.openblas_get_num_threads()
    assert stated["fast"] == (bool(system) or not stated["needed"])


def test_the_page_says_what_the_json_says(run, tiny_pair) -> None:
    found = json.loads(run("doctor", tiny_pair, "--json")[1])
    page = " ".join(run("doctor", tiny_pair)[1].split())
    machine = found["machine"]
    for words in (
        f"processor {machine['cpu']}, {machine['cores']} cores",
        f"memory {machine['memory_bytes'] / 2**30:.1f} GiB",
        f"system {machine['system']}",
        f"cache folder {home_folder()}",
        "Neural Engine none",
        "Core ML emulator",
        f"MLX on the {found['mlx_device']}",
        *(f"{name} {version}" for name, version in found["versions"].items()),
        *found["meaning"],
        *found["pair"]["meaning"],
    ):
        assert words in page


def damaged(pair: Path, *lost: str) -> Path:
    for name in lost:
        path = pair / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return pair


WEIGHTS = "drafter/drafter.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
HALVES = {
    "no verifier weights": ("verifier/model.safetensors", "model.safetensors is missing"),
    "no verifier": ("verifier", "verifier/ondevice.json (No such file or directory)"),
    "no drafter": ("drafter", "drafter/drafter.json (No such file or directory)"),
    "no package": ("drafter/drafter.mlpackage", "drafter.mlpackage"),
    "no drafter weights": (WEIGHTS, "no readable weights"),
}


@pytest.mark.parametrize(("lost", "words"), HALVES.values(), ids=HALVES)
def test_a_pair_that_is_half_there_is_a_finding_with_its_remedy(
    run, tiny_pair, tmp_path, monkeypatch, lost, words
) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    (tmp_path / "pairs").mkdir()
    pair = damaged(Path(shutil.copytree(tiny_pair, tmp_path / "pairs" / "smollm2")), lost)
    status, out, err = run("doctor", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    (lack,) = found["missing"]
    assert words in lack["what"]
    assert lack["mend"] == f"delete {pair}: it is made anew"
    assert words in found["pair"]["damage"]
    assert found["pair"]["meaning"] == ["Damaged, so that nothing is known of its costs."]
    other = pair.rename(tmp_path / "mine")
    (lack,) = json.loads(run("doctor", other, "--json")[1])["missing"]
    assert "convert" in lack["mend"]


def test_a_pair_without_a_drafter_is_not_said_to_have_one(run, tiny_pair, tmp_path) -> None:
    pair = Path(shutil.copytree(tiny_pair, tmp_path / "pair"))
    manifest = json.loads((pair / "pair.json").read_text())
    (pair / "pair.json").write_text(json.dumps(manifest | {"drafter": None}))
    shutil.rmtree(pair / "drafter")
    found = json.loads(run("doctor", pair, "--json")[1])
    assert found["pair"]["placement"]["drafter"] == "the pair has none"
    assert found["pair"]["damage"] == ""


def test_a_report_goes_where_it_can_or_says_why_not_before_anything_is_looked_at(
    run, tiny_pair, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "examine", lambda request: pytest.fail("it was looked at"))
    for name, words in (("", "folder"), ("file/report", "no folder")):
        assert_one_line(run("doctor", tiny_pair, "--report", tmp_path / name), 2, words)


def test_a_report_has_no_name_no_path_and_no_trailing_blanks(tiny_pair, tmp_path) -> None:
    found = examine(doctor.Request(str(tiny_pair)))
    write_report(tmp_path / "report", lambda console: print_examination(found, console))
    text = (tmp_path / "report").read_text()
    assert not re.search(r" $", text, re.M)
    for secret in (str(tmp_path), str(Path.home()), os.uname().nodename, str(home_folder())):
        assert secret not in text
    assert "\nwhat that means\n" in text
