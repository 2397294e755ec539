"""How `make test` and `make full` spread tests over processes. All tests of a file run in one process."""

from xdist.scheduler import LoadFileScheduling

from helpers.project.durations import file_of

# These tests start Serve, which listens at port 8000: they run one after the other.
PORT_8000 = {f"tests/documented/test_{what}.py" for what in ("examples", "served_examples", "serve_yaml")}

# These tests of `make test` share a lane, so that engines take over processes that have imported vLLM.
VLLM = {
    "tests/engines/vllm_models/test_vllm_models.py",
    "tests/engines/vllm_models/test_vllm_pd.py",
    "tests/engines/vllm_requests/test_vllm_sizes.py",
}
GROUPS = {**dict.fromkeys(PORT_8000, "port 8000"), **dict.fromkeys(VLLM, "vLLM")}


class Lanes(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return GROUPS.get(file, file)
