"""Four machines that machines.sh simulates on this one, and their shells."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.pools import eventually

UNSHARE = ["setpriv", "--pdeathsig=KILL"]  # the machines end with this process, however it ends
UNSHARE += ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S = 400
DESK = 254  # the machine of the user; machines 1 to 3 are the cluster's


def why_not() -> str:
    """Why such machines can't be made here; "" if they can."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        return "network namespaces can't be made here: it takes root"
    missing = [name for name in ("sshd", "ssh", "rsync", "ip") if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    return f"{missing} missing: apt-get install openssh-server openssh-client rsync iproute2" if missing else ""


def address(machine: int) -> str:
    return f"10.77.0.{machine}"


@dataclass(frozen=True)
class Machines:
    """Shells on machines that are up. key: the SSH key of all. first: a process in their network namespace."""

    key: Path
    first: int

    def ask(self, machine: int, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a shell of that machine; returncode 124 if it takes more than DEADLINE_S."""
        options = ["LogLevel=ERROR", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
        ssh = ["ssh", "-i", str(self.key), *(f"-o{option}" for option in options), f"root@{address(machine)}", command]
        inside = ["timeout", str(DEADLINE_S), "nsenter", f"--target={self.first}", "--net"]
        return subprocess.run([*inside, *ssh], capture_output=True, text=True, env={"PATH": os.defpath})

    def run(self, machine: int, command: str) -> str:
        """The command's output; AssertionError if the command fails."""
        done = self.ask(machine, command)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, machine: int, command: str) -> Any:
        """The last line of the command's output, read as JSON."""
        return json.loads(self.run(machine, command).splitlines()[-1])


@contextmanager
def machines(folder: Path, shm: str) -> Iterator[Machines]:
    """Start all machines, and afterwards end them with all that runs on them.

    folder: an empty folder, for homes and logs. shm: the size of a machine's /dev/shm, in mount's format.
    """
    script = Path(__file__).with_name("machines.sh")
    log = folder / "log"
    with log.open("w") as output:
        unshare = subprocess.Popen([*UNSHARE, script, folder, sys.executable, shm], stdout=output, stderr=output)
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    first = int(eventually(lambda: children.read_text().strip()))
    found = Machines(folder / "key", first)

    def answers(machine: int) -> bool:
        assert unshare.poll() is None, log.read_text()
        return found.ask(machine, "true").returncode == 0

    try:
        for machine in (1, 2, 3, DESK):
            eventually(lambda machine=machine: answers(machine))  # type: ignore[misc]
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        unshare.wait()  # until all processes of the machines have ended
