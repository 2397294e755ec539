"""Puts our connector, spec and manager in the place of vLLM's, for vLLM's own tests of them: see CONTRIBUTING.md.

Loaded by `make contract` (`-p contract.plugin`). What is not to be run, or is to fail, is in not_applicable.txt.
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
MODELS = HERE / "models"  # configurations by the names in vLLM's tests, which would fetch them
OURS = pytest.StashKey[int]()
GROUPS = 8  # at most, in a test of vLLM's


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(MODELS)
    sys.path.insert(0, str(config.rootpath))
    replaced = replace()
    next(replaced)
    config.add_cleanup(lambda: next(replaced, None))


def replace() -> Iterator[None]:
    """Before vLLM's tests import anything."""
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401  has vLLM's own manager
    from contract import manager, pool
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.kv_offload.cpu import manager as cpu

    from raykv.integrations.vllm import connector, spec
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
        patch.setattr(connector, "RayKVOffloadingSpec", Spec)
        ranks = [Rank(pool.NODE, (0,), (pool.BLOCK_BYTES,) * GROUPS)]
        patch.setattr(connector, "told", lambda *_: ranks)  # there is no Ray
        patch.setattr(connector, "CHUNK_BYTES", 1)  # a chunk is a block, where a test says nothing else
        patch.setattr(cpu, "CPUOffloadingManager", lambda **_: manager.Storing(opened, arguments(), True))
        yield
        patch.undo()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What has nothing of ours in it."""
    theirs = config.rootpath / "tests"
    name = str(collection_path.relative_to(theirs)) if collection_path.is_relative_to(theirs) else ""
    return any(entry.is_file and entry.matches(name) for entry in entries()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not apply must fail: who mends it takes its line out of the list."""
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
    """Count the tests that pass, and in which ours was made."""
    from contract.manager import Manager

    before = Manager.made
    yield
    item.config.stash[OURS] = item.config.stash.get(OURS, 0) + (Manager.made > before)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"of those that passed {config.stash.get(OURS, 0)} had our manager")


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    """As in vLLM's own conftest.py, which is left out: it wants packages that nothing here does."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield
