"""What lands in site-packages: one name, every module, the schema, one version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bitnest_format

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    "bitnest_format": "bitnest_format",
    "bitnest_format.spec": "spec",
    "bitnest_format.converters": "converters",
    "bitnest_format.runtime": "runtime",
    "bitnest_format.kernels": "kernels",
}
# Tools that belong to a folder without being part of the package.
NOT_PACKAGED = {ROOT / "spec" / "vectors"}
TOP_LEVEL_FOLDERS = {*FOLDERS.values(), "tests", "benchmarks", "examples"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the tree, built without the network in a copy, so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", command, str(work)],
        cwd=tree,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(work / done.stdout.split()[-1])


def test_packages_are_the_folders_of_the_tree():
    settings = PROJECT["tool"]["setuptools"]
    assert settings["packages"] == list(FOLDERS)
    assert settings["package-dir"] == {name: f for name, f in FOLDERS.items() if name != "bitnest_format"}


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_a_package_folder_is_flat_and_has_an_init(folder):
    assert (ROOT / folder / "__init__.py").is_file()
    nested = [path for path in (ROOT / folder).glob("*/**/*.py") if not NOT_PACKAGED & set(path.parents)]
    assert not nested, f"sub-folders are missing from the wheel: {nested}"


def test_no_other_folder_holds_code():
    tracked = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/*.py")}
    assert tracked - {"build", "dist", "demo"} <= TOP_LEVEL_FOLDERS


def test_nothing_at_the_root_or_in_tests_shadows_an_import():
    assert not list(ROOT.glob("*.py"))
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_wheel_has_one_top_level_name(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"bitnest_format", f"bitnest_format-{bitnest_format.__version__}.dist-info"}


def test_wheel_holds_every_module_and_data_file(wheel):
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).glob("*.py")
    }
    expected |= {
        "bitnest_format/py.typed",
        "bitnest_format/spec/manifest.schema.json",
        "bitnest_format/converters/calibration.txt",
        f"bitnest_format-{bitnest_format.__version__}.dist-info/licenses/LICENSE",
    }
    assert expected - set(wheel.namelist()) == set()


def test_wheel_holds_no_tests_and_no_leftovers(wheel):
    strange = [n for n in wheel.namelist() if re.search(r"(^|/)(tests?|benchmarks)/|__pycache__|\.pyc$", n)]
    assert not strange


def test_wheel_metadata(wheel):
    name = f"bitnest_format-{bitnest_format.__version__}.dist-info/METADATA"
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Version"] == bitnest_format.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    holders = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS.values()
        for path in (ROOT / folder).glob("*.py")
        if re.search(r"^__version__ *=", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert holders == ["bitnest_format/__init__.py"]


def test_every_dependency_is_pinned_to_a_version_its_range_allows():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line!r} is not NAME==VERSION"
            pins[canonicalize_name(name)] = version
    project = PROJECT["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *optional["test"], *optional["dev"]]:
        requirement = Requirement(text)
        assert requirement.name in pins, f"constraints.txt: no pin for {requirement.name}"
        assert requirement.specifier.contains(pins[requirement.name]), text
