"""A process among those of one server: what it is told when it starts, what it knows of the others, how it hears of the end."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrieval.serving.http.settings import Settings
from retrieval.serving.providers import Device

WRITER = 1
"""The number of the process that writes."""
FIGURES = "figures"
"""The folder of the figures that are counted, below the group's own."""
BEAT = 0.5
"""Seconds after which a process says again how it is."""


@dataclass(frozen=True)
class Setup:
    """What a process is told when it starts.

    Attributes:
        number: its own, from 1.
        of: how many there are to be.
        folder: of the group, which nobody else may look into.
        host: that is listened on, for the names of the server.
        indexes: by name: a folder or an address.
        settings: of the whole server, of which it takes its share.
        plugins: files or modules of a third-party back end or store.
        device: of the encoder.
        listeners: descriptors of the sockets that all processes take connections of.
        door: descriptor of the socket by which the others reach it.
    """

    number: int
    of: int
    folder: Path
    host: str
    indexes: dict[str, str]
    settings: Settings
    plugins: tuple[str, ...]
    device: Device
    listeners: tuple[int, ...]
    door: int


def share(settings: Settings) -> Settings:
    """Return the limits of one of the processes: its part of what the server takes, rounded up.

    Limits by key or address stay whole here: a key may have its own, and `Access` divides both. The processes' bodies may together take
    more than the server's where a part would not hold one request.
    """
    of = settings.processes
    return replace(
        settings,
        workers=math.ceil(settings.workers / of),
        connections=max(8, math.ceil(settings.connections / of)),
        connections_per_address=math.ceil(settings.connections_per_address / of),
        body_memory=max(
            math.ceil(settings.body_memory / of),
            min(settings.body_memory, 2 * max(settings.batch_bytes, settings.max_bytes)),
        ),
        log_lines=math.ceil(settings.log_lines / of),
    )


def door_of(folder: Path, number: int) -> Path:
    """Return the address of the socket by which the others reach a process."""
    return folder / f"{number}.socket"


class Member:
    """This process among those of its server.

    Args:
        setup: what it was told.
        control: its end of the connection with the supervisor, which closes when either ends.

    Attributes:
        number: its own.
        of: how many there are to be.
        folder: of the group.
        door: a socket that listens, for the others.
        live: how many of them run.
        ready: how many of these are ready.
        reason: why one of the others is not ready, though it runs; None where all are.
        alone: set when all others have ended, and when the supervisor has.
        orphaned: whether the supervisor has ended.
    """

    def __init__(self, setup: Setup, control: socket.socket) -> None:
        self.number, self.of, self.folder = setup.number, setup.of, setup.folder
        self.door = socket.socket(fileno=setup.door)
        self.live, self.ready = 1, 0
        self.reason: str | None = None
        self.alone = asyncio.Event()
        self.orphaned = False
        self._control = control

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes."""
        return self.number == WRITER

    async def attend(
        self, items: int, state: Callable[[], dict[str, Any]], leave: Callable[[], None]
    ) -> None:
        """Say that this process serves, and then how it is, again and again; hear how the others are.

        Args:
            items: of its indexes.
            state: says whether it is ready, and why not.
            leave: called when the supervisor has ended: so should this process.
        """
        reader, writer = await asyncio.open_connection(sock=self._control)
        writer.write(line({"up": items}))
        beats = asyncio.create_task(_beat(writer, state))
        try:
            while heard := await reader.readline():
                self._hear(json.loads(heard))
        except ConnectionError:
            pass
        finally:
            beats.cancel()
        self.orphaned = True
        self.alone.set()
        leave()

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("alone"):
            self.alone.set()
            return
        self.live, self.ready, self.reason = said["live"], said["ready"], said["reason"]


async def _beat(writer: asyncio.StreamWriter, state: Callable[[], dict[str, Any]]) -> None:
    while True:
        writer.write(line(state()))
        await writer.drain()
        await asyncio.sleep(BEAT)


def line(said: dict[str, Any]) -> bytes:
    """Return what one end of a control connection says to the other."""
    return json.dumps(said).encode() + b"\n"
