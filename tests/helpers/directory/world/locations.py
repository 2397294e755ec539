"""Packs and splits locations and keys, which the directory's answers hold as joined bytes."""

from random import Random

from helpers.directory.oracle.slots import LOCATION, unpack
from raykv.directory.directory import Directory
from raykv.protocol.location import slot_bytes


def split(locations: bytes) -> list[bytes]:
    return [locations[i : i + LOCATION.size] for i in range(0, len(locations), LOCATION.size)]


def keys_of(keys: bytes) -> list[bytes]:
    return [keys[i : i + 16] for i in range(0, len(keys), 16)]


def garbled(rng: Random, location: bytes) -> bytes:
    fields = list(unpack(location)[0])
    i = rng.randrange(len(fields))
    fields[i] = rng.choice([fields[i] + 1, max(0, fields[i] - 1), 0]) if i else rng.randrange(9)
    return LOCATION.pack(*fields)


def slot_size(location: tuple[int, ...], directory: Directory | None = None) -> int:
    """Bytes of a location's slot. For a quarantined slot the directory's slab tells them, not the location."""
    if location[3] or directory is None:
        return slot_bytes(location[3])
    for node in directory.nodes.values():
        if node.index == location[0] and location[1] in node.slabs:
            return node.slab_bytes // directory.size_classes.span(node.slabs[location[1]])[1] // 4096 * 4096
    return 0
