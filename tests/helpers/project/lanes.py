"""How `make test` and `make full` spread tests over processes: those of a file, with its fixtures, run in one."""

from xdist.scheduler import LoadFileScheduling

from helpers.project.durations import file_of

# Serve's, which is documented
PORT_8000 = {f"tests/documented/test_{what}.py" for what in ("examples", "served_examples", "serve_yaml")}

# of `make test`: engines of one lane take over processes that have imported vLLM
VLLM = {f"tests/engines/test_vllm_{what}.py" for what in ("models", "pd", "sizes")}
GROUPS = {**dict.fromkeys(PORT_8000, "port 8000"), **dict.fromkeys(VLLM, "vLLM")}


class Lanes(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return GROUPS.get(file, file)
