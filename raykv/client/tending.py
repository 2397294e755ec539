"""A client's thread. The thread sends heartbeats and unsent reports, and finds a lost directory again."""

import logging
import threading
import time
import weakref

import ray

from raykv.client.directory_client import DirectoryClient
from raykv.config import CLIENT_TTL_S, HEARTBEAT_S
from raykv.line.directory_line import ERRORS
from raykv.line.wire import Stream
from raykv.metrics.exporter import EXPORT_S

log = logging.getLogger("raykv")
TEND_S = HEARTBEAT_S / 2  # interval between two rounds of a client's thread while the client is in use
HEARTBEAT_AFTER_S = CLIENT_TTL_S / 4  # time from a call to a heartbeat: a client silent for CLIENT_TTL_S counts as gone
RESTART_S = 0.05  # pause before a search for the directory: a restarting directory refuses connections for a moment


class Tending:
    """Runs a client's thread. The thread ends when the client is closed or garbage-collected."""

    def __init__(self, client: DirectoryClient) -> None:
        self._bell = bell = client.bell
        self._client = weakref.ref(client, lambda _: bell.ring())
        self._seen_call, self._exported = client.last_call, 0.0
        threading.Thread(target=self._run, name="raykv-directory", daemon=True).start()

    def _run(self) -> None:
        pause, connection = TEND_S, None
        while True:
            rung = self._bell.wait(pause, connection)
            client = self._client()
            if client is None:
                return
            if client.left:
                client.line.close()  # this thread may have connected after `close`
                return
            if rung and not client.up:
                time.sleep(RESTART_S)
            client.rests = False
            try:
                if ray.is_initialized() and not client.closed:
                    self._look(client)
            except Exception as error:  # a client that no longer probes would stay down for good
                client.fault("probe", repr(error))
            pause, connection = self._rest(client)
            try:
                self._export(client)
            except Exception as error:  # Ray is shutting down or can't export: the client's calls still work
                log.debug("pool %s: its metrics: %r", client.pool, error)
            del client

    def _look(self, client: DirectoryClient) -> None:
        """Find a lost directory again, or send a due heartbeat and the unsent reports."""
        client.look_on()
        client.release_dropped()
        if not client.up:
            self._find(client)
            return
        if not client.line.look():
            client.down("directory", "it closed the connection")
            return
        if client.held.news or time.monotonic() - client.last_call > HEARTBEAT_AFTER_S:
            client.probe()
        if client.requests.waits:
            self._report_requests(client)
        while client.to_forget and client.forget(client.to_forget[0]):
            client.to_forget.pop(0)

    def _find(self, client: DirectoryClient) -> None:
        """Find a lost directory again, or find another directory."""
        line = client.line
        if line.way == "socket" and line.look():
            client.up = client.probe()
        if not client.up:
            line.close()  # why the line failed does not matter: a new line is found next
            client.up = line.find() and not self._turned_away(client) and client.probe()
        if client.up:
            client.metrics.add("without_directory_seconds_total", time.monotonic() - client.down_since)

    def _turned_away(self, client: DirectoryClient) -> bool:
        """Whether the found directory belongs to another pool. Closes the line to such a directory."""
        if why := client.why_strange():
            client.line.close()
            client.fault("strange", why)
        return bool(why)

    def _report_requests(self, client: DirectoryClient) -> None:
        with client.lock:
            lines, left_out = client.requests.take()
        try:
            client.line.tell("report_requests", lines, left_out)
        except ERRORS as error:
            client.down("directory", f"lines of requests could not be sent: {error}")

    def _rest(self, client: DirectoryClient) -> tuple[float, Stream | None]:
        """Return (seconds that the thread may rest, the connection whose end must wake it)."""
        if client.closed or not client.up or not ray.is_initialized():
            return TEND_S, None
        with client.lock:
            called, self._seen_call = client.last_call != self._seen_call, client.last_call
            client.rests = not (called or client.held.news or client.requests.waits)
            due = client.last_call + HEARTBEAT_AFTER_S - time.monotonic()
        return max(0.0, due) if client.rests else TEND_S, client.line.connection

    def _export(self, client: DirectoryClient) -> None:
        """Send the counts to Ray, once per EXPORT_S and before the thread rests."""
        if not client.rests and time.monotonic() < self._exported + EXPORT_S:
            return
        for kind, count in dict(client.faults).items():
            client.metrics.total("faults_total", count, kind=kind)
        if client.metrics.waits and ray.is_initialized():
            self._exported = time.monotonic()
            client.metrics.flush()
