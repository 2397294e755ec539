"""By SGLang's sources, our storage is what SGLang makes and calls. Without SGLang it says what is missing.

`make contract` brings the sources. tests/engines/test_sglang.py tests what the methods do.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'raykv[transformers]'")

from helpers.engines.hicache import STORAGE, documented, imported, sources
from helpers.project.pages import ROOT
from helpers.project.signatures import Function, Package, is_abstract, signature

OURS = Package(ROOT).methods("raykv.integrations.sglang.storage", "RayKVStorage")
# names of SGLang that we use
READ = {
    f"{STORAGE}.HiCacheStorageConfig": (
        "model_name extra_config is_mla_model tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size "
        "dcp_rank dcp_size"
    ),
    f"{STORAGE}.HiCacheStorageExtraInfo": "prefix_keys",
    f"{STORAGE}.PoolTransfer": "name keys host_indices hit_policy",
    f"{STORAGE}.PoolHitPolicy": "ALL_PAGES TRAILING_PAGES",
    f"{STORAGE}.PoolTransferResult": "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages empty",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache": (
        "page_size size layout dtype storage_format_tag kv_buffer get_dummy_flat_data_page"
    ),
    "sglang.srt.mem_cache.memory_pool_host.LogicalHostPool": "page_size size layout dtype kv_buffer",
    **{
        f"sglang.srt.mem_cache.pool_host.{module}.{name}": "get_page_buffer_meta"
        for module, name in (
            ("mha", "MHATokenToKVPoolHost"),
            ("mla", "MLATokenToKVPoolHost"),
            ("mamba", "MambaPoolHost"),
            ("dsa", "DSAIndexerPoolHost"),
        )
    },
}


@pytest.fixture(scope="module")
def sglang() -> Package:
    return Package(sources())


def test_our_methods_take_what_sglang_gives_them(sglang: Package) -> None:
    theirs = sglang.methods(STORAGE, "HiCacheStorage")
    assert {"batch_get_v1", "batch_set_v1", "batch_exists_v2", "register_mem_host_pool_v2"} <= theirs.keys()
    assert not [name for name, one in theirs.items() if is_abstract(one) and name not in OURS]
    assert not [
        f"{name} {what}"
        for name in theirs.keys() & OURS.keys()
        for what in signature(OURS[name]).lacks(signature(theirs[name]))
    ]


def test_it_is_made_as_sglang_makes_a_dynamic_backend(sglang: Package) -> None:
    factory = sglang.methods("sglang.srt.mem_cache.storage.backend_factory", "StorageBackendFactory")
    calls = [one for one in ast.walk(factory["_create_dynamic_backend"]) if isinstance(one, ast.Call)]
    (made,) = [one for one in calls if ast.unparse(one.func) == "backend_class"]
    assert isinstance(OURS["__init__"], Function)
    assert not signature(OURS["__init__"]).refuses(made)


def test_sglangs_factory_loads_what_the_docs_name() -> None:
    named = documented()
    with imported("sources") as sglang:
        found = sglang.factory._load_backend_class(named["module_path"], named["class_name"], named["backend_name"])
        assert found is sglang.Storage and not inspect.isabstract(found)


@pytest.mark.parametrize("theirs", READ, ids=[name.rpartition(".")[2] for name in READ])
def test_what_we_read_is_there(sglang: Package, theirs: str) -> None:
    module, _, name = theirs.rpartition(".")
    assert not [attribute for attribute in READ[theirs].split() if not sglang.has(module, name, attribute)]


def test_without_sglang_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in [name for name in sys.modules if name.startswith(("sglang.", "raykv.integrations.sglang"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="pip install sglang"):
        importlib.import_module("raykv.integrations.sglang")
