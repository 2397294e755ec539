"""Request traces in Mooncake's format: each line is an object with an id for each block of a prompt."""

import json
from collections.abc import Iterator
from os import PathLike
from typing import NamedTuple

BLOCK_TOKENS = 512  # tokens of a block in this format


class Line(NamedTuple):
    """A request: ids of its prompt's blocks, its number of tokens, and the numbers that the caller named."""

    ids: list[int]
    tokens: int
    others: list[float]


def lines(path: str | PathLike[str], *others: str) -> Iterator[Line]:
    """The requests of a trace. others: names of more numbers. Raises ValueError that names a malformed line."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                given = json.loads(line)
                found = [float(given[name]) for name in others]
                ids, length = [int(i) for i in given["hash_ids"]], int(given["input_length"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a request of a Mooncake trace ({error!r})") from None
            if len(ids) != -(-length // BLOCK_TOKENS):
                raise ValueError(
                    f"{path}, line {number}: {len(ids)} hash_ids for input_length {length}: "
                    f"one per {BLOCK_TOKENS} tokens would be {-(-length // BLOCK_TOKENS)}"
                )
            yield Line(ids, length, found)
