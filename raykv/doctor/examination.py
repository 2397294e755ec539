"""Examines every node of the Ray cluster at once."""

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors.store.readiness import what_to_install
from raykv.client import connect
from raykv.cluster import internal_kv, ray_calls
from raykv.cluster.internal_kv import Kept
from raykv.doctor import examiner, judgement
from raykv.doctor.facts import Facts
from raykv.doctor.finding import OK, WRONG, Finding
from raykv.errors import reason_of

DEADLINE_S = 60.0  # deadline of a question, which all nodes get at once
CLOCK_ASKS = 3  # number of questions for a node's clock; the fastest answer is the most exact


class Unanswered(NamedTuple):
    """The result for a node that did not answer."""

    why: str


def of_token() -> Finding:
    """Check whether this process and the cluster both use Ray's token, or both use none.

    Wrong tokens are not checked: with a wrong token, this process could not have joined. If the finding is not OK, no
    node can answer, since this process refuses the calls that Ray sends back.
    """
    context = ray.get_runtime_context()
    node = context.get_node_id()
    if not connect.sends_token():
        return Finding(node, "token", OK, "none, and the Ray cluster asks for none")
    if connect.asks_for_token(context.gcs_address):
        return Finding(node, "token", OK, "the Ray cluster's")
    source, file = connect.token_source(), connect.TOKEN_FILE
    remove = f", or remove {file}, which a local ray.init() leaves" if source == file else ""
    text = f"this process has one (of {source}), and the Ray cluster has none, so that no node can answer: "
    return Finding(node, "token", WRONG, f"{text}set RAY_AUTH_MODE=disabled here{remove}")


class Examination:
    """An examination of all living nodes. hosts: host names by Ray node id, in the order of ray.nodes()."""

    def __init__(self) -> None:
        """This process must have joined the Ray cluster."""
        self.hosts = {str(node["NodeID"]): str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that need no pool, check by check."""
        software = _ask(examiner.software, self.hosts)
        here = {"python": platform.python_version(), "numba": version("numba"), "raykv": version("raykv")}
        answered = {node: said for node, said in software.items() if not isinstance(said, Unanswered)}
        for node, said in software.items():
            if isinstance(said, Unanswered):
                yield Finding(node, "worker", WRONG, f"{said.why}: see `ray status`, and the logs of its raylet")
        for node, said in answered.items():
            yield from judgement.of_software(node, said, here)
        alike = [node for node, said in answered.items() if said.get("raykv") == here["raykv"]]
        yield from self._facts(alike, here["raykv"])
        for node in answered:
            yield self._clock(node)
        yield from self._doors(list(answered))

    def _facts(self, nodes: list[str], raykv: str) -> Iterator[Finding]:
        """Yield findings on nodes that have this version of raykv."""
        usable = []
        for node, protocol in _ask(examiner.protocol, nodes).items():
            if isinstance(protocol, Unanswered):
                yield Finding(node, "raykv", WRONG, f"{protocol.why}: {what_to_install()}")
            else:
                yield (found := judgement.of_protocol(node, raykv, protocol))
                usable += [node] if found.state == OK else []
        told = _ask(examiner.facts, usable)
        machines = Counter(facts.machine for facts in told.values() if isinstance(facts, Facts))
        for node, facts in told.items():
            if isinstance(facts, Unanswered):
                yield Finding(node, "worker", WRONG, facts.why)
                continue
            running = {pool for pool in facts.left if internal_kv.get(pool, Kept.SETTINGS) is not None}
            yield from judgement.of_facts(node, facts, machines[facts.machine], running)

    def _clock(self, node: str) -> Finding:
        asks = []
        for _ in range(CLOCK_ASKS):
            begin = time.time()
            there = _ask(examiner.clock, [node])[node]
            took = time.time() - begin
            if isinstance(there, Unanswered):
                return Finding(node, "worker", WRONG, there.why)
            asks.append((took / 2, there - begin - took / 2))
        unsure, ahead = min(asks)
        return judgement.of_clock(node, ahead, unsure)

    def _doors(self, nodes: list[str]) -> Iterator[Finding]:
        """Yield findings on whether each node can connect to each other node, at a port that the system picks."""
        listening = _asked(examiner.listen, nodes)
        doors = _answers(listening)
        for node, door in doors.items():
            if isinstance(door, Unanswered):
                text = f"can't listen at its Ray address ({door.why}): give `ray start` a --node-ip-address of its own"
                yield Finding(node, "ports", WRONG, text)
        open_ = [node for node, door in doors.items() if not isinstance(door, Unanswered)]
        reached = _ask(examiner.reach, open_, [doors[node] for node in open_])
        for node, whys in reached.items():
            if isinstance(whys, Unanswered):
                yield Finding(node, "worker", WRONG, whys.why)
                continue
            blocked = {peer: why for peer, why in zip(open_, whys, strict=True) if why and peer != node}
            for peer, why in blocked.items():
                yield Finding(node, "ports", WRONG, self._blocked(peer, doors[peer], why), peer)
            if not blocked:
                yield Finding(node, "ports", OK, f"connects to all other nodes, {len(open_) - 1}")

    def _blocked(self, peer: str, door: tuple[str, int], why: str) -> str:
        return (
            f"can't connect to {self.hosts[peer]} ({peer[:16]}) at {door[0]} port {door[1]}: {why}. Open the ports of "
            f"net.ipv4.ip_local_port_range between the nodes, or all goes through Ray's object store, which is slower"
        )


def _ask(question: Any, nodes: Iterable[str], *args: Any) -> dict[str, Any]:
    """Return the nodes' answers to a question of `examiner`, with Unanswered for a node that did not answer."""
    return _answers(_asked(question, nodes, *args))


def _asked(question: Any, nodes: Iterable[str], *args: Any) -> dict[str, Any]:
    """Send a question to nodes. A task gives one answer, a generator gives several answers in turn."""
    return {
        node: question.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args)
        for node in nodes
    }


def _answers(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the first answer of each node."""
    ready = ray_calls.finished(asked.values(), DEADLINE_S)
    return {node: _answer(answer, answer in ready) for node, answer in asked.items()}


def _answer(answer: Any, is_there: bool) -> Any:
    if not is_there:
        return Unanswered(f"no answer in {DEADLINE_S:.0f} s")
    try:
        return ray.get(next(answer) if isinstance(answer, ray.ObjectRefGenerator) else answer)
    except RayError as error:
        return Unanswered(reason_of(error))
