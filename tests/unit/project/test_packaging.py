"""The version, the metadata and the source distribution."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.project.pages import ROOT
from trove_classifiers import classifiers

import raykv
from raykv.cli.main import main

UPLOT = {  # SHA-256 of the files of https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_the_version_is_the_packages() -> None:
    assert raykv.__version__ == version("raykv")
    assert CliRunner().invoke(main, ["--version"]).output == f"raykv {raykv.__version__}\n"


@pytest.mark.parametrize(("file", "sha256"), UPLOT.items())
def test_uplot_is_what_npm_has(file: str, sha256: str) -> None:
    assert hashlib.sha256((ROOT / "raykv/ui/static" / file).read_bytes()).hexdigest() == sha256


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"  # a copy, as a build leaves files behind
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True, timeout=120)
    (archive,) = folder.glob("raykv-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def sdist(archive: Path) -> list[str]:
    """Paths in the source distribution, without its top folder."""
    with tarfile.open(archive) as files:
        return [str(Path(name).relative_to(Path(name).parts[0])) for name in files.getnames()]


@pytest.mark.parametrize("folder", ["raykv", "actors", "tests", "examples", "docs", "benchmarks"])
def test_the_sdist_holds_every_file_of(folder: str, sdist: list[str]) -> None:
    there = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert not [str(path.relative_to(ROOT)) for path in there if str(path.relative_to(ROOT)) not in sdist]


def test_the_sdist_holds_what_a_checkout_is_worked_with(sdist: list[str]) -> None:
    files = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "cluster.yaml", "mkdocs.yml"}
    assert files | {"pyproject.toml", "actors/__init__.py"} <= set(sdist)
    assert not [name for name in sdist if name.endswith(".pyc")]


def test_the_metadata_is_complete(archive: Path) -> None:
    with tarfile.open(archive) as files:
        (name,) = (name for name in files.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        found = message_from_string(files.extractfile(name).read().decode())  # type: ignore[union-attr]
    assert found["License-Expression"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()
    assert found["Description-Content-Type"] == "text/markdown" and found["Author"] and found["Keywords"]
    assert found["Requires-Python"] == "<3.14,>=3.11"
    named = found.get_all("Classifier", [])
    assert "Operating System :: POSIX :: Linux" in named and classifiers.issuperset(named)
