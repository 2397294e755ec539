"""What a listener serves first."""

import threading

from raykv.system import wire
from raykv.system.listener import BULK_BYTES, Connection, Listener


def test_short_frames_are_served_before_long_ones_which_take_turns() -> None:
    served: list[int] = []
    all_sent, done = threading.Event(), threading.Event()

    def serve(connection: Connection, body: bytes) -> bytes:
        all_sent.wait(10)
        served.append(len(body))
        if len(served) == 7:
            done.set()
        return wire.frame(b"ok")

    listener = Listener("127.0.0.1", "test-listen", 1 << 20, serve)
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
