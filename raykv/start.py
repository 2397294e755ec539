"""`raykv.start`: start the actors of a pool if the nodes have the resources for it.

The directory and the node stores start first, and wait for the pool's settings. Each store reports its node's
resources. If all nodes have enough, `start` writes the settings into Ray's internal KV. The supervisor starts
last, when the pool can serve.
"""

import json
import logging
import pickle
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from raykv import cluster
from raykv.actors.directory.directory import start_directory
from raykv.actors.store.node_store import start_store
from raykv.actors.store.readiness import Question, what_to_install, why_not_usable
from raykv.actors.supervisor.supervisor import start_supervisor
from raykv.client.connect import connect
from raykv.client.pool import KVPool
from raykv.client.stop import drop_unstarted, end_pool
from raykv.cluster import internal_kv, named_actors
from raykv.cluster.internal_kv import Kept
from raykv.config import PoolConfig, fingerprint
from raykv.errors import CapacityError, reason_of
from raykv.protocol.calls import VERSION
from raykv.system import free_memory
from raykv.tiers import parse, tier_for
from raykv.tiers.registry import registered
from raykv.tiers.url import shown

log = logging.getLogger("raykv")
ASK_DEADLINE_S = 60.0  # deadline for a node's store to report its node's resources
START_DEADLINE_S = 300.0  # deadline for a start: the first start on a machine compiles the kernels
PROGRESS_S = 0.2  # interval between two reports of how many kernels are compiled
ANSWER_LOOK_S = 0.02  # interval between two checks for the stores' answers
SILENT_S = 3.0  # silence after which a node is asked whether it has raykv
Progress = Callable[[int, int], None]


def start(config: PoolConfig | None = None, *, exist_ok: bool = False, on_progress: Progress | None = None) -> KVPool:
    """Start a pool on every node of the Ray cluster. If the pool already runs with these settings, attach to it.

    A process that is in no Ray cluster joins the cluster at RAY_ADDRESS, else the cluster on its machine.

    config: the pool's settings. None: attach to the pool "default" if it runs, else start it with default settings.
    exist_ok: attach to a running pool even if its settings differ. A given secret must still be the pool's secret.
    on_progress: called with (number of compiled kernels, number of all kernels) while the directory compiles.

    Raises CapacityError if a node does not have the memory, and PoolNotFound if there is no Ray cluster. Raises
    ValueError for settings that differ from the running pool's, for a bad secret, for nodes without raykv, and for an
    external tier, a transport or GPUs that nodes can't use. An error or a KeyboardInterrupt ends everything that this
    call started.
    """
    exist_ok |= config is None
    config = config or PoolConfig()
    if config.external:
        tier_for(parse(config.external))
    connect(config.name)
    secret = config.explicit_secret()
    with internal_kv.exclusive(config.name, START_DEADLINE_S):
        running = internal_kv.settings(config.name)
        if running is not None:
            _check_same(config, secret, running, exist_ok)
            start_supervisor(config.name)  # a killed start may have left the pool without a supervisor
            return KVPool(config.name)
        settings, question = _prepared(config, secret)
        if named_actors.names(config.name):  # actors that a killed start left
            end_pool(config.name)
        internal_kv.forget(config.name)  # leftovers of a stop that was killed
        try:
            _start_actors(question, settings, on_progress)
            pool = KVPool(config.name)
            start_supervisor(config.name)
            return pool
        except BaseException:  # also KeyboardInterrupt
            if internal_kv.settings(config.name) is None:
                drop_unstarted(config.name)
            else:
                end_pool(config.name)
            raise


