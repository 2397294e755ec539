"""Long batches are handled in pieces, so that what is held of them at a time is bounded."""

from collections.abc import Iterator, Sequence


def pieces(bodies: Sequence[memoryview], most: int) -> Iterator[slice]:
    """Stretches of the sequence, each of one body or of more that make at most so many bytes."""
    start = held = 0
    for at, body in enumerate(bodies):
        if at > start and held + body.nbytes > most:
            yield slice(start, at)
            start, held = at, 0
        held += body.nbytes
    if start < len(bodies):
        yield slice(start, len(bodies))
