"""How `make test` and `make full` spread tests over processes: those of a file, with its fixtures, run in one."""

from xdist.scheduler import LoadFileScheduling

from helpers.durations import file_of

PORT_8000 = {"tests/documented/test_examples.py", "tests/documented/test_serve_yaml.py"}  # Serve's, which is documented


class Lanes(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return "port 8000" if file in PORT_8000 else file
