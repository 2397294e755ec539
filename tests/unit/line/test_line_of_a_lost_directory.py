"""If a directory's socket refuses, a line looks for its successor, or calls through Ray if there is none."""

import pytest
from helpers.line.echo_server import serving

from raykv.cluster.internal_kv import InCharge
from raykv.line import directory_line
from raykv.line.directory_line import DirectoryLine
from raykv.protocol.location import Address


@pytest.fixture
def in_charge(monkeypatch: pytest.MonkeyPatch) -> list[InCharge]:
    """The directories that Ray's internal KV has named as in charge. The last one counts."""
    told: list[InCharge] = []
    monkeypatch.setattr("raykv.cluster.internal_kv.in_charge", lambda pool: told[-1])
    monkeypatch.setattr("raykv.cluster.named_actors.find", lambda name: name)
    return told


def lost(line: DirectoryLine, in_charge: list[InCharge]) -> Address:
    """Connect to a directory, and end the directory. Returns its address."""
    with serving() as listener:
        in_charge.append(InCharge("first", listener.address))
        assert line.find() and line.way == "socket"
    line.close()
    return listener.address


def test_a_directory_whose_process_ended_is_not_asked_through_ray(
    in_charge: list[InCharge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_line, "SUCCESSION_S", 1000.0)
    line = DirectoryLine("p")
    lost(line, in_charge)
    assert not line.find() and not line.find()
    with serving() as successor:
        in_charge.append(InCharge("second", successor.address))
        assert line.find() and line.way == "socket" and line.actor == "second"
        line.close()


def test_it_is_asked_through_ray_if_nobody_takes_over(
    in_charge: list[InCharge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_line, "SUCCESSION_S", 0.0)
    line = DirectoryLine("p")
    lost(line, in_charge)
    assert line.find() and line.way == "ray"


def test_one_that_was_never_reached_is_asked_through_ray_at_once(in_charge: list[InCharge]) -> None:
    lost(DirectoryLine("p"), in_charge)
    other = DirectoryLine("p")
    assert other.find() and other.way == "ray"
