"""A uvicorn server that ends when it said it would, with handshakes of its own, and what it reads again while it runs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvicorn

from retrieval.serving.http.access.audit import Audit
from retrieval.serving.http.access.gate import Access
from retrieval.serving.http.access.source import KeySource, key_source
from retrieval.serving.http.app import create_app
from retrieval.serving.http.log import Log
from retrieval.serving.http.monitoring import Monitoring
from retrieval.serving.http.processes.group import WRITER, Member, door_of
from retrieval.serving.http.processes.handing import Door, HandedOn
from retrieval.serving.http.protocol import Connections, Protocol, protocol_class
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.tls import Certificate, Handshakes
from retrieval.serving.http.traces import Traces

_MARGIN = 1.5  # seconds of the grace that are kept for what comes after the last answer
_HEALTH_CONNECTIONS = 64
_LOOK = 0.05  # seconds
_WARM = 20.0  # seconds


@dataclass(frozen=True)
class Admission:
    """What was read of whom a server lets in, and is read again on SIGHUP.

    Attributes:
        keys: None: there are none.
        certificate: None: no TLS.
        audit: where changes are recorded; None for nowhere.
    """

    keys: KeySource | None = None
    certificate: Certificate | None = None
    audit: Audit | None = None

    @classmethod
    def of(cls, settings: Settings) -> Admission:
        """Read what the settings name.

        Raises:
            RetrievalError: it cannot be used.
        """
        named = settings.certificate
        return cls(
            key_source(settings.keys),
            None if named is None else Certificate(named, settings.private_key),
            None if settings.audit is None else Audit(settings.audit),
        )

    def listen_to_hangups(self, *, always: bool = False) -> None:
        """Have SIGHUP read again what can be; for the event loop.

        Args:
            always: even if there is nothing; else it ends the process then, as it ends any program.
        """
        read_again = [each.again for each in (self.keys, self.certificate, self.audit) if each is not None]
        if (
            not (read_again or always)
            or os.name != "posix"
            or threading.current_thread() is not threading.main_thread()
        ):
            return

        def again() -> None:
            for read in read_again:
                read()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again)


class Running:
    """A uvicorn server, and the promise that it ends."""

    def __init__(
        self,
        searchers: Mapping[str, Searcher],
        settings: Settings,
        listeners: list[socket.socket],
        admission: Admission,
        log: Log,
        traces: Traces | None,
        member: Member | None = None,
    ) -> None:
        gate = Connections(settings.connections, settings.connections_per_address, settings.idle_seconds)
        self.gates: dict[int | None, Connections] = {None: gate}
        if settings.health_port is not None:
            self.gates[settings.health_port] = Connections(
                _HEALTH_CONNECTIONS, _HEALTH_CONNECTIONS, settings.idle_seconds
            )

        def exhausted() -> str | None:
            return "Every connection is taken by a request under way." if gate.exhausted else None

        named = {"main": gate}
        if settings.health_port is not None:
            named["health"] = self.gates[settings.health_port]
        self.monitoring = Monitoring(
            searchers, {"connections": exhausted}, named, log if settings.log_format else None, traces, member
        )
        hand_on = None
        if member is not None and not member.writes:
            hand_on = partial(HandedOn, door_of(member.folder, WRITER), settings.deadline)
        self.app = create_app(
            searchers, self.monitoring, Access(settings, admission.keys), admission.audit, hand_on
        )
        self.admission = admission
        self.member = member
        self.door = Door(self.app.routed, self.monitoring.looked, settings.debug)
        self.handshakes: Handshakes | None = None
        if admission.certificate is not None or member is not None:
            self.handshakes = Handshakes(admission.certificate, settings.connections, settings.idle_seconds)
        self.protocol = protocol_class(self.gates)
        self._grace = settings.grace
        self.items = sum(len(one.index) for one in searchers.values())
        self._listeners = listeners
        config = uvicorn.Config(
            self.app,
            http=self.protocol,
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=bool(settings.proxies),
            forwarded_allow_ips=list(settings.proxies),
            server_header=False,
            timeout_graceful_shutdown=max(1, int(settings.grace - 2 * _MARGIN)),
        )
        self._server = _Server(config, self)
        self._end: float | None = None

    def run(self) -> float:
        """Serve until a signal; return the time, by `time.monotonic()`, until which the rest must have ended."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn takes signals itself while it serves, and raises them again at its end, which must not count as a failure.
            # One that comes before it listens must end the server too.
            signal.signal(signal.SIGTERM, lambda number, frame: self._server.leave())
            signal.signal(signal.SIGINT, lambda number, frame: self._server.leave())
            # What is there stays: to look through it for garbage keeps the event loop from its clients for a tenth of a second.
            gc.collect()
            gc.freeze()
        self._server.run(sockets=self._listeners)
        return self._end or time.monotonic() + self._grace

    def stop(self) -> None:
        """Let the server end in good order, from another thread."""
        self._server.should_exit = True

    def left(self) -> float:
        """Return the seconds until it must have ended; some, if nobody has told it to."""
        return max(0.0, (self._end or time.monotonic() + self._grace) - time.monotonic())

    def stopping(self) -> None:
        """Note that the server was told to end: from now on, its time runs."""
        if self._end is not None:
            return
        self._end = time.monotonic() + self._grace - _MARGIN
        timer = threading.Timer(self._grace - _MARGIN / 2, leave_now)
        timer.daemon = True
        timer.start()
        if hasattr(signal, "setitimer"):  # the kernel's own, should something hold the interpreter
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._grace - _MARGIN / 3)


