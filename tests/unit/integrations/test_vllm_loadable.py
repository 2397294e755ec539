"""A hit of windows and states ends where vLLM's scheduler ends the load, which may be before the pool's last chunk."""

from collections.abc import Iterator
from contextlib import closing

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from contract.manager import Manager
from contract.pool import BLOCK_BYTES, NODE, READY, Content, open_pool
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from raykv.integrations.vllm.chunks.chain import Chain
from raykv.integrations.vllm.chunks.chunks import Origin
from raykv.integrations.vllm.identity.groups import Group, loadable
from raykv.integrations.vllm.worker.ranks import Rank

FULL, STATE = Group(0, 0, 16, 0), Group(1, 1, 16, 1)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """The manager of a pool that has all chunks."""
    with open_pool() as pool, closing(Content()) as content:
        monkeypatch.setattr(Manager, "content", content, raising=False)
        made = Manager(pool, {"model": "m", "dtype": "uint8", "layout": "rows"})
        made.set_ranks([Rank(NODE, (0,), (BLOCK_BYTES, BLOCK_BYTES))], [FULL, STATE])
        made.says = lambda key: READY
        yield made


@pytest.mark.parametrize(("most", "state"), [(64, 3), (48, 2), (33, 2), (32, 1), (16, 0), (0, None)])
def test_the_state_that_is_found_is_the_one_where_the_load_ends(manager: Manager, most: int, state: int | None) -> None:
    keys = {group: [make_offload_key(bytes([number]) * 32, group) for number in range(4)] for group in (0, 1)}
    context = ReqContext("r")
    context.set_state(Chain(keys, Origin("r"), most=most))
    found = {
        group: [number for number, key in enumerate(of_group) if manager.lookup(key, context) is LookupResult.HIT]
        for group, of_group in keys.items()
    }
    assert found == {0: list(range(state + 1)) if state is not None else [], 1: [] if state is None else [state]}


@pytest.mark.parametrize(
    ("groups", "aligned", "allowed", "most"),
    [
        ([FULL], 0, None, 64),
        ([FULL], 0, 40, 32),
        ([FULL, STATE], 0, None, 63),
        ([FULL, STATE], 16, None, 48),  # a prompt of whole chunks, whose last token must be computed
        ([FULL, STATE], 16, 48, 32),
        ([FULL, STATE], 0, 49, 48),
        ([FULL, STATE], 0, 100, 48),
    ],
)
def test_a_load_ends_where_vllms_scheduler_ends_it(
    groups: list[Group], aligned: int, allowed: int | None, most: int
) -> None:
    assert loadable(64, groups, aligned, allowed) == most
