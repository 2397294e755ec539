"""As patient_router, for vLLM."""

from typing import Any

from helpers.patient_router import PatientRouter
from raykv.integrations.vllm.router import VLLMPrefixRouter, routed_config


class PatientVLLMRouter(VLLMPrefixRouter, PatientRouter):
    pass


def patient_config(pool: str) -> dict[str, Any]:
    return routed_config(pool) | {"kv_connector_module_path": "helpers.patient_connector"}
