"""Request traces in three public formats. A prompt is a list of ids of its blocks. Equal ids mean equal prefixes.

- Mooncake's (github.com/kvcache-ai/Mooncake, FAST'25): one request per line, blocks of 512 tokens, `timestamp` in ms.
  A line may have `session`, `turn` and `last` (whether it is the session's last request).
- Alibaba Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): one request per line, blocks of 16 tokens,
  `timestamp` in s. `parent_chat_id` is the `chat_id` of the previous turn, or -1 for a first turn.
- AgentX's (semianalysisai/cc-traces at Hugging Face): one session per line, with `requests`. The requests of a
  sub-agent are nested. Blocks have 64 tokens. Each session has its own ids, unless its `hash_id_scope` is `global`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple

MOONCAKE_TOKENS, BAILIAN_TOKENS, AGENTX_TOKENS = 512, 16, 64  # tokens of a block
SESSION_IDS = 1 << 32  # size of a session's own range of ids, if each session of a trace counts its ids from 0


class Request(NamedTuple):
    """A prompt. ids: ids of its blocks. tokens: number of its tokens; the last block may be shorter than the others.

    at: time in seconds. output: number of tokens of the answer. session: None if not in the trace. last:
    whether the trace shows that this is the session's last request.
    """

    ids: list[int]
    tokens: int
    at: float = 0.0
    output: int = 0
    session: int | None = None
    last: bool = False


class Trace(NamedTuple):
    """Requests in the order of their times, and the number of tokens of a block."""

    requests: list[Request]
    block_tokens: int


def read(path: str | PathLike[str]) -> Trace:
    """Read a trace in any of the formats.

    Raises ValueError for a trace without requests, and for a malformed line. The error names the line's number.
    """
    requests, sizes, parents = list[Request](), set[int](), dict[int, int]()
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                given = json.loads(line)
                size, found = _parsed(given, number, parents)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a request of a trace ({error!r})") from None
            sizes.add(size)
            for request in found:
                if len(request.ids) != -(-request.tokens // size):
                    raise ValueError(
                        f"{path}, line {number}: {len(request.ids)} hash_ids for a prompt of {request.tokens} tokens: "
                        f"one per {size} tokens would be {-(-request.tokens // size)}"
                    )
            requests += found
    if len(sizes) != 1:
        raise ValueError(f"{path}: a trace has requests of one format, and this file has {len(sizes)}")
    return Trace(sorted(requests, key=lambda request: request.at), sizes.pop())


def _parsed(given: Mapping[str, Any], number: int, parents: dict[int, int]) -> tuple[int, list[Request]]:
    """Parse a line. Returns (tokens of a block, requests). parents: receives the session of each Bailian turn."""
    if "requests" in given:
        return int(given.get("block_size", AGENTX_TOKENS)), list(_of_session(given, number))
    if "chat_id" in given:
        chat, parent = int(given["chat_id"]), int(given["parent_chat_id"])
        parents[chat] = parents.get(parent, chat)
        return BAILIAN_TOKENS, [_flat(given, float(given["timestamp"]), parents[chat])]
    session = int(given["session"]) if "session" in given else None
    return MOONCAKE_TOKENS, [_flat(given, float(given.get("timestamp", 0)) / 1e3, session)]


def _flat(given: Mapping[str, Any], at: float, session: int | None) -> Request:
    ids = [int(block) for block in given["hash_ids"]]
    output, last = int(given.get("output_length", 0)), bool(given.get("last", False))
    return Request(ids, int(given["input_length"]), at, output, session, last)


def _of_session(given: Mapping[str, Any], session: int) -> Iterator[Request]:
    scope = 0 if given.get("hash_id_scope", "local") == "global" else session * SESSION_IDS
    found = sorted(_nested(given["requests"]), key=lambda one: float(one["t"]))
    for one in found:
        ids = [scope + int(block) for block in one["hash_ids"]]
        yield Request(ids, int(one["in"]), float(one["t"]), int(one["out"]), session, one is found[-1])


def _nested(requests: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the requests of a session and of its sub-agents. All times use the session's clock."""
    for request in requests:
        if request.get("type") == "subagent":
            yield from _nested(request["requests"])
        else:
            yield request