def _prepared(config: PoolConfig, secret: bytes | None) -> tuple[dict[str, Any], Question]:
    """Return (the settings of a new pool, the question to its nodes)."""
    if config.external and secret is None:
        raise ValueError(
            "external= outlives the pool, and keys that are derived from a random secret would not be found there "
            "again: give secret=, or RAYKV_SECRET"
        )
    secret = secret or secrets.token_bytes(32)
    maker = registered(parse(config.external).scheme) if config.external else None
    settings = {"protocol": VERSION, "secret": secret.hex(), **_comparable(config)}
    return settings, Question(
        config.name,
        config.cpu_memory,
        config.gpu_memory,
        config.transport,
        config.external,
        fingerprint(config.name, secret),
        ray.cloudpickle.dumps(maker) if maker else None,
    )


def _comparable(config: PoolConfig) -> dict[str, Any]:
    """Return all settings except the name and the secret."""
    return {name: value for name, value in vars(config).items() if name not in ("name", "secret")}


def _check_same(config: PoolConfig, secret: bytes | None, running: dict[str, Any], exist_ok: bool) -> None:
    """Raise ValueError if the settings differ from the running pool's. The message names each difference."""
    if secret is not None and secret.hex() != running["secret"]:
        raise ValueError(f"pool {config.name!r} runs with another secret: leave it out, or stop that pool first")
    given = _comparable(config)
    differ = [_difference(name, running[name], given[name]) for name in given if given[name] != running[name]]
    if differ and not exist_ok:
        raise ValueError(
            f"pool {config.name!r} runs with other settings: {', '.join(differ)}. Take it as it is with "
            f"raykv.attach({config.name!r}) or start(..., exist_ok=True), or end it with `raykv stop --name "
            f"{config.name}` first"
        )


def _difference(name: str, running: Any, given: Any) -> str:
    if name == "external":  # URLs may contain passwords
        running, given = (url and shown(url) for url in (running, given))
    return f"{name}={running!r} (given: {given!r})"


def _start_actors(question: Question, settings: dict[str, Any], on_progress: Progress | None) -> None:
    """Start the directory and the stores of a pool that does not run, and wait until they serve."""
    pool, head = question.pool, _head()
    directory = start_directory(pool, 1, head)
    stores = {node_id: start_store(pool, node_id, question) for node_id in cluster.living()}
    answers = _answers(pool, stores)
    _check(question, answers)
    _warn_of_memory(pool, answers)
    if head in answers and not answers[head]["compiled"]:
        log.warning("pool %s: compiling its kernels, which takes a minute or so on a machine's first start", pool)
    if question.maker:
        internal_kv.put(pool, Kept.TIER, question.maker)
    internal_kv.put_in_charge(pool, named_actors.directory_name(pool, 1), None)
    internal_kv.put(pool, Kept.SETTINGS, json.dumps(settings).encode())
    _await_directory(pool, directory, on_progress)
    failed = {node_id: why for node_id, store in stores.items() if (why := _why_not_there(node_id, store))}
    if failed:
        raise CapacityError("\n".join(f"node {node_id[:16]}: {why}" for node_id, why in failed.items()))


def _await_directory(pool: str, directory: Any, on_progress: Progress | None) -> None:
    """Wait until the directory serves. RayError if it can't start, TimeoutError after START_DEADLINE_S."""
    answer, end = directory.ping.remote(), time.monotonic() + START_DEADLINE_S
    while not ray.wait([answer], timeout=PROGRESS_S)[0]:
        if time.monotonic() > end:
            compiled = " of ".join(map(str, _compiled(pool))) or "none"
            raise TimeoutError(
                f"pool {pool!r} does not serve after {START_DEADLINE_S:.0f} s; kernels compiled: {compiled}. "
                "Start it again: those are kept, and a machine with less to do compiles faster"
            )
        if on_progress and (compiling := _compiled(pool)):
            on_progress(*compiling)
    ray.get(answer)


def _compiled(pool: str) -> list[int]:
    """Return [number of compiled kernels, number of all kernels], or [] if the directory compiles none."""
    return [int(part) for part in (internal_kv.get(pool, Kept.COMPILED) or b"").split()]


