"""Sockets if Ray uses TLS: which peers they admit, and what is said if TLS is impossible."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import trustme
from helpers.line import certificates
from helpers.line.certificates import HOST
from helpers.line.echo_server import PATIENCE_S, expected, open_files, question, serving
from helpers.pools import eventually

from raykv.line import tls, wire
from raykv.line.listener import SHAKE_S, Listener
from raykv.line.wire import frame
from raykv.protocol.location import Address
from raykv.transports import nccl_pair, nixl

ELSEWHERE = "192.0.2.7"


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[trustme.CA]:
    """The authority of Ray's certificates. This process has such a certificate."""
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)  # a machine may be busy
    authority = trustme.CA()
    with certificates.used(tmp_path / "ours", authority=authority):
        yield authority


@pytest.fixture
def listener(authority: trustme.CA) -> Iterator[Listener]:
    with serving() as listener:
        yield listener


def answered(address: Address, number: int = 7, size: int = 100_000) -> bool:
    with wire.connect(address) as peer:
        peer.sendall(frame(question(number, size)))
        (length,) = wire.LENGTH.unpack(wire.receive(peer, wire.LENGTH.size))
        return wire.receive(peer, length) == expected(number, size)


@contextmanager
def stranger(address: Address, authority: trustme.CA, certified: trustme.LeafCert | None) -> Iterator[ssl.SSLSocket]:
    """A peer that trusts an authority, with a certificate or without."""
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
        assert isinstance(peer, tls.TlsSocket) and peer._tls.version() == "TLSv1.3"
    assert answered(listener.address)


@pytest.mark.parametrize("shown", ["no certificate", "one of another authority"])
def test_who_shows_no_certificate_of_rays_authority_is_not_let_in(
    shown: str, listener: Listener, authority: trustme.CA
) -> None:
    certified = trustme.CA().issue_cert(HOST) if shown.startswith("one") else None
    with stranger(listener.address, authority, certified) as peer, pytest.raises((OSError, EOFError)):
        if not peer.recv(1):  # in TLS 1.3 a client learns of a refusal at its first read
            raise EOFError
    with stranger(listener.address, authority, authority.issue_cert(HOST)) as peer:
        assert len(peer.recv(wire.CHALLENGE_BYTES)) == wire.CHALLENGE_BYTES, "who has one is asked for the token"
    assert answered(listener.address)


