"""Sockets where Ray uses TLS: whom they let in, and what is said where they can't be."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from helpers import certificates
from helpers.certificates import HOST
from helpers.echo_server import PATIENCE_S, expected, question, serving

from raykv.system import tls, wire
from raykv.system.listener import Listener
from raykv.system.wire import Address, frame
from raykv.transports import nccl_pair, nixl

ELSEWHERE = "192.0.2.7"


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[trustme.CA]:
    """That signed Ray's certificates, of which this process has one."""
    authority = trustme.CA()
    with certificates.used(tmp_path / "ours", authority=authority):
        yield authority


@pytest.fixture
def listener(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)  # a machine may be busy
    with serving() as listener:
        yield listener


def answered(address: Address, number: int = 7, size: int = 100_000) -> bool:
    """Whether this process gets the right answer."""
    with wire.connect(address) as peer:
        peer.sendall(frame(question(number, size)))
        (length,) = wire.LENGTH.unpack(wire.receive(peer, wire.LENGTH.size))
        return wire.receive(peer, length) == expected(number, size)


@contextmanager
def stranger(address: Address, authority: trustme.CA, certified: trustme.LeafCert | None) -> Iterator[ssl.SSLSocket]:
    """Who trusts an authority, and shows a certificate, if there is one."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certified:
        certified.configure_cert(context)
    with (
        socket.create_connection(address[:2], PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as peer,
    ):
        yield peer


def test_a_connection_is_encrypted(listener: Listener) -> None:
    with wire.connect(listener.address) as peer:
        assert isinstance(peer, ssl.SSLSocket) and peer.version() == "TLSv1.3"
    assert answered(listener.address)


@pytest.mark.parametrize("shown", ["no certificate", "one of another authority"])
def test_who_shows_no_certificate_of_rays_authority_is_not_let_in(
    shown: str, listener: Listener, authority: trustme.CA
) -> None:
    certified = trustme.CA().issue_cert(HOST) if shown.startswith("one") else None
    with stranger(listener.address, authority, certified) as peer, pytest.raises((OSError, EOFError)):
        if not peer.recv(1):  # in TLS 1.3 a client learns at its first read
            raise EOFError
    with stranger(listener.address, authority, authority.issue_cert(HOST)) as peer:
        assert len(peer.recv(wire.CHALLENGE_BYTES)) == wire.CHALLENGE_BYTES, "who has one is asked for the token"
    assert answered(listener.address)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\x16\x03\x01\x02\x00\x01", os.urandom(5000)])
def test_who_does_not_speak_tls_hinders_nobody(said: bytes, listener: Listener) -> None:
    with socket.create_connection(listener.address[:2], PATIENCE_S) as peer:
        peer.sendall(said)
        assert answered(listener.address)
        assert not listener.served or all(connection.socket.fileno() >= 0 for connection in listener.served)


def test_who_begins_and_says_no_more_is_closed_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.2)
    with socket.create_connection(listener.address[:2], PATIENCE_S) as peer:
        assert peer.recv(1) == b"", "nothing was said in clear"
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)
    assert answered(listener.address)


@pytest.mark.parametrize("differs", ["authority", "host"])
def test_a_listener_with_another_certificate_is_asked_for_nothing(
    differs: str, authority: trustme.CA, tmp_path: Path
) -> None:
    """Also one that knows the token."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    signer, host = (trustme.CA(), HOST) if differs == "authority" else (authority, ELSEWHERE)
    signer.issue_cert(host).configure_cert(context)
    with socket.create_server((HOST, 0)) as server:
        address = Address(HOST, server.getsockname()[1], bytes(wire.TOKEN_BYTES))

        def accept() -> bytes:
            with context.wrap_socket(server.accept()[0], server_side=True) as peer:
                return peer.recv(1)

        with ThreadPoolExecutor() as thread:
            accepted = thread.submit(accept)
            with pytest.raises(ConnectionError, match="certificate verify failed"):
                wire.connect(address)
            with pytest.raises(ssl.SSLError):
                accepted.result(PATIENCE_S)


def test_a_listener_is_not_opened_where_others_would_refuse_it(authority: trustme.CA) -> None:
    with pytest.raises(OSError, match=rf"no certificate for {ELSEWHERE}.*IP address mismatch.*= IP:{ELSEWHERE}\)"):
        tls.check(ELSEWHERE)
    tls.check(HOST)


def test_settings_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in tls.FILES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT not: set them"):
        Listener(HOST, "test-listen", {}, lambda connection, body: b"")


@pytest.mark.parametrize("missing", tls.FILES)
def test_a_file_that_can_not_be_read_is_named(
    missing: str, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(missing, "/nowhere/tls.pem")
    tls.context.cache_clear()
    with pytest.raises(OSError, match=f"{missing} /nowhere/tls.pem"):
        tls.check(HOST)
    with pytest.raises(OSError, match=f"{missing} /nowhere/tls.pem"), socket.create_server((HOST, 0)) as server:
        wire.connect(Address(HOST, server.getsockname()[1], b""))


@pytest.mark.parametrize("why_not", [nixl.why_not, nccl_pair.why_not])
def test_what_does_not_encrypt_is_not_used(why_not: object, authority: trustme.CA) -> None:
    assert callable(why_not) and "RAY_USE_TLS is set" in why_not()
