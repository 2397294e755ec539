"""As patient_router, for vLLM."""

from patient_router import PatientRouter

from raykv.integrations.vllm_router import VLLMPrefixRouter


class PatientVLLMRouter(VLLMPrefixRouter, PatientRouter):
    pass
