"""Estimates which replica gives a prompt's first token soonest. All costs are numbers of tokens to compute."""

from collections import OrderedDict, deque
from collections.abc import Container, Hashable, Sequence
from hashlib import blake2b
from statistics import median
from typing import NamedTuple

# The cost of a token that the replica reads from its own node. A token on another node costs as much as a computed
# token: moving a session also uses the node's link, and memory in a second cache. See docs/scheduling.md.
LOAD = 0.25
# The fixed cost of an answer, and its cost for each token of the prompt, as every step reads the prompt's KV
ANSWER, OF_PROMPT = 64, 1 / 16
REMEMBERED = 50_000  # maximum number of remembered names: sessions, and last keys of prompts
REMEMBERED_S = 900.0  # time after a session's last prompt until its KV counts as evicted from its replica's own cache
WAITING_S = 600.0  # time after which a sent prompt counts as computed, even if nobody reported its end
RECENT = 100  # number of recent prompts of known length; their median cost is assumed for other requests


class Prompt(NamedTuple):
    """A request's prompt.

    tokens: number of tokens; None if unknown. keys: keys of the full blocks; each key also identifies all earlier
    blocks. session: name of the prompt's session; "" if unknown.
    """

    tokens: int | None
    keys: Sequence[bytes] = ()
    session: str = ""


class Found(NamedTuple):
    """The part of a prompt that a pool has.

    tokens: number of tokens in the longest stored prefix. by_node: number of these tokens on each node.
    """

    tokens: float
    by_node: dict[str, float]


class Replica(NamedTuple):
    """A replica of an engine. name: the same in all routers. requests: number of its requests, as far as known."""

    name: Hashable
    node: str
    requests: int


class Sent(NamedTuple):
    """A prompt at a replica. request: the request's id, which other prompts may have too. at: when it was sent."""

    request: Hashable
    cost: float
    at: float


class Last(NamedTuple):
    """A session's last prompt. tokens: number of the prompt's tokens. at: when it was sent."""

    replica: Hashable
    tokens: float
    at: float


class Routes:
    """The prompts that a router sent. They show each replica's work, and the sessions in each replica's own cache.

    A prompt counts as work until its request has ended, as nobody reports the first token. Not thread-safe.
    """

    def __init__(self) -> None:
        self._sent: dict[Hashable, list[Sent]] = {}  # by replica, in the order in which they were sent
        self._last = OrderedDict[str | bytes, Last]()  # by session, and by the last key of a prompt
        self._recent = deque[float](maxlen=RECENT)

    def costs(self, prompt: Prompt, found: Found | None, replicas: Sequence[Replica], now: float) -> list[float]:
        """Return, for each replica, the tokens to compute until the prompt's first token.

        The replica's other work is included. found: None if the pool does not answer. now: seconds.
        """
        tokens = self._tokens(prompt)
        own = self._own(prompt, found, now)
        if prompt.session and (home := _home(prompt.session, replicas)) not in own:
            own[home] = max(1.0, found.tokens if found else 0.0)  # another router may have sent the session there
        return [tokens - _saved(found, each, own) + self._waiting(each, now) for each in replicas]

    def send(self, request: Hashable, prompt: Prompt, found: Found | None, replica: Hashable, now: float) -> None:
        """Note that a request was sent to a replica. Cached tokens add little to the replica's work."""
        tokens = self._tokens(prompt)
        cost = tokens
        if prompt.tokens is not None:
            cached = max(self._own(prompt, found, now).get(replica, 0.0), found.tokens if found else 0.0)
            cost = ANSWER + OF_PROMPT * tokens + max(0.0, tokens - cached)
            self._recent.append(cost)
        self._sent.setdefault(replica, []).append(Sent(request, cost, now))
        names: list[str | bytes] = [prompt.session, *prompt.keys[-1:]]
        for name in names:
            if name:
                self._last[name] = Last(replica, tokens, now)
                self._last.move_to_end(name)
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def complete(self, request: Hashable, replica: Hashable) -> None:
        """Note that a request has ended."""
        sent = self._sent.get(replica, [])
        if one := next((each for each in sent if each.request == request), None):
            sent.remove(one)

    def keep(self, replicas: Container[Hashable]) -> None:
        """Forget the prompts at all replicas except `replicas`: the other replicas are gone."""
        self._sent = {replica: sent for replica, sent in self._sent.items() if replica in replicas}

    def _tokens(self, prompt: Prompt) -> float:
        return self._usual() if prompt.tokens is None else prompt.tokens

    def _usual(self) -> float:
        return median(self._recent) if self._recent else ANSWER

    def _waiting(self, replica: Replica, now: float) -> float:
        sent = self._sent.get(replica.name, [])
        while sent and now - sent[0].at > WAITING_S:
            del sent[0]
        others = max(0, replica.requests - len(sent))  # requests from other routers
        return sum(each.cost for each in sent) + others * self._usual()

    def _own(self, prompt: Prompt, found: Found | None, now: float) -> dict[Hashable, float]:
        """Return the number of the prompt's tokens in the replicas' own caches, by replica."""
        own: dict[Hashable, float] = {}
        if prompt.session and (last := self._remembered(prompt.session, now)):
            stored = min(last.tokens, found.tokens if found else self._tokens(prompt))
            own[last.replica] = max(1.0, stored)  # among equal replicas, the session's replica comes first
        for count in range(len(prompt.keys), 0, -1):
            if prompt.keys[count - 1] in self._last and (last := self._remembered(prompt.keys[count - 1], now)):
                tokens = self._tokens(prompt) * count / len(prompt.keys)
                own[last.replica] = max(own.get(last.replica, 0.0), tokens)
                break
        return own

    def _remembered(self, name: str | bytes, now: float) -> Last | None:
        last = self._last.get(name)
        return last if last and now - last.at < REMEMBERED_S else None


def _saved(found: Found | None, replica: Replica, own: dict[Hashable, float]) -> float:
    """Return the number of a prompt's tokens that a replica need not compute."""
    cached = own.get(replica.name, 0.0)
    here = found.by_node.get(replica.node, 0.0) if found else 0.0
    return cached + (1 - LOAD) * max(0.0, here - cached)


def _home(session: str, replicas: Sequence[Replica]) -> Hashable:
    """Return the name of the replica that all routers choose for a new session, by rendezvous hashing."""

    def weight(replica: Replica) -> bytes:
        return blake2b(f"{replica.name} {session}".encode(errors="surrogatepass"), digest_size=8).digest()

    return max(replicas, key=weight).name
