"""What tests of arenas share. Each file has an `arena` of the size that it needs."""

import os
from collections.abc import Iterator

import pytest
from helpers.arena.worker import Child

from raykv.arena.arena import Arena


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/raykv-test-{os.getpid()}"
    yield path
    if os.path.exists(path):
        os.unlink(path)


@pytest.fixture
def client(arena: Arena) -> Iterator[Arena]:
    client = Arena.attach(arena.path, arena.nonce)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    yield
    while Child.all:
        Child.all.pop().end()  # a stopped one would keep pytest from ending