def _why_not_there(node_id: str, store: Any) -> str:
    """Wait until a node's store serves. Returns why the store does not serve; "" if it serves or its node was lost."""
    try:
        ray.get(store.describe_arena.remote(), timeout=ASK_DEADLINE_S)
    except RayError as error:
        return reason_of(error) if node_id in cluster.living() else ""
    return ""


def _head() -> str:
    for node in ray.nodes():
        if node["Alive"] and cluster.is_head(node):
            return str(node["NodeID"])
    return str(ray.get_runtime_context().get_node_id())


def _answers(pool: str, stores: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stores' answers by Ray node id, without nodes that were lost meanwhile or did not answer.

    ValueError if a silent node can't import raykv.
    """
    answers: dict[str, dict[str, Any]] = {}
    begin, usable = time.monotonic(), set[str]()  # usable: silent nodes that can import raykv
    while len(answers) < len(stores) and time.monotonic() < begin + ASK_DEADLINE_S:
        for node_id in internal_kv.names(pool, Kept.ANSWER):
            answers[node_id] = pickle.loads(internal_kv.get(pool, Kept.ANSWER, node_id) or b"")
            internal_kv.drop(pool, Kept.ANSWER, node_id)
        silent = stores.keys() - answers.keys() - usable
        if silent and time.monotonic() > begin + SILENT_S:
            usable.add(node_id := min(silent))
            if why := why_not_usable(node_id, ASK_DEADLINE_S):
                raise ValueError(why)
        time.sleep(ANSWER_LOOK_S)
    return answers


def _check(question: Question, answers: dict[str, dict[str, Any]]) -> None:
    """Raise CapacityError if a machine does not have the memory that its nodes need together.

    Raises ValueError if a node's raykv has another protocol version, if a node can't use the external tier or the
    transport, or if no node has a GPU for `gpu_memory`.
    """
    refusals: dict[str, list[str]] = {}  # node ids by the text of a refusal
    for node_id, answer in answers.items():
        theirs = answer.get("protocol", "unknown")
        other = f"raykv there has protocol version {theirs}, here it has {VERSION}: {what_to_install()}"
        for what in filter(None, [other if theirs != VERSION else "", *answer["refusals"]]):
            refusals.setdefault(what, []).append(node_id[:16])
    if refusals:
        raise ValueError("\n".join(f"{what} (on nodes {', '.join(nodes)})" for what, nodes in refusals.items()))
    if question.gpu_memory and not any(answer["gpus"] for answer in answers.values()):
        raise ValueError(f"gpu_memory={question.gpu_memory}, but no node of this Ray cluster has a GPU: leave it out")
    _check_memory(answers)


def _check_memory(answers: dict[str, dict[str, Any]]) -> None:
    machines: dict[str, dict[str, dict[str, Any]]] = {}
    for node_id, answer in answers.items():
        machines.setdefault(answer["machine"], {})[node_id] = answer
    for nodes in machines.values():
        wanted, first = sum(node["asked"] for node in nodes.values()), next(iter(nodes.values()))
        if wanted > first["free"]:
            which = ", ".join(node_id[:16] for node_id in nodes)
            raise CapacityError(f"node {which}: {free_memory.refusal(wanted, first['room'], len(nodes))}")


def _warn_of_memory(pool: str, answers: dict[str, dict[str, Any]]) -> None:
    """Warn of shared memory that is left of pools that no longer run, and say how to free it."""
    left: dict[str, int] = {}
    for answer in {answer["machine"]: answer for answer in answers.values()}.values():
        for other, size in answer["left"].items():
            left[other] = left.get(other, 0) + size
    for other, size in left.items():
        if other != pool and internal_kv.get(other, Kept.SETTINGS) is None:
            log.warning(
                "pool %s does not run, but %.2f GiB of shared memory are left of it: `raykv stop --name %s` frees them",
                other,
                size / (1 << 30),
                other,
            )
