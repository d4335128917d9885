"""Every name that the product sends to Apple's frameworks is one that they have.

Two witnesses that nobody here wrote, both packages for macOS that pip downloads anywhere: PyObjC's
own metadata (its wheels; its source distributions run a build step on a Mac only), which lists the
selectors with out-arguments and callbacks, and the selectors in coremltools' binary, which calls
Core ML itself. What neither names is listed here with the header that declares it.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COREML = ROOT / "ondevice" / "coreml"
SENDERS = [
    *(COREML / f"{name}.py" for name in ("apple", "compiled", "devicearray", "plan", "pyobjc")),
    ROOT / "ondevice" / "conditions.py",
]
WHEELS = {
    "pyobjc-framework-CoreML": "CoreML/_metadata.py",
    "pyobjc-framework-Cocoa": "Foundation/_metadata.py",
    "pyobjc-framework-Quartz": "Quartz/CoreVideo/_metadata.py",
    "coremltools==9.0": "coremltools/libcoremlpython.so",
    "zeus-apple-silicon": "",
}
HEADERS = {
    "setOutputBackings:": "CoreML/MLPredictionOptions.h",
    "initWithPixelBuffer:shape:": "CoreML/MLMultiArray.h",
    "numberWithInteger:": "Foundation/NSValue.h",
    "stringWithString:": "Foundation/NSString.h",
    "setObject:forKey:": "Foundation/NSDictionary.h",
    "objectForKey:": "Foundation/NSDictionary.h",
    "addObject:": "Foundation/NSArray.h",
    "thermalState": "Foundation/NSProcessInfo.h",
    "processInfo": "Foundation/NSProcessInfo.h",
}
"""Simple properties and container methods: PyObjC needs no metadata for them."""
CLASS = re.compile(r"(ML|NS)[A-Z]\w+")
CAMEL = re.compile(r"[a-z]+[A-Z]\w*")


@dataclass
class Witnesses:
    """Selectors, with the places of their out-arguments where known; functions with their arity."""

    selectors: set[str] = field(default_factory=set)
    outs: dict[str, set[int]] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    names: str = ""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    for platform in ("macosx_10_13_universal2", "macosx_11_0_universal2", "macosx_11_0_arm64"):
        command += ["--platform", platform]
    command += ["--only-binary", ":all:", "--python-version", "3.13", "--retries", "1"]
    done = subprocess.run([*command, *WHEELS], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"the frameworks' wheels could not be downloaded: {last}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def witnesses(wheels: Path) -> Witnesses:
    found = Witnesses()
    for member in WHEELS.values():
        if member.endswith(".py"):
            text = (wheels / member).read_text()
            found.names += text
            _read_metadata(text, found)
    binary = (wheels / WHEELS["coremltools==9.0"]).read_bytes()
    words = {word.decode() for word in re.findall(rb"(?<=\0)[A-Za-z_$:][\w$:]*(?=\0)", binary)}
    found.selectors |= words
    found.names += " ".join(words)
    return found


def _read_metadata(text: str, found: Witnesses) -> None:
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "r":
            selector = ast.literal_eval(call.args[1]).decode()
            details = ast.unparse(call.args[2])
            found.selectors.add(selector)
            places = re.findall(r"(\d+): \{[^{}]*'type_modifier': b'o'", details)
            found.outs.setdefault(selector, set()).update(int(place) - 2 for place in places)
    for name, encoding in re.findall(r'"(CV\w+)": \(\s*b"([^"]+)"', text):
        found.functions[name] = len(re.findall(r"\^*(?:\{[^}]*\}|[a-zA-Z@?#:*])", encoding)) - 1


@dataclass(frozen=True)
class Sent:
    """A message or function call in the product's source."""

    name: str
    arguments: tuple[ast.expr, ...]
    where: str


def sent(path: Path, source: str | None = None) -> Iterator[Sent]:
    for node in ast.walk(ast.parse(source or path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") or CAMEL.fullmatch(name) or name.startswith("CV"):
                yield Sent(name, tuple(node.args), f"{path.name}:{node.lineno}")


def complaints(sending: Iterator[Sent], known: Witnesses) -> list[str]:
    wrong = []
    for each in sending:
        if each.name.startswith("CV"):
            arity = known.functions.get(each.name)
            if arity != len(each.arguments):
                wrong.append(f"{each.where}: {each.name} takes {arity}, got {len(each.arguments)}")
            continue
        selector = each.name.replace("_", ":")
        if selector not in known.selectors | HEADERS.keys():
            wrong.append(f"{each.where}: no selector {selector}")
        if selector.count(":") != len(each.arguments):
            wrong.append(f"{each.where}: {selector} with {len(each.arguments)} arguments")
        for place in known.outs.get(selector, ()):
            argument = each.arguments[place] if place < len(each.arguments) else None
            if not (isinstance(argument, ast.Constant) and argument.value is None):
                wrong.append(f"{each.where}: argument {place} of {selector} must be None")
    return wrong


def test_every_message_is_one_that_the_frameworks_know(witnesses):
    all_sent = [each for path in SENDERS for each in sent(path)]
    assert len(all_sent) > 30
    assert complaints(iter(all_sent), witnesses) == []


def test_every_class_and_constant_is_one_that_the_frameworks_have(witnesses):
    for path in SENDERS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if CLASS.fullmatch(name) or name.startswith("kCV"):
                assert name in witnesses.names, f"{path.name}:{node.lineno}: {name}"


PLANTED = {
    "a wrong name": "model.predictionsFromFeatures_options_error_(a, b, None)",
    "a missing argument": "model.predictionFromFeatures_options_error_(a, None)",
    "one too many": "x.initWithShape_dataType_error_(a, b, None, None)",
    "no out-argument": "x.initWithShape_dataType_error_(a, b, error)",
    "a wrong property": "value.multiArrayValues()",
    "a property with an argument": "value.multiArrayValue(1)",
    "a function's arity": "video.CVPixelBufferLockBaseAddress(pixels)",
    "a function's name": "video.CVPixelBufferLock(pixels, 0)",
}


@pytest.mark.parametrize("line", PLANTED.values(), ids=PLANTED)
def test_a_planted_mistake_is_caught(witnesses, line):
    assert complaints(sent(Path("planted.py"), line), witnesses)


def test_the_stand_ins_have_no_methods_of_their_own(mac, witnesses):
    """Else the product could be proved against messages that no framework takes."""
    plain = {"alloc", "init", "array", "dictionary", "path", "shape", "strides", "domain", "code"}
    plain |= {"bound", "made"}
    known = {name.replace(":", "_") for name in witnesses.selectors | HEADERS.keys()}
    helpers = {"view", "checksum", "allKeys"}
    for module in ("CoreML", "Foundation"):
        for name, kind in inspect.getmembers(mac.module(module), inspect.isclass):
            if not CLASS.fullmatch(name):
                continue
            own = {
                method
                for method, value in vars(kind).items()
                if not method.startswith("_") and callable(getattr(kind, method, value))
            }
            assert own - known - plain - helpers == set(), name


def test_the_energy_monitors_names_are_its_own(wheels):
    (library,) = wheels.glob("zeus_apple_silicon/*.so")
    text = library.read_bytes()
    source = (ROOT / "ondevice" / "energy.py").read_text(encoding="utf-8")
    names = set(re.findall(r"\b\w+_mj(?= *[,}\n])", source.partition("class AppleCounters")[2]))
    names = {name for name in names if f".{name}" in source}
    assert names == {"cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj"}
    for name in (*names, "begin_window", "end_window", "AppleEnergyMonitor"):
        assert name.encode() in text
