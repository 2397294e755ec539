"""Which replica of an engine gives a prompt's first token soonest. All costs are numbers of tokens to compute."""

import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import NamedTuple

# The cost of a token that the replica reads from its own node. A token on another node costs as much as a computed one:
# to move a session also takes the node's link, and room in a second cache. See docs/scheduling.md.
LOAD = 0.25
ANSWER = 64.0  # the cost of an answer: its tokens are computed together with those of other requests
REMEMBERED = 10_000  # sessions and ends of prompts, together
REMEMBERED_S = 900.0  # so long after its last prompt, a session's KV counts as evicted from its replica's own cache
WAITING_S = 600.0  # so long after it was sent, a prompt counts as computed, even if nobody told of its end
RECENT = 100  # prompts; a request that another router sent, or of unknown length, costs as much as their median


class Prompt(NamedTuple):
    """A request's prompt.

    tokens: of the prompt; 0 if unknown. keys: of its full blocks, each for all blocks up to there. session: the name of
    its session; "" if unknown.
    """

    tokens: int
    keys: Sequence[bytes] = ()
    session: str = ""


class Found(NamedTuple):
    """What a pool has of a prompt. tokens: of the longest stored prefix. by_node: tokens of it on each node."""

    tokens: float
    by_node: dict[str, float]


class Replica(NamedTuple):
    """A replica of an engine. name: the same in all routers. requests: how many requests it has, as far as known."""

    name: Hashable
    node: str
    requests: int


class Sent(NamedTuple):
    """A prompt at a replica. request: its id, which other prompts may have too. at: when it was sent."""

    request: Hashable
    cost: float
    at: float


class Last(NamedTuple):
    """A session's last prompt. tokens: of the prompt. at: when it was sent."""

    replica: Hashable
    tokens: int
    at: float


class Routes:
    """The prompts that a router sent: what each replica still has to compute, and which sessions its own cache has.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._sent = defaultdict[Hashable, list[Sent]](list)  # by replica, in order
        self._last = OrderedDict[str | bytes, Last]()  # by session, and by the last key of a prompt
        self._recent = deque[float](maxlen=RECENT)

    def costs(self, prompt: Prompt, found: Found | None, replicas: Sequence[Replica], now: float) -> list[float]:
        """What each replica has to compute until the prompt's first token, with all that it does before.

        found: None if the pool does not answer. now: seconds.
        """
        prompt = self._with_length(prompt)
        own = self._own(prompt, found, replicas, now)
        return [_cost(prompt, found, each, own) + self._waiting(each, now) for each in replicas]

    def send(self, request: Hashable, prompt: Prompt, found: Found | None, replica: Replica, now: float) -> None:
        """A request has gone to a replica."""
        prompt = self._with_length(prompt)
        cached = self._own(prompt, found, [], now).get(replica.name, 0.0)
        cost = ANSWER + prompt.tokens - max(cached, found.tokens if found else 0.0)  # what is read keeps nobody waiting
        self._recent.append(cost)
        self._sent[replica.name].append(Sent(request, cost, now))
        names: list[str | bytes] = [prompt.session, *prompt.keys[-1:]]
        for name in names:
            if name:
                self._last[name] = Last(replica.name, prompt.tokens, now)
                self._last.move_to_end(name)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def complete(self, request: Hashable, replica: Hashable) -> None:
        """A request has ended."""
        sent = self._sent[replica]
        if one := next((each for each in sent if each.request == request), None):
            sent.remove(one)

    def _with_length(self, prompt: Prompt) -> Prompt:
        return prompt if prompt.tokens else prompt._replace(tokens=int(self._usual()))

    def _usual(self) -> float:
        return median(self._recent) if self._recent else ANSWER

    def _waiting(self, replica: Replica, now: float) -> float:
        sent = self._sent[replica.name]
        while sent and now - sent[0].at > WAITING_S:
            del sent[0]
        others = max(0, replica.requests - len(sent))  # which other routers sent
        return sum(each.cost for each in sent) + others * self._usual()

    def _own(
        self, prompt: Prompt, found: Found | None, replicas: Sequence[Replica], now: float
    ) -> dict[Hashable, float]:
        """Tokens of the prompt in replicas' own caches, by replica.

        A named session is at the replica that it had last, or at its home: other routers may have sent it there since.
        """
        own: dict[Hashable, float] = {}
        if prompt.session:
            last = self._remembered(prompt.session, now)
            stored = min(found.tokens if found else prompt.tokens, last.tokens if last else prompt.tokens)
            for name in ([last.replica] if last else []) + _home(prompt.session, replicas):
                own[name] = max(1.0, stored)  # of equal replicas the session's comes first
        for count in range(len(prompt.keys), 0, -1):
            if last := self._remembered(prompt.keys[count - 1], now):
                tokens = prompt.tokens * count / len(prompt.keys)
                own[last.replica] = max(own.get(last.replica, 0.0), tokens)
                break
        return own

    def _remembered(self, name: str | bytes, now: float) -> Last | None:
        last = self._last.get(name)
        return last if last and now - last.at < REMEMBERED_S else None


def _cost(prompt: Prompt, found: Found | None, replica: Replica, own: dict[Hashable, float]) -> float:
    """Of the prompt alone."""
    cached = own.get(replica.name, 0.0)
    here = found.by_node.get(replica.node, 0.0) if found else 0.0
    return prompt.tokens - cached - (1 - LOAD) * max(0.0, here - cached)


def _home(session: str, replicas: Sequence[Replica]) -> list[Hashable]:
    """The name of the replica on which all routers agree, by rendezvous hashing. [] without replicas."""
    weights = {replica.name: zlib.crc32(f"{replica.name} {session}".encode()) for replica in replicas}
    return [max(weights, key=weights.__getitem__)] if weights else []
