"""Run the application under uvicorn until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from retrieval.errors import MissingDependency, StoreError
from retrieval.serving.files.places import StrPath
from retrieval.serving.http.naming import check_name, default_name
from retrieval.serving.http.settings import Settings
from retrieval.serving.index.base import Index
from retrieval.serving.index.open import open_index
from retrieval.serving.memory import return_large_blocks
from retrieval.serving.sessions import Device
from retrieval.serving.stores.address import Address

if TYPE_CHECKING:
    from retrieval.serving.http.log import Log
    from retrieval.serving.http.protocol import Connections
    from retrieval.serving.http.traces import Traces

_FILES = 256  # descriptors besides connections: the index, the gallery, libraries, pipes
_MARGIN = 1.5  # seconds of the grace that are kept for what comes after the last answer
_HEALTH_CONNECTIONS = 64


class Serving:
    """A server that runs beside the program which started it, as in a notebook.

    Attributes:
        url: where the page is; it ends with a slash. Programs post an image as the field `image` of a form, and `k`, to
            `v1/search` below it, and are answered in JSON.
    """

    def __init__(self, url: str, running: _Running, finish: Callable[[float], None]) -> None:
        self.url = url
        self._running = running

        def work() -> None:
            finish(running.run())

        self._thread = threading.Thread(target=work, name="serve", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Serving {self.url} ({'close() stops it' if self._thread.is_alive() else 'stopped'})"

    def close(self) -> None:
        """Stop; requests under way are finished first."""
        self._running.stop()
        self._thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    index: StrPath | Address | Index | Mapping[str, StrPath | Address | Index],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    plugins: Sequence[str] = (),
    device: Device = "auto",
    signed_by: StrPath | None = None,
    wait: bool | None = None,
) -> Serving | None:
    """Serve an index until SIGINT or SIGTERM; requests under way are finished first.

    In a notebook, whose event loop runs already, the server runs beside it, and this returns at once.

    Args:
        index: an opened index, or its folder or address; or several by name.
        host: the address to listen on.
        port: 0 takes a free one, which is printed.
        settings: limits; a search at a time for each core by default.
        plugins: files or modules of a third-party back end or store.
        device: of the encoder.
        signed_by: a public key's file; an index that its holder did not sign is refused.
        wait: whether to return only when the server has ended; None: unless an event loop runs.

    Returns:
        The running server, to be closed; None where this waits.

    Raises:
        MissingDependency: the extra `serve` is not installed.
        StoreError: the index cannot be used, the address cannot be listened on, or too few files may be open.
    """
    _require()
    return_large_blocks()
    from retrieval.serving.http.log import Log
    from retrieval.serving.http.machinery import Machinery
    from retrieval.serving.http.searcher import Searcher
    from retrieval.serving.http.traces import traces_of_environment

    cores = os.cpu_count() or 1
    settings = settings or Settings(workers=cores)
    settings = replace(settings, hosts=tuple(sorted({*(settings.hosts or ()), host.lower(), _own_name()})))
    if settings.snapshots is not None and not settings.snapshots.is_dir():
        raise StoreError(f"There is no folder {settings.snapshots}, which --snapshots names. Make it first.")
    _allow_files(settings.connections + _FILES)
    beside = _in_event_loop() if wait is None else not wait
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listen(host, port, "--port"))]
        if settings.health_port is not None:
            listeners.append(stack.enter_context(_listen(host, settings.health_port, "--health-port")))
            settings = replace(settings, health_port=listeners[1].getsockname()[1])
        threads = max(1, cores // settings.workers)
        given = index if isinstance(index, Mapping) else {_name_of(index): index}
        opener = partial(open_index, threads=threads, device=device, plugins=plugins, signed_by=signed_by)
        opened, reopen = {}, {}
        for name, one in given.items():
            check_name(name)
            if not isinstance(one, Index):
                reopen[name] = partial(opener, one)
                one = opener(one)
            one.require_open()
            opened[name] = one
        traces = traces_of_environment()
        log = Log(settings.log_format or "text", settings.debug, settings.log_lines)
        machinery = Machinery(settings, next(iter(opened.values())).bundle.manifest.input.preprocessing)
        searchers = {
            name: Searcher(one, settings, machinery, reopen.get(name)) for name, one in opened.items()
        }
        count = sum(map(len, opened.values()))
        url = _announce(host, listeners, count, "close() stops it" if beside else "Ctrl-C stops")
        for searcher in searchers.values():
            images = searcher.index.bundle.manifest.input.kind == "image"
            if images and (note := searcher.gallery.note()):
                print(note, file=sys.stderr, flush=True)
        running = _Running(searchers, settings, listeners, log, traces)
        closing = stack.pop_all()

    def finish(end: float) -> None:
        with closing:
            done = running.app.state.site.close(end) & machinery.close(max(0.1, end - time.monotonic()))
            if traces is not None:
                traces.close()
            log.close()
            if not done and not beside:
                _leave_now()  # closing the index under a search that hangs would crash
            for name in reopen if done else ():
                searchers[name].index.close()

    if beside:
        return Serving(url, running, finish)
    finish(running.run())
    return None


class _Running:
    """A uvicorn server, and the promise that it ends."""

    def __init__(
        self,
        searchers: Any,
        settings: Settings,
        listeners: list[socket.socket],
        log: Log,
        traces: Traces | None,
    ) -> None:
        import uvicorn

        from retrieval.serving.http.app import create_app
        from retrieval.serving.http.monitoring import Monitoring
        from retrieval.serving.http.protocol import Connections, protocol_class

        gate = Connections(settings.connections, settings.connections_per_address, settings.idle_seconds)
        gates: dict[int | None, Connections] = {None: gate}
        if settings.health_port is not None:
            gates[settings.health_port] = Connections(
                _HEALTH_CONNECTIONS, _HEALTH_CONNECTIONS, settings.idle_seconds
            )

        named = {"main": gate} | ({"health": gates[settings.health_port]} if len(gates) > 1 else {})

        def exhausted() -> str | None:
            return "Every connection is taken by a request under way." if gate.exhausted else None

        self._gates = gates
        self._grace = settings.grace
        self._listeners = listeners
        monitoring = Monitoring(
            searchers, {"connections": exhausted}, named, log if settings.log_format else None, traces
        )
        self.app = create_app(searchers, monitoring)
        config = uvicorn.Config(
            self.app,
            http=protocol_class(gates),
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, int(settings.grace - 2 * _MARGIN)),
        )
        running = self

        class Server(uvicorn.Server):
            async def serve(self, sockets: list[socket.socket] | None = None) -> None:
                sweeps = [asyncio.create_task(gate.sweep()) for gate in running._gates.values()]
                try:
                    await super().serve(sockets)
                finally:
                    for sweep in sweeps:
                        sweep.cancel()

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                running._stopping()
                super().handle_exit(sig, frame)

        self._server = Server(config)
        self._end: float | None = None

    def run(self) -> float:
        """Serve until a signal; return the time, by `time.monotonic()`, until which the rest must have ended."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn shuts down in good order, then raises the signal again: that must not count as a failure.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.signal(signal.SIGINT, lambda number, frame: None)
        self._server.run(sockets=self._listeners)
        return self._end or time.monotonic() + self._grace

    def stop(self) -> None:
        """Let the server end in good order, from another thread."""
        self._server.should_exit = True

    def _stopping(self) -> None:
        if self._end is not None:
            return
        self._end = time.monotonic() + self._grace - _MARGIN
        timer = threading.Timer(self._grace - _MARGIN / 2, _leave_now)
        timer.daemon = True
        timer.start()
        if hasattr(signal, "setitimer"):  # the kernel's own, should something hold the interpreter
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._grace - _MARGIN / 3)