NONSENSE = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(200),
    "random": random.Random(1).randbytes(5000),
    "a version of old": b"\x15\x02\x00\x00\x02\x01\x00",
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_who_does_not_speak_tls_is_ended_and_hinders_nobody(
    said: bytes, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(listener.address[:2], PATIENCE_S) as peer:
        peer.sendall(said)
        assert answered(listener.address)
        with suppress(ConnectionError):
            while peer.recv(100):  # the alert that names the fault
                pass
    eventually(lambda: not listener.unproven)
    assert "Traceback" not in caplog.text and not [line for line in caplog.records if line.levelname == "ERROR"]


def test_who_resets_before_tls_is_agreed_on_hinders_nobody(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        with socket.create_connection(listener.address[:2], PATIENCE_S) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a close resets the connection
    assert answered(listener.address)
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


def test_between_two_rounds_of_answers_strangers_have_a_few_milliseconds(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a stranger's handshake takes a millisecond or more."""
    done: list[str] = []

    def noted(what: str, step: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            done.append(what)
            time.sleep(seconds)
            return step(*args)

        return call

    with ExitStack() as strangers:
        others = [strangers.enter_context(socket.create_connection(listener.address[:2])) for _ in range(20)]
        eventually(lambda: len(listener.unproven) == 20)
        monkeypatch.setattr(listener, "_round", noted("round", listener._round, 0.0))
        monkeypatch.setattr(listener, "_shake", noted("step", listener._shake, SHAKE_S))
        for other in others:
            other.sendall(b"\x16\x03\x01\x40\x00")
        eventually(lambda: done.count("step") == 20)
    assert max(len(list(steps)) for what, steps in groupby(done) if what == "step") == 1
    assert answered(listener.address)


class Pair:
    """Two sides of a connection that have agreed on TLS. other: the second side, for misuse."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.here, self.other = tls.TlsSocket(here), tls.TlsSocket(there, HOST)
        with ThreadPoolExecutor() as thread:
            agreed = thread.submit(self.other.agree, time.monotonic() + PATIENCE_S)
            while not self.here.shake():
                pass
            agreed.result(PATIENCE_S)
        self.here.settimeout(None)
        self.other.settimeout(None)

    def close(self) -> None:
        self.here.close()
        self.other.close()


@pytest.fixture
def pair(authority: trustme.CA) -> Iterator[Pair]:
    with closing(Pair()) as pair:
        yield pair


def test_what_comes_after_the_end_is_not_taken(pair: Pair) -> None:
    pair.other.sendall(b"last")
    with suppress(ssl.SSLError):
        pair.other._tls.unwrap()  # announces the end of TLS
    pair.other.plain.sendall(pair.other._outgoing.read() + bytes(100_000))
    assert pair.here.recv(100) == b"last"
    assert [pair.here.recv(100) for _ in range(3)] == [b""] * 3
    assert pair.here._incoming.pending < 200_000


@pytest.mark.parametrize("waits", [0.0, 0.1], ids=["does not wait", "waits a little"])
def test_a_part_of_a_record_is_waited_for_as_long_as_was_said(pair: Pair, waits: float) -> None:
    whole = bytes(10_000)
    pair.other._tls.write(whole)
    record = pair.other._outgoing.read()
    pair.here.settimeout(waits)
    for at in range(0, len(record) - 1, 1000):
        pair.other.plain.sendall(record[at : at + 1000][: len(record) - 1 - at])
        with pytest.raises(TimeoutError if waits else BlockingIOError):
            pair.here.recv(len(whole))
    pair.other.plain.sendall(record[-1:])
    assert pair.here.recv(len(whole)) == whole


def test_a_large_message_is_sent_as_the_peer_takes_it(pair: Pair) -> None:
    data = random.Random(2).randbytes(3_000_000)
    pair.here.setblocking(False)
    left, got = memoryview(data), bytearray()
    while len(got) < len(data):
        with suppress(BlockingIOError):
            left = left[pair.here.send(left) :] if left else left
        got += pair.other.recv(100_000)
    assert got == data


def test_nothing_is_received_into_nothing(pair: Pair) -> None:
    pair.other.sendall(b"more")
    assert pair.here.recv_into(bytearray()) == 0
    assert pair.here.recv(100) == b"more"


def test_who_says_too_much_before_tls_is_agreed_on_is_refused(authority: trustme.CA) -> None:
    here, there = socket.socketpair()
    with closing(tls.TlsSocket(here)) as side, there:
        there.sendall(b"\x16\x03\x01\x40\x00" + bytes(40_000))  # the first half of a hello
        with pytest.raises(ConnectionError, match="TLS"):
            for _ in range(100):
                assert not side.shake()


def test_a_peer_that_says_a_byte_now_and_then_is_waited_for_until_the_end(authority: trustme.CA) -> None:
    here, there = socket.socketpair()
    done = threading.Event()

    def trickle() -> None:
        for byte in b"\x16\x03\x03\x40\x00" + bytes(10_000):
            if done.wait(0.01):
                return
            there.sendall(bytes([byte]))

    with closing(tls.TlsSocket(here, HOST)) as side, there, ThreadPoolExecutor() as thread:
        trickling = thread.submit(trickle)
        with pytest.raises((TimeoutError, ConnectionError)):
            side.agree(time.monotonic() + 0.2)
        assert not trickling.done()
        done.set()


def test_four_hundred_who_connect_at_once_are_let_in(listener: Listener) -> None:
    with ThreadPoolExecutor(50) as threads, ExitStack() as stack:
        peers = list(threads.map(lambda _: wire.connect(listener.address), range(400)))
        for peer in peers:
            stack.enter_context(closing(peer))
        eventually(lambda: len(listener.served) == 400)


def test_a_listener_that_closes_keeps_nobody_who_has_begun(authority: trustme.CA) -> None:
    before = open_files()
    with serving() as listener, ExitStack() as strangers:
        for _ in range(50):
            peer = strangers.enter_context(socket.create_connection(listener.address[:2], PATIENCE_S))
            peer.sendall(b"\x16\x03\x01\x40\x00")
    assert open_files() <= before


def test_a_key_is_worn_by_what_it_has_protected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "WORN_BYTES", 3)
    for expected_worn in (False, True):
        pair.other.sendall(b"me")
        assert pair.here.recv(100) == b"me" and pair.here.worn == expected_worn


@pytest.mark.parametrize("host", ["", "a..b", ".x", "x" * 64])
def test_a_host_that_no_certificate_can_name(host: str, authority: trustme.CA) -> None:
    with pytest.raises(OSError, match="certificate"):
        tls.check(host)


def test_a_connection_that_somebody_closes_sends_nothing_in_clear(listener: Listener) -> None:
    peer = wire.connect(listener.address)
    assert isinstance(peer, tls.TlsSocket)
    peer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        peer.send(b"a secret")
    with pytest.raises(OSError, match="Bad file descriptor"):
        peer.recv(100)


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
    """This holds even if the listener knows the token."""
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
    with pytest.raises(OSError, match=rf"refuse .*IP address mismatch.*subjectAltName = IP:{ELSEWHERE}"):
        tls.check(ELSEWHERE)
    tls.check(HOST)


def test_an_authority_that_another_one_signed_will_do(tmp_path: Path, authority: trustme.CA) -> None:
    """Ray accepts it too, though its file has no root."""
    with certificates.used(tmp_path / "below", authority=authority.create_child_ca()):
        tls.check(HOST)


def test_what_is_wrong_with_a_certificate_is_said(tmp_path: Path, authority: trustme.CA) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with certificates.used(tmp_path / "ours", authority=authority), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TLS_CA_CERT", str(other))
        with pytest.raises(OSError, match=r"refuse .*unable to get local issuer certificate") as refused:
            tls.check(HOST)
    assert "subjectAltName" not in str(refused.value)


@pytest.mark.parametrize(("value", "used"), [("", False), ("0", False), ("no", False), ("1", True), ("True", True)])
def test_what_ray_takes_for_on(value: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", value)
    assert tls.used() == used


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
