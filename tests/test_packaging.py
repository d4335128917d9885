"""The wheel: every package and data file in it, every import declared."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "ondevice": "ondevice",
    "models": "ondevice.models",
    "converters": "ondevice.converters",
    "apps": "ondevice.apps",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _packages() -> dict[str, Path]:
    """Dotted name of every folder that is a package, with the folder."""
    found = {}
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found[".".join([package, *parts])] = init.parent
    return found


def _data_files() -> dict[str, Path]:
    """Path in the wheel of every file of a package that is not Python source."""
    return {
        f"{package.replace('.', '/')}/{file.name}": file
        for package, folder in _packages().items()
        for file in folder.iterdir()
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }


def test_every_package_is_listed_and_mapped(project: dict[str, Any]) -> None:
    tool = project["tool"]["setuptools"]
    assert sorted(tool["packages"]) == sorted(_packages())
    assert tool["package-dir"] == {package: folder for folder, package in FOLDERS.items()}


def test_every_data_file_is_package_data(project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]
    assert {"ondevice/py.typed", "ondevice/models/pairs.toml"} <= _data_files().keys()
    for inside, file in _data_files().items():
        package = inside.rpartition("/")[0].replace("/", ".")
        assert any(file.match(pattern) for pattern in patterns.get(package, [])), inside


def _imported() -> set[str]:
    """Top-level modules, outside the standard library, that the product imports anywhere."""
    names = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"ondevice"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(project: dict[str, Any]) -> set[str]:
    requirements = project["project"]["dependencies"]
    return {_normal(re.match(r"[\w.-]+", line)[0]) for line in requirements}  # type: ignore[index]


ON_A_MAC = {
    "CoreML": "pyobjc-framework-coreml",
    "Quartz": "pyobjc-framework-quartz",
    "zeus_apple_silicon": "zeus-apple-silicon",
}
"""Distributions that are installed nowhere else, by module."""
# They come with those.
OPTIONAL = {"Foundation", "objc"}


def test_every_import_is_a_declared_dependency(project: dict[str, Any]) -> None:
    distributions = packages_distributions()
    for module in _imported() - OPTIONAL:
        found = distributions.get(module, [ON_A_MAC.get(module, module)])
        owners = {_normal(owner) for owner in found}
        assert owners & _declared(project), f"{module} comes from {sorted(owners)}, not declared"


def test_every_declared_dependency_is_used(project: dict[str, Any]) -> None:
    distributions = packages_distributions()
    imported = _imported()
    used = {_normal(owner) for module in imported for owner in distributions.get(module, [])}
    used |= {owner for module, owner in ON_A_MAC.items() if module in imported}
    # pip is run as a program; mlx's own package is spread over several distributions.
    assert _declared(project) - used <= {"pip", "mlx"}


def test_dependencies_carry_ranges(project: dict[str, Any]) -> None:
    for line in project["project"]["dependencies"]:
        assert ">=" in line, line
        assert "<" in line or line.startswith("pip"), line


def test_python_versions_agree_everywhere(project: dict[str, Any]) -> None:
    about = project["project"]
    assert about["requires-python"] == ">=3.11,<3.14"
    assert project["tool"]["mypy"]["python_version"] == "3.11"
    assert project["tool"]["ruff"]["target-version"] == "py311"
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in about["classifiers"]
        assert f'"3.{minor}"' in workflow


def test_licence_is_apache_2(project: dict[str, Any]) -> None:
    assert project["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


@pytest.mark.slow
def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    """Builds it as `pip wheel` does, in isolation: needs an index that has setuptools."""
    # A copy: setuptools leaves a build folder behind, and would take old files from it next time.
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ondevice-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    modules = {
        f"{package.replace('.', '/')}/{file.name}"
        for package, folder in _packages().items()
        for file in folder.glob("*.py")
    }
    assert modules | _data_files().keys() <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    tops = {name.partition("/")[0] for name in inside}
    assert tops == {"ondevice", next(top for top in tops if top.endswith(".dist-info"))}
