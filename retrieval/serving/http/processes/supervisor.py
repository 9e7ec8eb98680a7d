"""The process that starts those of a server, starts again what ends, passes signals on, and answers nothing itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from retrieval.errors import StoreError
from retrieval.host.scratch import scratch_folder
from retrieval.serving.http.access.source import VARIABLE
from retrieval.serving.http.listening import listen
from retrieval.serving.http.log import Log
from retrieval.serving.http.processes.group import BEAT, FIGURES, WRITER, Setup, door_of, line
from retrieval.serving.http.settings import MOST_PROCESSES, Settings
from retrieval.serving.providers import Device

log = logging.getLogger("retrieval.serving.http")

_LAST = 0.3  # seconds of the grace that are left when those who have not ended are killed
_STEADY = 10.0  # seconds after which a process that ends counts as one that ran well
_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before one that did not is started again
_SILENT = 20 * BEAT  # seconds without a word after which a process does not count as one that runs
_LONGEST = 103  # bytes of a Unix socket's path, on the systems that allow least
_SUPERVISOR = 0  # its number in the log


class _Killed(StoreError):
    """A process was killed before it served: nothing says that it cannot."""


@dataclass(eq=False)
class _Child:
    """A process that was started."""

    number: int
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    began: float = field(default_factory=time.monotonic)
    heard: float = 0.0
    ready: bool = False
    reason: str | None = None
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether it runs and says so."""
        return self.process.returncode is None and time.monotonic() - self.heard < _SILENT

    def tell(self, said: dict[str, Any]) -> None:
        """Tell it something that it has not been told last."""
        if said != self.told:
            self.told = said
            self.writer.write(line(said))

    def kill(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Keeps the processes of a server.

    Args:
        setup: what each is told, but for its number.
        lock: of the group's folder, which each process holds as well; None where there is none.
        listeners: sockets that all take connections of.
        doors: a socket for each, by which the others reach it; it outlives the process.
        announce: is told how many items there are when the first process serves.
    """

    def __init__(
        self,
        setup: Setup,
        lock: int | None,
        listeners: Sequence[socket.socket],
        doors: Sequence[socket.socket],
        announce: Callable[[int], object],
    ) -> None:
        self._setup, self._announce = setup, announce
        self._held = () if lock is None else (lock,)
        self._listeners, self._doors = listeners, doors
        self._children: dict[int, _Child] = {}
        self._ending = asyncio.Event()
        self._ended = 0.0

    async def run(self) -> None:
        """Serve until a signal.

        Raises:
            StoreError: a process cannot be started, with its own sentence.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end, number)
        if _reads_again(self._setup.settings):
            loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        work = asyncio.create_task(self._work())
        work.add_done_callback(lambda done: self._end())
        await self._ending.wait()
        work.cancel()
        faults = await asyncio.gather(work, return_exceptions=True)
        await self._finish()
        for fault in faults:
            if isinstance(fault, Exception):
                raise fault

    def _told_to_end(self, number: signal.Signals) -> None:
        if self._ending.is_set() and number == signal.SIGINT:
            self._pass_on(signal.SIGINT)  # twice is at once
        self._end()

    def _end(self) -> None:
        if not self._ending.is_set():
            self._ended = time.monotonic()
            self._ending.set()

    def _pass_on(self, number: signal.Signals) -> None:
        for child in self._children.values():
            if child.heard:  # before that it would die of it
                child.kill(number)

    async def _work(self) -> None:
        """Start all, and keep them running.

        Raises:
            StoreError: one cannot be started.
        """
        self._announce(await self._begin(WRITER))
        tasks = [asyncio.create_task(self._keep(number)) for number in range(1, self._setup.of + 1)]
        tasks.append(asyncio.create_task(self._tell()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep(self, number: int) -> None:
        """Start a process again whenever it ends.

        Raises:
            StoreError: it cannot be started for the first time; or again, and no other runs.
        """
        short = 0
        if number != WRITER:
            try:
                await self._begin(number)
            except _Killed as fault:
                log.error("%s It is started again.", fault)
                short = await self._again(number, 1)
        while True:
            child = self._children[number]
            while said := await _heard(child):
                child.heard, child.ready, child.reason = time.monotonic(), said["ready"], said["reason"]
            child.ready, code = False, await child.process.wait()
            short = 0 if time.monotonic() - child.began > _STEADY else short + 1
            log.warning(
                "Process %d (%d) ended: %s. It is started again.", number, child.process.pid, _how(code)
            )
            short = await self._again(number, short)

    async def _again(self, number: int, short: int) -> int:
        """Start a process again, less and less often; return how often it ended soon."""
        while True:
            await asyncio.sleep(_PAUSES[min(short, len(_PAUSES) - 1)])
            try:
                await self._begin(number)
                return short
            except StoreError as fault:
                if not any(child.live for child in self._children.values()):
                    raise
                short += 1
                log.error("Process %d cannot be started again now: %s", number, fault)

    async def _tell(self) -> None:
        """Tell each process how the others are, whenever that changes."""
        while True:
            live = [child for child in self._children.values() if child.live and child.heard]
            ready = sum(child.ready for child in live)
            for one in live:
                wrong = [
                    f"Process {child.number}: {child.reason}"
                    for child in live
                    if child.reason and child is not one
                ]
                one.tell({"live": len(live), "ready": ready, "reason": wrong[0] if wrong else None})
            await asyncio.sleep(BEAT)

    async def _finish(self) -> None:
        """Have all end in good order, the one that writes last; kill those that have not in time."""
        for listener in self._listeners:
            listener.close()
        end = self._ended + self._setup.settings.grace - _LAST
        for child in self._children.values():
            child.kill(signal.SIGTERM)
        others = [child for child in self._children.values() if child.number != WRITER]
        await _gone(others, end)
        if (writer := self._children.get(WRITER)) is not None:
            writer.tell({"alone": True})
            await _gone([writer], end)
        for child in self._children.values():
            child.kill(signal.SIGKILL)
        await _gone(list(self._children.values()), time.monotonic() + _LAST)

    async def _begin(self, number: int) -> int:
        """Start a process; return the number of its items when it serves.

        Raises:
            StoreError: it cannot.
        """
        ours, theirs = socket.socketpair()
        passed = (theirs.fileno(), self._doors[number - 1].fileno(), *self._setup.listeners)
        setup = replace(self._setup, number=number, door=passed[1])
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "retrieval.serving.http.processes.child",
                    str(passed[0]),
                    str(number),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(*passed, *self._held),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # Ctrl-C is for the supervisor, which ends it
            )
        child = self._children[number] = _Child(number, process, *await asyncio.open_connection(sock=ours))
        child.writer.write(TypeAdapter(Setup).dump_json(setup) + b"\n")
        said = await _heard(child)
        if "up" in said:
            child.heard = child.began = time.monotonic()
            return int(said["up"])
        code = await process.wait()
        raise (StoreError if code >= 0 else _Killed)(
            said.get("fault")
            or f"Process {number} of the server ended before it served ({_how(code)}). What it wrote may say why."
        )


async def _heard(child: _Child) -> dict[str, Any]:
    """Return what a process says next; nothing when it has ended."""
    try:
        text = await child.reader.readline()
        return dict(json.loads(text)) if text.endswith(b"\n") else {}
    except (OSError, ValueError):
        return {}


async def _gone(children: Sequence[_Child], end: float) -> None:
    """Wait until processes have ended, or a time by `time.monotonic`."""
    waits = [asyncio.create_task(child.process.wait()) for child in children]
    if waits:
        await asyncio.wait(waits, timeout=max(0.0, end - time.monotonic()))
    for wait in waits:
        wait.cancel()


def _how(code: int) -> str:
    """Return how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _reads_again(settings: Settings) -> bool:
    """Whether SIGHUP has processes read something again; else it ends them all, as it ends any program."""
    files = (settings.keys, settings.certificate, settings.audit)
    return any(each is not None for each in files) or VARIABLE in os.environ


def supervise(
    indexes: dict[str, str],
    host: str,
    port: int,
    settings: Settings,
    plugins: Sequence[str],
    device: Device,
    announce: Callable[[Settings, list[socket.socket], int], object],
) -> None:
    """Serve by several processes until SIGINT or SIGTERM; requests under way are finished first.

    Args:
        indexes: by name: a folder or an address.
        host: the address to listen on.
        port: 0 takes a free one.
        settings: limits, of all processes together.
        plugins: files or modules of a third-party back end or store.
        device: of the encoder.
        announce: is told settings, listening sockets and the number of items when the first process serves.

    Raises:
        StoreError: there cannot be as many, the address cannot be listened on, or a process cannot be started, with its own sentence.
    """
    if settings.processes > MOST_PROCESSES:
        raise StoreError(f"A server has at most {MOST_PROCESSES} processes, not {settings.processes:,}.")
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        raise StoreError(
            "Several processes need Linux or macOS, and a program's main thread: start them with `retrieval serve --processes N`."
        )
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(host, port, "--port"))]
        if settings.health_port is not None:
            listeners.append(stack.enter_context(listen(host, settings.health_port, "--health-port")))
            settings = replace(settings, health_port=listeners[1].getsockname()[1])
        folder, lock = stack.enter_context(scratch_folder(Path(tempfile.gettempdir()), "retrieval-"))
        (folder / FIGURES).mkdir()
        doors = [stack.enter_context(_door(folder, number)) for number in range(1, settings.processes + 1)]
        lines = Log(settings.log_format or "text", settings.debug, settings.log_lines, process=_SUPERVISOR)
        stack.callback(lines.close)
        setup = Setup(
            WRITER,
            settings.processes,
            folder,
            host,
            indexes,
            settings,
            tuple(plugins),
            device,
            tuple(each.fileno() for each in listeners),
            -1,
        )
        asyncio.run(Supervisor(setup, lock, listeners, doors, partial(announce, settings, listeners)).run())


def _door(folder: Path, number: int) -> socket.socket:
    """Return a socket by which a process is reached by the others; it listens.

    Raises:
        StoreError: the folder's path is too long for one.
    """
    path = door_of(folder, number)
    if len(os.fsencode(path)) > _LONGEST:
        raise StoreError(
            f"{folder} has too long a path for a socket in it. Name a shorter folder for temporary files: TMPDIR=/tmp."
        )
    made = socket.socket(socket.AF_UNIX)
    made.bind(os.fspath(path))
    made.listen(256)
    return made
