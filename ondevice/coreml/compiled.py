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
from ondevice.coreml.apple import Apple
from ondevice.coreml.package import model_file, weights_digest
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


def compiled_model(path: Path) -> Path:
    """The compiled form of the package at `path`: kept, or compiled now.

    Those of earlier builds of macOS are deleted then. Raises RuntimeUnavailable without PyObjC,
    UnitFailed when the compiler refuses, CacheUnwritable.
    """
    folder = compiled_folder() / package_digest(path)[:32]
    target = folder / f"{machine_digest()}.mlmodelc"
    if target.is_dir():
        return target
    apple = Apple()
    with apple.pool(), apple.explained("Core ML does not compile the package"):
        url = apple.must(
            apple.core_ml.MLModel.compileModelAtURL_error_(apple.url(path), None),
            "Core ML does not compile the package",
        )
        temporary = Path(str(url.path()))
    with replacing(target) as fresh:
        shutil.move(temporary, fresh)
    for old in folder.glob("[!.]*.mlmodelc"):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return target
