"""vLLM's and Serve's own factories make the classes that our configurations name, in each vLLM of `compat`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers.project.pages import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'raykv[vllm]'")

from ray.serve.config import RequestRouterConfig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from raykv.bench.engines import timed_connector
from raykv.integrations.serve import PrefixRouter
from raykv.integrations.vllm import kv_transfer_config
from raykv.integrations.vllm.announce import RoutedConnector
from raykv.integrations.vllm.configuration import configure
from raykv.integrations.vllm.connector import RayKVConnector
from raykv.integrations.vllm.router import VLLMPrefixRouter, routed_config
from raykv.integrations.vllm.spec import RayKVOffloadingSpec


def application(file: str) -> Any:
    content = yaml.safe_load((ROOT / "deploy" / file).read_text())
    if "spec" in content:
        content = yaml.safe_load(content["spec"]["serveConfigV2"])
    (application,) = content["applications"]
    (llm,) = application["args"]["llm_configs"]
    return llm


FILES = {file: application(file) for file in ("serve.yaml", "kubernetes/rayservice.yaml")}
NAMED: dict[str, tuple[dict[str, Any], type]] = {
    **{
        role: (kv_transfer_config("default", role), RayKVConnector)
        for role in ("kv_both", "kv_producer", "kv_consumer")
    },
    "routed": (routed_config("default"), RoutedConnector),
    "bench": (timed_connector.kv_transfer_config("default", "/tmp"), timed_connector.TimedConnector),
    **{file: (llm["engine_kwargs"]["kv_transfer_config"], RoutedConnector) for file, llm in FILES.items()},
}
ROUTERS: dict[str, tuple[dict[str, Any], type]] = {
    "engines of your own": (
        {"request_router_class": PrefixRouter, "request_router_kwargs": {"pool": "p", "model": "m"}},
        PrefixRouter,
    ),
    **{file: (llm["deployment_config"]["request_router_config"], VLLMPrefixRouter) for file, llm in FILES.items()},
}


@pytest.mark.parametrize(("written", "connector"), NAMED.values(), ids=NAMED)
def test_vllm_takes_the_connector_that_a_configuration_names(written: dict[str, Any], connector: type) -> None:
    config = KVTransferConfig(**written)
    assert KVConnectorFactory.get_connector_class(config) is connector
    assert supports_hma(connector), "else vLLM's factory refuses it beside its hybrid KV cache manager"
    assert list(inspect.signature(connector).parameters) == ["vllm_config", "role", "kv_cache_config"]
    assert not inspect.isabstract(connector)


@pytest.mark.parametrize("written", [kv_transfer_config("default"), routed_config("default")])
@pytest.mark.parametrize("name", ["OffloadingConnector", "LMCacheMPConnector"])
def test_offloading_of_vllms_own_beside_the_pool_is_refused(written: dict[str, Any], name: str) -> None:
    """`kv_offloading_size` replaces the connector's name, but keeps its module."""
    config = KVTransferConfig(**written | {"kv_connector": name})
    with pytest.raises(ValueError, match="leave kv_offloading_size out"):
        KVConnectorFactory.get_connector_class(config)


def test_an_engine_that_prefills_may_be_behind_a_router() -> None:
    config = KVTransferConfig(**routed_config("default", "kv_producer"))
    assert config.is_kv_producer and not config.is_kv_consumer


def test_a_name_that_is_nobodys_is_missing() -> None:
    config = KVTransferConfig(**kv_transfer_config("default") | {"kv_connector": "Unheard"})
    with pytest.raises(AttributeError, match="Unheard"):
        KVConnectorFactory.get_connector_class(config)


def test_vllm_takes_the_spec_that_the_connector_names() -> None:
    config = KVTransferConfig(**kv_transfer_config("default"))
    configure(SimpleNamespace(kv_transfer_config=config))
    spec = OffloadingSpecFactory.get_spec_cls(config.kv_connector_extra_config)
    assert spec is RayKVOffloadingSpec and not inspect.isabstract(spec)


@pytest.mark.parametrize("patience", ["3", -1, None])
def test_a_connector_refuses_a_patience_that_is_none(patience: Any) -> None:
    config = kv_transfer_config("default")
    config["kv_connector_extra_config"]["patience"] = patience
    with pytest.raises(ValueError, match=rf"patience={patience!r}: give how many times as long"):
        configure(SimpleNamespace(kv_transfer_config=KVTransferConfig(**config)))


@pytest.mark.parametrize("answers", ["none", True, None])
def test_a_connector_refuses_answers_that_it_does_not_know(answers: Any) -> None:
    config = kv_transfer_config("default")
    config["kv_connector_extra_config"]["answers"] = answers
    with pytest.raises(ValueError, match=rf'answers={answers!r} in kv_connector_extra_config: give "all" or "auto"'):
        configure(SimpleNamespace(kv_transfer_config=KVTransferConfig(**config)))


def test_a_connector_refuses_a_threshold_that_is_none_or_keeps_a_consumer_waiting() -> None:
    for role, threshold in (("kv_both", "two"), ("kv_producer", 2)):
        config = kv_transfer_config("default", role)
        config["kv_connector_extra_config"]["store_threshold"] = threshold
        with pytest.raises(ValueError, match="store_threshold"):
            configure(SimpleNamespace(kv_transfer_config=KVTransferConfig(**config)))
    config["kv_connector_extra_config"]["store_threshold"] = 1
    configure(SimpleNamespace(kv_transfer_config=KVTransferConfig(**config)))


@pytest.mark.parametrize("name", ["offload_prompt_only", "verify_tokens"])
def test_an_option_that_is_on_or_off_is_kept_and_another_value_refused(name: str) -> None:
    for given, found in ((None, False), (True, True), (False, False)):
        config = kv_transfer_config("default")
        config["kv_connector_extra_config"] |= {} if given is None else {name: given}
        made = KVTransferConfig(**config)
        configure(SimpleNamespace(kv_transfer_config=made))
        assert made.kv_connector_extra_config[name] is found
    config["kv_connector_extra_config"][name] = "true"
    with pytest.raises(ValueError, match=rf"{name}='true' in kv_connector_extra_config: set it to true or false"):
        configure(SimpleNamespace(kv_transfer_config=KVTransferConfig(**config)))


@pytest.mark.parametrize(("written", "router"), ROUTERS.values(), ids=ROUTERS)
def test_serve_takes_the_router_that_a_configuration_names(written: dict[str, Any], router: Any) -> None:
    config = RequestRouterConfig(**written)
    found = config.get_request_router_class()
    assert found is router and not inspect.isabstract(found)
    inspect.signature(found.initialize_state).bind(None, **config.request_router_kwargs)