def _leave_now() -> None:
    """End the process, whatever its threads are at."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _require() -> None:
    wanted = ["uvicorn", "starlette", "python_multipart", "httptools", "prometheus_client"]
    for module in [*wanted, *(["uvloop"] if sys.platform != "win32" else [])]:
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingDependency(
                f"Serving needs {module.replace('_', '-')}. Install it with: pip install 'embedding-retrieval[serve]'"
            ) from None


def _allow_files(wanted: int) -> None:
    """Raise the limit on open files as far as is needed.

    Raises:
        StoreError: the system does not allow as many.
    """
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise StoreError(
                f"This process may open {hard:,} files, and {wanted:,} are needed: {_FILES} besides one for each "
                "connection. Raise the limit (ulimit -Hn, LimitNOFILE= of systemd), or lower --connections."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _announce(host: str, listeners: list[socket.socket], count: int, end: str) -> str:
    """Say where the server is, and return its address."""
    shown = f"[{host}]" if ":" in host else host
    health = f", health at port {listeners[1].getsockname()[1]}" if len(listeners) > 1 else ""
    port = listeners[0].getsockname()[1]
    url = f"http://{shown}:{port}/"
    print(f"Serving {count:,} items at {url} ({end}){health}", flush=True)
    return url


def _name_of(index: StrPath | Address | Index) -> str:
    return default_name(str(index.path if isinstance(index, Index) else index))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _own_name() -> str:
    return socket.gethostname().lower()


def _listen(host: str, port: int, option: str) -> socket.socket:
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise StoreError(
            f"{option} is a whole number from 0, which takes a free port, to 65535, not {port!r}."
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as fault:
        raise StoreError(
            f"Cannot listen on {host}: {fault.strerror or fault}. --host takes an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
        ) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as fault:
        listener.close()
        wrong_host = fault.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        advice = (
            "No network interface of this machine has that address: use 127.0.0.1, or 0.0.0.0 for all, with --host."
            if wrong_host
            else f"Choose another port with {option}."
        )
        raise StoreError(
            f"Cannot listen on {host}, port {port}: {fault.strerror or fault}. {advice}"
        ) from None
    return listener
