"""Parts of vLLM applications that give the pool time: what they answer is tested, on a machine that may be busy."""

from typing import Any

from patient_router import PatientRouter
from pools import patient

from raykv.integrations.vllm_announce import RoutedConnector
from raykv.integrations.vllm_router import VLLMPrefixRouter, routed_config


class PatientConnector(RoutedConnector):
    def __init__(self, *args: Any) -> None:
        patient()
        super().__init__(*args)


class PatientVLLMRouter(VLLMPrefixRouter, PatientRouter):
    pass


def patient_config(pool: str) -> dict[str, Any]:
    return routed_config(pool) | {"kv_connector": "PatientConnector", "kv_connector_module_path": __name__}
