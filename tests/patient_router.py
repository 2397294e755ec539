"""Routers that give the directory time: whom they choose is tested, on a machine that may be busy."""

from raykv.integrations.serve import PrefixRouter


class PatientRouter(PrefixRouter):
    def initialize_state(self, model: str, pool: str = "default") -> None:
        import raykv.scout

        raykv.scout.DEADLINE_S = 5.0
        super().initialize_state(model, pool)
