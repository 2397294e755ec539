"""Replaces vLLM's connector, spec and manager by ours, for vLLM's own tests of them: see CONTRIBUTING.md.

`make contract` loads it (`-p contract.plugin`). not_applicable.txt lists tests that are left out or must fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from contract.not_applicable import entries

HERE = Path(__file__).parent
MODELS = HERE / "models"  # configurations of models that vLLM's tests name, and would fetch
OURS = pytest.StashKey[int]()
GROUPS = 8  # more KV cache groups than any test of vLLM has


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(MODELS)
    sys.path.insert(0, str(config.rootpath))
    replaced = replace()
    next(replaced)
    config.add_cleanup(lambda: next(replaced, None))


def replace() -> Iterator[None]:
    """Replace vLLM's classes, before vLLM's tests import anything."""
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401  has vLLM's own manager
    from contract import manager, pool
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.kv_offload.cpu import manager as cpu

    from raykv.integrations.vllm import configuration, connector, spec
    from raykv.integrations.vllm.worker.ranks import Rank

    patch = pytest.MonkeyPatch()
    with pool.open_pool() as opened, closing(pool.Content()) as manager.Manager.content:
        patch.setattr(spec, "attach", lambda name: opened)
        patch.setattr(spec, "RayKVManager", manager.Manager)
        patch.setattr(offloading_connector, "OffloadingConnector", connector.RayKVConnector)

        began, looked_up = RequestOffloadState.__post_init__, OffloadingConnectorScheduler._lookup

        def begin(self: Any) -> None:
            began(self)
            self.req_context.set_state(self)

        def look_up(self: Any, status: Any, *arguments: Any) -> Any:
            manager.limit(self, status)
            return looked_up(self, status, *arguments)

        patch.setattr(RequestOffloadState, "__post_init__", begin)
        patch.setattr(OffloadingConnectorScheduler, "_lookup", look_up)

        from contract.spec import Spec, arguments
        from tests.v1.kv_connector.unit.offloading_connector import utils

        patch.setattr(utils, "MockOffloadingSpec", Spec)
        patch.setattr(configuration, "RayKVOffloadingSpec", Spec)
        ranks = [Rank(pool.NODE, (0,), (pool.BLOCK_BYTES,) * GROUPS)]
        patch.setattr(connector, "told", lambda *_: ranks)  # ranks would tell through Ray, which does not run
        patch.setattr(configuration, "CHUNK_BYTES", 1)  # by default a chunk is a block
        patch.setattr(cpu, "CPUOffloadingManager", lambda **_: manager.Storing(opened, arguments(), True))
        yield
        patch.undo()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that test nothing of ours."""
    theirs = config.rootpath / "tests"
    name = str(collection_path.relative_to(theirs)) if collection_path.is_relative_to(theirs) else ""
    return any(entry.is_file and entry.matches(name) for entry in entries()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Listed tests must fail: a test that passes must leave the list."""
    files = {item.path.name for item in items}
    unused = {entry for entry in entries() if entry.pattern.partition("::")[0] in files}
    for item in items:
        name = item.nodeid.rpartition("/")[2]
        for entry in entries():
            if not entry.is_file and entry.matches(name):
                item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))
                unused.discard(entry)
    if unused:
        raise pytest.UsageError(f"not_applicable.txt has lines of which there are no tests: {sorted(unused)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count the passed tests in which our manager was made."""
    from contract.manager import Manager

    before = Manager.made
    yield
    item.config.stash[OURS] = item.config.stash.get(OURS, 0) + (Manager.made > before)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"of those that passed {config.stash.get(OURS, 0)} had our manager")


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    """Like the fixture in vLLM's conftest.py, which is left out, because it needs packages that are not here."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield
