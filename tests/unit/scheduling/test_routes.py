"""Which replica a prompt costs least at: its part that is cached nowhere, and all that waits there."""

from collections import Counter
from collections.abc import Iterable

import pytest

from raykv.scheduling import routes
from raykv.scheduling.routes import ANSWER, LOAD, OF_PROMPT, REMEMBERED_S, WAITING_S, Found, Prompt, Replica, Routes

IDLE = [Replica("a", "near", 0), Replica("b", "far", 0)]
AT_A, AT_B = (  # sessions by their homes
    next(name for name in "0123456789" if Routes().costs(Prompt(9, (), name), None, IDLE, 0.0) == costs)
    for costs in ([8, 9], [9, 8])
)


def answer(tokens: int) -> float:
    return ANSWER + OF_PROMPT * tokens


def keys(*path: int) -> list[bytes]:
    """Keys of a prompt's blocks: each names the blocks up to there."""
    return [bytes(path[: end + 1]) for end in range(len(path))]


def costs(
    of: Routes, prompt: Prompt, found: Found | None = None, now: float = 0.0, replicas: Iterable[Replica] = IDLE
) -> list[float]:
    return of.costs(prompt, found, list(replicas), now)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, [100, 100]),
        (Found(0, {}), [100, 100]),
        (Found(60, {"near": 60}), [40 + 60 * LOAD, 100]),
        (Found(60, {"near": 20, "far": 40}), [80 + 20 * LOAD, 60 + 40 * LOAD]),
        (Found(60, {"near": 60, "far": 60}), [40 + 60 * LOAD] * 2),
        (Found(60, {}), [100, 100]),  # in an external tier
        (Found(60, {"gone": 60}), [100, 100]),
    ],
)
def test_a_token_on_the_replicas_node_costs_less(found: Found | None, expected: list[float]) -> None:
    assert costs(Routes(), Prompt(100, keys(*range(10))), found) == pytest.approx(expected)


@pytest.mark.parametrize("found", [None, Found(100, {"near": 100})])
def test_a_named_session_stays_where_it_is_until_another_replica_is_sooner(found: Found | None) -> None:
    of = Routes()
    of.send(1, Prompt(100, keys(1, 2), AT_B), None, "b", 0.0)
    of.complete(1, "b")
    a, b = costs(of, Prompt(120, keys(9, 9, 9), AT_B), found)
    assert a > b == 20, "its own cache has the last prompt"
    of.send(2, Prompt(200, keys(3)), None, "b", 0.0)
    a, b = costs(of, Prompt(120, keys(9, 9, 9), AT_B), found)
    assert a < b


def test_what_a_pool_lacks_is_no_longer_the_sessions_prompt() -> None:
    """An engine that rewrites its history shares only a beginning with the prompt before."""
    of = Routes()
    of.send(1, Prompt(100, keys(1, 2), AT_B), None, "b", 0.0)
    of.complete(1, "b")
    assert costs(of, Prompt(120, keys(9, 9, 9), AT_B), Found(30, {"near": 30})) == [90 + 30 * LOAD, 90]
    assert costs(of, Prompt(120, keys(9, 9, 9), AT_B), Found(0, {})) == [120, 119], "of equal replicas its own"


def test_routers_that_share_a_session_agree_on_its_home() -> None:
    for session, home in ((AT_A, 0), (AT_B, 1)):
        prompt, found = Prompt(100, (), session), Found(60, {})
        assert all(costs(Routes(), prompt, found)[home] == 40 for _ in range(3))
        assert costs(Routes(), prompt, Found(0, {}))[home] == costs(Routes(), prompt)[home] == 99
        assert costs(Routes(), prompt, found, replicas=IDLE[::-1])[1 - home] == 40
        assert costs(Routes(), prompt, found, replicas=[IDLE[1 - home]]) == [40], "its home is gone"
    of = Routes()
    of.send(1, Prompt(100, (), AT_A), None, "b", 0.0)  # its home had much to do
    of.complete(1, "b")
    assert costs(of, Prompt(150, (), AT_A), Found(100, {})) == [50, 50], "another router may have sent it home"


def test_homes_are_spread_evenly_and_any_name_has_one() -> None:
    replicas = [Replica(name, name, 0) for name in "abcde"]
    names = [*map(str, range(2000)), "\ud800", "ä" * 1000]
    homes = Counter(
        "abcde"[min(range(5), key=Routes().costs(Prompt(9, (), name), None, replicas, 0.0).__getitem__)]
        for name in names
    )
    assert all(0.8 < 5 * count / len(names) < 1.2 for count in homes.values()) and len(homes) == 5


