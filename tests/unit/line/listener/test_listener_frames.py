"""A listener takes frames in any pieces, and serves short frames first, whatever a peer does with its answers."""

import socket
import threading

import pytest
from helpers.line.echo_server import expected, question, serving
from helpers.line.listeners import LONGEST, both
from helpers.line.peers import RESET, answer_to, asked, closed, friend, receive_frame, stranger
from helpers.pools import eventually

from raykv.line import wire
from raykv.line.listener import BULK_BYTES, Connection, Listener
from raykv.line.wire import frame
from raykv.protocol.calls import CLIENT


@both
def test_a_frame_may_come_byte_by_byte(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        shown = answer_to(peer, listener.address.token)
        for byte in shown + frame(question(1, 10)) + frame(question(2)):
            peer.sendall(bytes([byte]))
        wire.receive(peer, wire.PROOF_BYTES)
        assert [receive_frame(peer), receive_frame(peer)] == [expected(1, 10), expected(2)]


@both
def test_frames_may_come_together_and_with_the_proof(listener: Listener) -> None:
    with stranger(listener.address) as peer:
        shown, last = answer_to(peer, listener.address.token), frame(question(99))
        peer.sendall(shown + b"".join(frame(question(i, i)) for i in range(99)) + frame(b"") + last[:5])
        wire.receive(peer, wire.PROOF_BYTES)
        assert [receive_frame(peer) for _ in range(99)] == [expected(i, i) for i in range(99)]
        assert receive_frame(peer) == b""
        peer.sendall(last[5:])
        assert receive_frame(peer) == expected(99)


def test_a_frame_longer_than_allowed_ends_the_connection(listener: Listener) -> None:
    with friend(listener.address) as peer, friend(listener.address) as other:
        peer.sendall(frame(bytes(LONGEST)))
        assert len(receive_frame(peer)) == 8
        peer.sendall(wire.LENGTH.pack(LONGEST + 1))
        assert closed(peer)
        assert asked(other)


@both
def test_a_peer_that_never_reads_its_answers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one of its answers waits, and no further question is read."""
    monkeypatch.setattr(wire, "GONE_S", 0.5)
    size = 1 << 20
    with serving() as listener, friend(listener.address) as peer, friend(listener.address) as other:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # so the peer's side does not give up
        assert asked(other)
        with pytest.raises(ConnectionError):
            for number in range(1_000_000):
                peer.sendall(frame(question(number, size) + bytes(10_000)))
                waiting = [len(connection.outbox) for connection in list(listener.served)]
                assert max(waiting, default=0) <= size + 100
                assert number % 10 or asked(other)
        eventually(lambda: len(listener.served) == 1)
        assert asked(other)


@both
@pytest.mark.parametrize("sent", ["nothing", "half a proof", "the proof", "half a frame", "more than is answered"])
def test_a_peer_that_resets_hinders_nobody(listener: Listener, sent: str) -> None:
    with friend(listener.address) as other:
        for _ in range(20):
            with stranger(listener.address) as peer:
                shown = answer_to(peer, listener.address.token)
                if sent == "half a proof":
                    peer.sendall(shown[:-16])
                elif sent == "the proof":
                    peer.sendall(shown)
                elif sent == "half a frame":
                    peer.sendall(shown + frame(question(1))[:9])
                elif sent == "more than is answered":
                    peer.sendall(shown + 300 * frame(question(1, 20_000)))
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            assert asked(other)


@both
def test_what_a_peer_said_before_it_left_is_served() -> None:
    served: list[bytes] = []
    first, go, done = threading.Event(), threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        first.set()
        go.wait(10)
        served.append(body)
        if len(served) == 8:
            done.set()
        return frame(b"an answer that nobody reads")

    listener = Listener("127.0.0.1", "test-listen", {CLIENT: 1 << 20}, serve)
    peer = wire.connect(listener.address)
    peer.sendall(b"".join(frame(b"%d" % i) for i in range(8)))
    assert first.wait(10)
    peer.close()
    go.set()
    assert done.wait(10), f"{len(served)} of 8"
    assert served == [b"%d" % i for i in range(8)]
    listener.close()


def test_short_frames_are_served_before_long_ones_which_take_turns() -> None:
    served: list[int] = []
    all_sent, done = threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        all_sent.wait(10)
        served.append(len(body))
        if len(served) == 7:
            done.set()
        return wire.frame(b"ok")

    listener = Listener("127.0.0.1", "test-listen", {CLIENT: 1 << 20}, serve)
    first, *peers = [wire.connect(listener.address) for _ in range(4)]
    first.sendall(wire.frame(b"the one that all others wait for"))
    long = bytes(BULK_BYTES)
    for peer in peers:
        peer.sendall(wire.frame(long) + wire.frame(b"short"))
    all_sent.set()
    assert done.wait(10)
    assert served[0] == 32 and sorted(served[1:]) == [5] * 3 + [len(long)] * 3
    for peer in (first, *peers):
        assert wire.receive(peer, 6) == wire.frame(b"ok")
        peer.close()
    listener.close()
