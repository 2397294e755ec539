"""An attempt to join a Ray cluster that does not exist fails at once."""

import socket

import pytest

import raykv


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:{closed}", "Connection refused"),
        ("[::1]:{closed}", "no Ray cluster answers there"),
        ("no-such-host.invalid:6379", "no Ray cluster answers there"),
        ("6379", "no Ray cluster answers there"),
        ("127.0.0.1:port", "no Ray cluster answers there"),
        ("ray://127.0.0.1:10001", "is for Ray Client.*run this on a node"),
    ],
)
def test_a_wrong_ray_address_is_named(address: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, but nobody listens
        given = address.format(closed=bound.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", given)
        with pytest.raises(raykv.PoolNotFound, match=rf"RAY_ADDRESS='.*{says}.*ray start --head.*unset it") as raised:
            raykv.attach()
        assert given in str(raised.value)
