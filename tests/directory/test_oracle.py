"""The directory beside its oracle: hypothesis looks for a run of calls in which their answers differ.

The blob or seed that hypothesis prints reproduces a failure. `World` shrinks the failure to few calls.
"""

import itertools
from typing import Any

import pytest
from helpers.directory.world.served import ServedWorld, SocketWorld
from helpers.directory.world.world import World
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from raykv.directory.state import holds

SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 21)))
STEPS = 10_500  # at least, for each seed: 210,000 in all
SERVED_STEPS = 5_000  # for each way to the directory
OPS = (
    *(
        "match",
        "match_parts",
        "reserve",
        "commit",
        "next_window",
        "crowd",
        "release",
        "client_heartbeat",
        "report",
        "disconnect",
        "heartbeats",
    ),
    *("locate_prefix", "stored", "node_lost", "restart", "wait", "clear"),
    *("tier_heartbeat", "report_existing", "demote", "demote"),
    *("pin", "unpin", "touch", "done", "forget", "preempted", "leave_node", "stay_node", "sole_copies"),
    *("demote_gpu", "demote_gpu", "set_slab_target", "set_quota", "follow"),
)
SEEDS_OF_BURSTS = st.integers(0, 1 << 30)


class Cluster(RuleBasedStateMachine):
    """A world in which hypothesis chooses what happens. Details come from seeds that hypothesis draws."""

    steps = 0
    with_oracle = True
    kind: type[World] = World

    @initialize(world=SEEDS_OF_BURSTS)
    def start(self, world: int) -> None:
        self.world = self.kind(world, self.with_oracle)

    @rule(op=st.sampled_from(OPS), details=SEEDS_OF_BURSTS)
    def one(self, op: str, details: int) -> None:
        self.world.rng.seed(details)
        getattr(self.world, op)()

    @rule(mix=st.sampled_from(sorted(World.MIXES)), steps=st.sampled_from((3, 10, 50, 200)), details=SEEDS_OF_BURSTS)
    def many(self, mix: str, steps: int, details: int) -> None:
        self.world.rng.seed(details)
        self.world.burst(mix, steps)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.failed:
            self.world.everybody_leaves()
            type(self).steps += self.world.steps


class Confused(Cluster):
    """Callers mix up block sizes and garble locations. The oracle can't follow them, but the invariants must hold."""

    steps = 0
    with_oracle = False


class ThroughRay(Cluster):
    """Calls reach the directory's server as Ray's calls do."""

    steps = 0
    kind = ServedWorld

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "world") and isinstance(self.world, ServedWorld):
                self.world.close()


class OverSocket(ThroughRay):
    """Calls reach the directory's server over its socket."""

    steps = 0
    kind = SocketWorld


def run(machine: Any, first_seed: int, steps: int) -> int:
    """Run until at least `steps` steps were taken. Returns how many."""
    machine.steps = 0
    for number in itertools.count(first_seed, 1000):
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=10,
                stateful_step_count=30,
                database=None,
                deadline=None,  # pytest's profile says so too, but docs/oracle.md runs this without pytest
                print_blob=True,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )
        if machine.steps >= steps:
            return int(machine.steps)
    raise AssertionError


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SEEDS)
def test_directory_gives_the_answers_of_the_oracle(number: int) -> None:
    steps = run(Cluster, number, STEPS)
    print(f"{steps} steps, no difference")
    assert steps * len(SEEDS) >= 200_000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_leases_that_are_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end sooner here, because a world's clients live only for seconds."""
    monkeypatch.setattr(holds, "UNUSED_S", 2.0)
    assert run(Cluster, 8, 20_000) >= 20_000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_invariants_hold_for_confused_callers() -> None:
    assert run(Confused, 6, 20_000) >= 20_000


@pytest.mark.parametrize("machine", [OverSocket, ThroughRay])
def test_the_answers_of_the_oracle_arrive_on_both_ways(machine: type[Cluster]) -> None:
    assert run(machine, 7, SERVED_STEPS) >= SERVED_STEPS