class _Server(uvicorn.Server):
    """What a running server does besides uvicorn's own."""

    def __init__(self, config: uvicorn.Config, running: Running) -> None:
        super().__init__(config)
        self._running = running
        self._attending: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and look after connections and keys meanwhile."""
        running = self._running
        tasks = [asyncio.create_task(gate.sweep()) for gate in running.gates.values()]
        if running.admission.keys is not None:
            tasks.append(asyncio.create_task(running.admission.keys.watch()))
        running.admission.listen_to_hangups(always=running.member is not None)
        try:
            await super().serve(sockets)
        finally:
            for task in (*tasks, self._attending):
                if task is not None:
                    task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections; those of TLS by way of their handshakes."""
        handshakes, member = self._running.handshakes, self._running.member
        await super().startup(sockets if handshakes is None else [])
        if member is not None:
            self._running.door.open(member.door)
            await self._warm()
        if handshakes is not None:
            for listener in sockets or ():
                handshakes.listen(listener, self._connection)
        if member is not None:
            attending = member.attend(self._running.items, self._running.monitoring.state, self.leave)
            self._attending = asyncio.create_task(attending)

    async def _warm(self) -> None:
        """Wait for the first search of the server's own, some time: while it loads libraries, connections are for the other processes."""
        end = time.monotonic() + _WARM
        while not (self._running.monitoring.begun or self.should_exit) and time.monotonic() < end:
            await asyncio.sleep(_LOOK)

    def leave(self) -> None:
        """End in good order: somebody said so who is not uvicorn."""
        self._running.stopping()
        self.should_exit = True

    def _connection(self) -> Protocol:
        return self._running.protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and finish what is under way."""
        if self._running.handshakes is not None:
            await self._running.handshakes.close()
        await asyncio.gather(super().shutdown(sockets), self._others_end())

    async def _others_end(self) -> None:
        """Answer what the other processes hand on until they have ended."""
        member = self._running.member
        if member is None:
            return
        while member.writes and not member.alone.is_set() and not self.force_exit and self._running.left():
            await asyncio.sleep(_LOOK)
        await self._running.door.close(time.monotonic() + self._running.left())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note that the server is told to end."""
        self._running.stopping()
        super().handle_exit(sig, frame)


def leave_now() -> None:
    """End the process, whatever its threads are at."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
