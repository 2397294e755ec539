"""Parts of Serve applications that give the pool time: what they answer is tested, on a machine that may be busy."""

from typing import Any

from examples import serve_transformers
from helpers.pools import patient
from raykv.integrations.serve import PrefixRouter


class PatientRouter(PrefixRouter):
    def initialize_state(self, model: str, pool: str = "default") -> None:
        import raykv.client.prefix_lookup

        raykv.client.prefix_lookup.DEADLINE_S = 5.0
        super().initialize_state(model, pool)


Engine: Any = serve_transformers.Engine.func_or_class  # type: ignore[attr-defined]


class PatientEngine(Engine):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        patient()
        super().__init__(*args)
