"""The wheel of `make dist` runs in an environment of its own, without the sources."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers.faces.shell import typed
from helpers.project.pages import ROOT

import raykv

pytestmark = pytest.mark.timeout(900)
POOL = """
import json
import numpy as np
import ray
import raykv

ray.init("local", num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False)
pool = raykv.start(raykv.PoolConfig(name="of-a-wheel", cpu_memory=64 << 20, deadline=10))
cache = pool.cache(model="m", dtype="uint8", layout="bytes", block_tokens=16, block_bytes=1 << 20)
keys = cache.keys(list(range(64)))
blocks = np.random.default_rng(0).integers(0, 256, (len(keys), cache.block_bytes), np.uint8)
stored = cache.store(keys, blocks)
with cache.match(keys) as match:
    out = np.empty_like(blocks)
    read = match.read(out)
pool.stop()
print(json.dumps({"file": raykv.__file__, "stored": stored, "read": read, "equal": bool((out == blocks).all())}))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    typed(f"make dist DIST={folder}", ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("raykv-*.whl")
    return wheel


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment, `env`, that has the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("elsewhere")
    typed(f"python -m venv env; env/bin/pip install --no-compile {wheel}", folder)
    return folder


def test_there_is_one_of_each(dist: Path) -> None:
    assert {path.name for path in dist.iterdir()} == {
        f"raykv-{raykv.__version__}.tar.gz",
        f"raykv-{raykv.__version__}-py3-none-any.whl",
    }


@pytest.mark.parametrize(("folder", "package"), [("raykv", "raykv"), ("actors", "raykv/actors")])
def test_the_wheel_holds_every_file_of(folder: str, package: str, wheel: Path) -> None:
    there = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    held = ZipFile(wheel).namelist()
    assert not [path for path in there if f"{package}/{path.relative_to(ROOT / folder)}" not in held]


def test_it_says_its_version(elsewhere: Path) -> None:
    assert typed("env/bin/raykv --version", elsewhere) == f"raykv {raykv.__version__}\n"


def test_a_pool_on_one_node_stores_and_reads(elsewhere: Path) -> None:
    (elsewhere / "pool.py").write_text(POOL)
    said = json.loads(typed("env/bin/python pool.py", elsewhere).splitlines()[-1])
    assert said.pop("file").startswith(str(elsewhere / "env"))
    assert said == {"stored": 4, "read": 4, "equal": True}


def test_the_demo_hits_the_pool(wheel: Path, elsewhere: Path) -> None:
    """Cold on engine 0, then from its node on engine 1, then again on engine 0."""
    typed(f"env/bin/pip install --no-compile torch==2.13.0 '{wheel}[transformers]'", elsewhere)
    figures = json.loads(typed("env/bin/raykv demo --requests 3 --json", elsewhere).splitlines()[-1])
    assert figures["tokens_equal"] is True
    assert [row["kind"] for row in figures["requests"]] == ["cold", "pool-remote", "pool-local"]
    assert [row["pool_tokens"] for row in figures["requests"]] == [0, 2000, 2000]
    assert {"cold_ms", "pool_local_ms", "pool_remote_ms"} <= figures.keys()
