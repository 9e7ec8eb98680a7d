"""Run the application under uvicorn until it is told to stop."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from retrieval.errors import BundleError, MissingDependency, StoreError
from retrieval.host.cores import cores, default_threads
from retrieval.serving.files.places import StrPath
from retrieval.serving.http.listening import allow_files, check_proxies, listen, require_keys
from retrieval.serving.http.naming import check_name, default_name
from retrieval.serving.http.settings import Settings
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.memory import return_large_blocks
from retrieval.serving.probing import probe_fault
from retrieval.serving.providers import Device
from retrieval.serving.store.address import Address

if TYPE_CHECKING:
    from retrieval.serving.http.processes.group import Member
    from retrieval.serving.http.running import Running


class Serving:
    """A server that runs beside the program which started it, as in a notebook.

    Attributes:
        url: where the page is; it ends with a slash. Programs post an image as the field `image` of a form, and `k`, to
            `v1/search` below it, and are answered in JSON.
    """

    def __init__(self, url: str, running: Running, finish: Callable[[float], None]) -> None:
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
        wait: whether to return only when the server has ended; None: unless an event loop runs.

    Returns:
        The running server, to be closed; None where this waits.

    Raises:
        MissingDependency: the extra `serve` is not installed.
        StoreError: the index cannot be used, the address cannot be listened on, or too few files may be open; or others could
            reach a server without keys.
        RetrievalError: the keys or the certificate cannot be used, or a setting is wrong.
    """
    settings = settings or Settings(workers=cores())
    beside = _in_event_loop() if wait is None else not wait
    given = index if isinstance(index, Mapping) else {_name_of(index): index}
    if settings.processes > 1:
        from retrieval.serving.http.processes.supervisor import supervise

        def tell(settings: Settings, listeners: list[socket.socket], count: int) -> None:
            announce(host, settings, listeners, count, "Ctrl-C stops")

        supervise(_places(given, beside), host, port, settings, plugins, device, tell)
        return None
    require_server()
    settings = checked(settings, host)
    starting = Starting(settings, host)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(host, port, "--port"))]
        if settings.health_port is not None:
            listeners.append(stack.enter_context(listen(host, settings.health_port, "--health-port")))
            starting.settings = replace(settings, health_port=listeners[1].getsockname()[1])
        opener = partial(open_index, threads=starting.threads, device=device, plugins=plugins)
        running, finish = starting.start(given, opener, listeners, leaves=not beside)
        url = announce(
            host, settings, listeners, running.items, "close() stops it" if beside else "Ctrl-C stops"
        )
        closing = stack.pop_all()

    def end(until: float) -> None:
        with closing:
            finish(until)

    if beside:
        return Serving(url, running, end)
    end(running.run())
    return None


class Starting:
    """What comes before a server runs: who is let in, and then its indexes and what works on them.

    Args:
        settings: limits, of this process.
        host: that is listened on.
        searches: at a time, of all processes.

    Attributes:
        settings: see above.
        threads: of an encoder.

    Raises:
        StoreError: others could reach a server without keys, or too few files may be open.
        RetrievalError: the keys or the certificate cannot be used.
    """

    def __init__(self, settings: Settings, host: str, searches: int | None = None) -> None:
        from retrieval.serving.http.running import Admission

        return_large_blocks()
        self.settings = settings
        self.threads = max(1, min(default_threads(), cores() // (searches or settings.workers)))
        self._admission = Admission.of(settings)
        require_keys(host, settings, self._admission.keys is not None)
        # a handshake takes a file as a connection does
        allow_files(settings.connections * (1 if self._admission.certificate is None else 2))

    def start(
        self,
        given: Mapping[str, StrPath | Address | Index],
        opener: Callable[[StrPath | Address], Index],
        listeners: list[socket.socket],
        member: Member | None = None,
        *,
        leaves: bool = True,
    ) -> tuple[Running, Callable[[float], None]]:
        """Open the indexes; return what serves them, and what is to be called, with the time that is left, when it has ended.

        Args:
            given: opened, or where they are, by name.
            opener: opens them.
            listeners: of the port, and the health port if there is one.
            member: this process among those of its server; None where there is but one.
            leaves: whether the process may end there and then if its work does not.

        Raises:
            StoreError: an index cannot be used.
        """
        from retrieval.serving.http.log import Log
        from retrieval.serving.http.machinery import Machinery
        from retrieval.serving.http.running import Running, leave_now
        from retrieval.serving.http.searcher import Searcher
        from retrieval.serving.http.traces import traces_of_environment

        settings = self.settings
        opened, reopen = _opened(given, opener)
        traces = traces_of_environment()
        number = None if member is None else member.number
        log = Log(settings.log_format or "text", settings.debug, settings.log_lines, process=number)
        machinery = Machinery(settings, next(iter(opened.values())).bundle.manifest.input.preprocessing)
        searchers = {
            name: Searcher(one, settings, machinery, reopen.get(name)) for name, one in opened.items()
        }
        running = Running(searchers, settings, listeners, self._admission, log, traces, member)

        def finish(end: float) -> None:
            done = running.app.state.site.close(end) & machinery.close(max(0.1, end - time.monotonic()))
            if traces is not None:
                traces.close()
            log.close()
            if not done and leaves:
                leave_now()  # closing the index under a search that hangs would crash
            for name in reopen if done else ():
                searchers[name].index.close()

        return running, finish


def _places(given: Mapping[str, StrPath | Address | Index], beside: bool) -> dict[str, str]:
    """Return where indexes are, for other processes.

    Raises:
        StoreError: they cannot be served by several.
    """
    if beside:
        raise StoreError(
            "Several processes serve in the foreground only: start them with `retrieval serve --processes N`."
        )
    for name, one in given.items():
        check_name(name)
        if isinstance(one, Index):
            raise StoreError(
                "Several processes cannot share an opened index: give its folder or its address."
            )
    return {name: str(one) for name, one in given.items()}


def _opened(
    given: Mapping[str, StrPath | Address | Index], opener: Callable[[StrPath | Address], Index]
) -> tuple[dict[str, Index], dict[str, Callable[[], Index]]]:
    """Return the indexes, and of those that were opened here how to open them again."""
    opened: dict[str, Index] = {}
    reopen: dict[str, Callable[[], Index]] = {}
    for name, one in given.items():
        check_name(name)
        if not isinstance(one, Index):
            reopen[name] = partial(opener, one)
            one = opener(one)
        one.require_open()
        if fault := probe_fault(one.bundle):
            raise BundleError(f"{one.path} is not served. {fault}")
        opened[name] = one
    return opened, reopen


def require_server() -> None:
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


def announce(host: str, settings: Settings, listeners: list[socket.socket], count: int, end: str) -> str:
    """Say where the server is, and return its address."""
    scheme = "http" if settings.certificate is None else "https"
    health = f", health at port {listeners[1].getsockname()[1]}" if len(listeners) > 1 else ""
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}/"
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


def checked(settings: Settings, host: str) -> Settings:
    """Return settings with what is compared to requests as it is compared.

    Raises:
        RetrievalError: one of them is wrong.
    """
    from retrieval.serving.http.access.cors import check_origins

    if settings.snapshots is not None and not settings.snapshots.is_dir():
        raise StoreError(f"There is no folder {settings.snapshots}, which --snapshots names. Make it first.")
    return replace(
        settings,
        hosts=tuple(sorted({*(settings.hosts or ()), host.lower(), socket.gethostname().lower()})),
        cors_origins=check_origins(settings.cors_origins),
        proxies=check_proxies(settings.proxies),
    )
