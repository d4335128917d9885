"""Packages compiled once: `.mlmodelc` folders, by package, build of macOS and chip.

HOME/compiled/<hash of the package>/<hash of machine and system>.mlmodelc

The Neural Engine's own cache is macOS's and goes by the path of the compiled model, so that path
must stay the same from run to run: a model compiled anew to a temporary folder would be specialised
anew, seconds to minutes each time.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from ondevice.artifact import file_sha256, replacing
from ondevice.coreml.apple import Apple, one_line
from ondevice.coreml.package import model_file, weights_digest
from ondevice.errors import RuntimeUnavailable, UnitFailed
from ondevice.home import home_folder
from ondevice.machine import this_machine


def compiled_folder() -> Path:
    """Where compiled models are kept; may not exist yet."""
    return home_folder() / "compiled"


def package_digest(path: Path) -> str:
    """sha256 over the package's model and weights as they are on disk."""
    parts = file_sha256(model_file(path)) + weights_digest(path)
    return hashlib.sha256(parts.encode()).hexdigest()


def machine_digest() -> str:
    """A name for this machine's chip and build of its system."""
    machine = this_machine()
    return hashlib.sha256(f"{machine.cpu}\n{machine.system}".encode()).hexdigest()[:16]


def compiled_model(path: Path, through: str = "pyobjc") -> Path:
    """The compiled form of the package at `path`: kept, or compiled now.

    through: "pyobjc" or "coremltools", the way to Core ML's compiler. Those of earlier builds of
    macOS are deleted then. Raises RuntimeUnavailable where that way is not there, UnitFailed when
    the compiler refuses, CacheUnwritable.
    """
    folder = compiled_folder() / package_digest(path)[:32]
    target = folder / f"{machine_digest()}.mlmodelc"
    if target.is_dir():
        return target
    temporary = (_through_coremltools if through == "coremltools" else _through_pyobjc)(path)
    with replacing(target) as fresh:
        shutil.move(temporary, fresh)
    for old in folder.glob("[!.]*.mlmodelc"):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return target


_REFUSED = "Core ML does not compile the package"


def _through_pyobjc(path: Path) -> Path:
    apple = Apple()
    with apple.pool(), apple.explained(_REFUSED):
        answer = apple.core_ml.MLModel.compileModelAtURL_error_(apple.url(path), None)
        return Path(str(apple.must(answer, _REFUSED).path()))


def _through_coremltools(path: Path) -> Path:
    import coremltools as ct

    try:
        return Path(ct.models.utils.compile_model(str(path)))
    except Exception as error:
        kind = UnitFailed if predicts() else RuntimeUnavailable
        raise kind(f"{_REFUSED}: {one_line(error)}") from error


def predicts() -> bool:
    """Whether coremltools was built with Core ML in it: on a Mac it is."""
    import coremltools as ct

    return getattr(ct.models.model, "_MLModelProxy", None) is not None
