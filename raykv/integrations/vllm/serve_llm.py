"""Registers our connectors with ray.serve.llm. Otherwise its engines warn of an unsupported connector."""

import contextlib
import sys

CATEGORY = "kv_connector_backend"
# a replica needs no ports and no peers, as our engines exchange KV only through the pool
BACKEND = "ray.llm._internal.serve.engines.vllm.kv_transfer.base:DefaultConnectorBackend"


def register(connector: str) -> None:
    """Register a connector with ray.serve.llm, for all processes of this cluster, or of the cluster joined next.

    connector: its name in `kv_transfer_config`. Does nothing in a process that has not imported ray.serve.llm.
    """
    if "ray.llm._internal.serve" not in sys.modules:  # not imported here, as the import changes the process's logging
        return
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.llm._internal.serve.utils.registry import ComponentRegistry

    if ComponentRegistry(CATEGORY).contains(connector):  # a new object, as an old one remembers an earlier cluster
        return
    with contextlib.suppress(ValueError):  # another process was faster
        KVConnectorBackendFactory.unregister_backend(connector)
        KVConnectorBackendFactory.register_backend(connector, BACKEND)