def test_a_session_without_a_name_is_known_by_its_longest_chain() -> None:
    of = Routes()
    for number, (path, replica) in enumerate([((1,), "a"), ((1, 2, 3), "b"), ((1, 4, 5, 6), "a")]):
        of.send(number, Prompt(10 * len(path), keys(*path)), None, replica, 0.0)
        of.complete(number, replica)
    assert costs(of, Prompt(50, keys(1, 2, 3, 7, 8))) == [50, 20]
    assert costs(of, Prompt(50, keys(1, 9, 9, 9, 9))) == [40, 50]
    assert costs(of, Prompt(50, keys(9, 2, 3, 7, 8))) == [50, 50]


def test_each_prompt_of_a_session_prolongs_the_time_that_it_is_remembered() -> None:
    of = Routes()
    for now in (0.0, 0.9 * REMEMBERED_S):
        of.send("r", Prompt(60, keys(1), AT_B), None, "a", now)
        of.complete("r", "a")
    by_name, by_chain = Prompt(100, (), AT_B), Prompt(100, keys(1, 2))
    assert costs(of, by_name, now=1.8 * REMEMBERED_S) == [40, 99]
    assert costs(of, by_name, now=1.9 * REMEMBERED_S) == [100, 99]
    assert costs(of, by_chain, now=1.8 * REMEMBERED_S) == [50, 100]
    assert costs(of, by_chain, now=1.9 * REMEMBERED_S) == [100, 100]


def test_the_sessions_of_longest_ago_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REMEMBERED", 2)
    of = Routes()
    for key in (1, 2, 1, 3):
        of.send(key, Prompt(100, keys(key)), None, "a", 0.0)
        of.complete(key, "a")
    assert [costs(of, Prompt(100, keys(key)))[0] for key in (1, 2, 3)] == [0, 100, 0]


def test_all_that_waits_at_a_replica_counts() -> None:
    of = Routes()
    of.send(1, Prompt(1000, keys(1)), None, "a", 0.0)
    assert costs(of, Prompt(100, keys(2))) == [100 + 1000 + answer(1000), 100]
    of.send(2, Prompt(200, keys(3)), Found(200, {"far": 200}), "b", 0.0)
    assert costs(of, Prompt(100, keys(2)))[1] == 100 + answer(200), "what is read keeps nobody waiting"
    of.complete(1, "a")
    of.complete(1, "a")
    of.complete("a rejected request", "b")
    assert costs(of, Prompt(100, keys(2)))[0] == 100
    for number in (4, 5):
        of.send("a call of one that makes several", Prompt(1000, keys(number)), None, "a", 0.0)
    of.complete("a call of one that makes several", "a")
    assert costs(of, Prompt(100, keys(2)))[0] == 100 + 1000 + answer(1000)


def test_requests_of_other_routers_count_as_usual_ones() -> None:
    of = Routes()
    busy = [Replica("a", "near", 3), Replica("b", "far", 0)]
    assert costs(of, Prompt(100, keys(1)), replicas=busy) == [100 + 3 * ANSWER, 100]
    for number, tokens in enumerate((100, 300)):
        of.send(number, Prompt(tokens, keys(number)), None, "a", 0.0)
    assert costs(of, Prompt(100, keys(9)), replicas=busy)[0] == 100 + 400 + answer(100) + answer(300) + (
        200 + answer(200)
    )


def test_a_prompt_of_unknown_length_costs_as_much_as_a_usual_request() -> None:
    of = Routes()
    of.send(0, Prompt(1000, keys(1)), None, "a", 0.0)
    for number in range(1, 200):
        of.complete(number - 1, "a")
        assert costs(of, Prompt(None)) == [1000 + answer(1000)] * 2
        of.send(number, Prompt(None), None, "a", 0.0)
        assert costs(of, Prompt(None)) == [2 * (1000 + answer(1000)), 1000 + answer(1000)]


def test_what_waits_at_a_replica_that_is_gone_is_forgotten() -> None:
    of = Routes()
    for name in "ab":
        of.send(name, Prompt(1000, keys(1)), None, name, 0.0)
    of.keep({"a"})
    assert costs(of, Prompt(100, keys(2))) == [100 + 1000 + answer(1000), 100]
    of.complete("b", "b")


def test_a_request_of_whose_end_nobody_told_stops_to_count() -> None:
    of = Routes()
    of.send(1, Prompt(1000, keys(1)), None, "a", 0.0)
    of.send(2, Prompt(500, keys(2)), None, "a", 1.0)
    assert costs(of, Prompt(100, keys(3)), now=WAITING_S)[0] == 100 + 1500 + answer(1000) + answer(500)
    assert costs(of, Prompt(100, keys(3)), now=WAITING_S + 0.5)[0] == 100 + 500 + answer(500)
    assert costs(of, Prompt(100, keys(3)), now=WAITING_S + 2.0)[0] == 100
