"""Serve indexes until told to stop: sockets, one process or several, the end in time."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from retrieval.errors import BundleError, MissingDependency, RetrievalError, StoreError
from retrieval.host.cores import cores, default_threads
from retrieval.serving.files.places import StrPath
from retrieval.serving.http.listening import checked, default_name, listen
from retrieval.serving.http.settings import GRACE_SECONDS, Settings
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.memory import return_large_blocks
from retrieval.serving.probe import probe_fault
from retrieval.serving.providers import Device
from retrieval.serving.store.address import Address

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_SECONDS = 150
"""An idle connection is kept longer than nginx (60 s) and Caddy (120 s) keep theirs, so that they close first."""

_DRAIN_SECONDS = 6

Given = StrPath | Address | Index


class Serving:
    """A server that runs beside the program which started it, as in a notebook.

    Attributes:
        url: where the page is; it ends with a slash. Programs post an image as the field `image` of a form, and `k`,
            to `v1/search` below it, and are answered in JSON.
    """

    def __init__(self, url: str, running: _Running) -> None:
        self.url, self._running = url, running
        self._thread = threading.Thread(target=running.run, name="serve", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Serving {self.url} ({'close() stops it' if self._thread.is_alive() else 'stopped'})"

    def close(self) -> None:
        """Stop; requests under way are finished first."""
        self._running.server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    index: Given | Mapping[str, Given],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    plugins: Sequence[str] = (),
    device: Device = "auto",
    wait: bool | None = None,
) -> Serving | None:
    """Serve an index until SIGINT or SIGTERM; requests under way are finished first.

    In a notebook, whose event loop runs already, the server runs beside it, and this returns at once.

    Args:
        index: an opened index, or its folder or address; or several by name.
        host: the address to listen on.
        port: 0 takes a free one, which is printed.
        settings: limits; a search at a time for each core by default.
        plugins: files or modules of a third-party store that is not installed.
        device: of the encoder.
        wait: whether to return only when the server has ended; None: unless an event loop runs.

    Returns:
        The running server, to be closed; None where this waits.

    Raises:
        MissingDependency: the extra `serve` is not installed.
        StoreError: the index cannot be used, the address cannot be listened on, or others could reach a server
            without keys.
        RetrievalError: the keys cannot be used, or a setting is wrong.
    """
    require_packages()
    settings = checked(settings or Settings(workers=cores()), host)
    beside = _in_event_loop() if wait is None else not wait
    given = index if isinstance(index, Mapping) else {_name_of(index): index}
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(host, port, "--port"))]
        if settings.health_port is not None:
            listeners.append(stack.enter_context(listen(host, settings.health_port, "--health-port")))
            settings = replace(settings, health_port=listeners[1].getsockname()[1])
        if settings.processes > 1:
            _serve_several(Parts(_places(given, beside), settings, device, tuple(plugins)), host, listeners)
            return None
        running = _Running(Parts(given, settings, device, tuple(plugins)), listeners, leaves=not beside)
        end = "close() stops it" if beside else "Ctrl-C stops"
        url = announce(host, listeners, running.items, end)
        stack.pop_all()  # uvicorn closes the sockets
    if beside:
        return Serving(url, running)
    running.run()
    return None


@dataclass(frozen=True)
class Parts:
    """What one process makes a server of; for several processes it is pickled.

    Attributes:
        given: opened indexes, or where they are, by name.
        settings: limits.
        device: of the encoders.
        plugins: files or modules of third-party stores.
    """

    given: Mapping[str, Any]
    settings: Settings
    device: Device = "auto"
    plugins: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of one encoder: the share of a search that runs beside the others."""
        searches = self.settings.workers * self.settings.processes
        return max(1, min(default_threads(), cores() // searches))

    def open(self, place: StrPath | Address) -> Any:
        """Open an index.

        Raises:
            BundleError: its encoder is not what it was when it was exported.
        """
        index = open_index(place, threads=self.threads, device=self.device, plugins=self.plugins)
        if fault := probe_fault(index.bundle):
            index.close()
            raise BundleError(f"{place} is not served. {fault}")
        return index

    def application(self) -> Any:
        """Return the application, with its indexes opened.

        Raises:
            RetrievalError: an index, the keys or the record of changes cannot be used.
        """
        from retrieval.serving.http.app import Application
        from retrieval.serving.http.audit import Audit
        from retrieval.serving.http.keys import key_source
        from retrieval.serving.http.monitoring import traces_of_environment

        keys = key_source(self.settings.keys)
        audit = None if self.settings.audit is None else Audit(self.settings.audit)
        opened: dict[str, Any] = {
            name: one if isinstance(one, Index) else self.open(one) for name, one in self.given.items()
        }
        reopen = {
            name: partial(self.open, one) for name, one in self.given.items() if not isinstance(one, Index)
        }
        return Application(opened, self.settings, keys, audit, traces_of_environment(), reopen)

    def __call__(self) -> Any:
        """Return the application of one of several processes; ends a process that cannot have one."""
        from retrieval.serving.http.monitoring import start_log

        return_large_blocks()
        start_log(self.settings.log_format or "text", several=True)
        try:
            app = self.application()
        except RetrievalError as error:
            logging.getLogger("retrieval.serving.http").error("%s", error)
            raise SystemExit(3) from None  # uvicorn does not start it again
        return _Ending(app, leaves=True)


class _Ending:
    """An application at whose end the process is gone in time, whatever its threads are at."""

    def __init__(self, app: Any, *, leaves: bool) -> None:
        self.app, self._leaves = app, leaves

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or run from the server's start to its end."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return

        async def told() -> Any:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._leaves:
                timer = threading.Timer(GRACE_SECONDS - _DRAIN_SECONDS - 1, os._exit, (0,))
                timer.daemon = True
                timer.start()
            return message

        await self.app(scope, told, send)


class _Running:
    """One process that serves."""

    def __init__(self, parts: Parts, listeners: list[socket.socket], *, leaves: bool) -> None:
        import uvicorn

        from retrieval.serving.http.monitoring import start_log

        return_large_blocks()
        self.app = parts.application()
        self.items = sum(len(served.index) for served in self.app.served.values())
        self._log = start_log(parts.settings.log_format or "text")
        self._listeners, self._given, self._leaves = listeners, parts.given, leaves
        self.server = uvicorn.Server(_config(_Ending(self.app, leaves=leaves)))

    def run(self) -> None:
        """Serve until a signal."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn takes signals itself while it serves, and raises them again at its end, which is no failure;
            # one that comes before it listens must end the server too

            def leave(number: int, frame: Any) -> None:
                self.server.should_exit = True

            signal.signal(signal.SIGTERM, leave)
            signal.signal(signal.SIGINT, leave)
        self.server.run(sockets=self._listeners)
        for name, served in self.app.served.items():
            if not isinstance(self._given[name], Index) and self.app.workers.idle:
                served.index.close()  # closing it under a search that hangs would crash
        self._log.stop()


def _serve_several(parts: Parts, host: str, listeners: list[socket.socket]) -> None:
    """Serve with several processes on the same sockets; uvicorn starts those again that end."""
    from uvicorn.supervisors import Multiprocess

    items = 0
    for place in parts.given.values():
        with parts.open(place) as index:  # what is wrong with it is said here, and once
            items += len(index)
    with tempfile.TemporaryDirectory(prefix="retrieval-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        announce(host, listeners, items, "Ctrl-C stops")
        Multiprocess(_config(parts, factory=True, workers=parts.settings.processes), listeners).run()


def _config(app: Any, **more: Any) -> uvicorn.Config:
    import uvicorn

    from retrieval.serving.http.protocol import Protocol

    return uvicorn.Config(
        app,
        http=Protocol,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        **more,
    )


def _places(given: Mapping[str, Given], beside: bool) -> dict[str, str]:
    """Return where indexes are, for other processes.

    Raises:
        StoreError: they cannot be served by several.
    """
    if beside:
        raise StoreError(
            "Several processes serve in the foreground only: start them with `retrieval serve --processes N`."
        )
    for one in given.values():
        if isinstance(one, Index):
            raise StoreError(
                "Several processes cannot share an opened index: give its folder or its address."
            )
    return {name: str(one) for name, one in given.items()}


def require_packages() -> None:
    """Refuse to serve without the packages of the extra.

    Raises:
        MissingDependency: one of them is not installed.
    """
    wanted = ["uvicorn", "starlette", "python_multipart", "httptools", "prometheus_client"]
    for module in [*wanted, *(["uvloop"] if sys.platform != "win32" else [])]:
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingDependency(
                f"Serving needs {module.replace('_', '-')}. Install it with: pip install 'embedding-retrieval[serve]'"
            ) from None


def announce(host: str, listeners: list[socket.socket], items: int, end: str) -> str:
    """Say where the server is, and return its address."""
    health = f", health at port {listeners[1].getsockname()[1]}" if len(listeners) > 1 else ""
    url = f"http://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}/"
    print(f"Serving {items:,} items at {url} ({end}){health}", flush=True)
    return url


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _name_of(index: Given) -> str:
    return default_name(str(index.path if isinstance(index, Index) else index))
