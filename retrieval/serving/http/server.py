"""Serve indexes until told to stop: settings, sockets, one process or several, the end in time."""

from __future__ import annotations

import asyncio
import errno
import importlib
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.errors import BundleError, MissingDependency, RetrievalError, StoreError
from retrieval.host.cores import cores, default_threads
from retrieval.serving.files.places import StrPath
from retrieval.serving.http.keys import key_source
from retrieval.serving.http.settings import DRAIN_SECONDS, Settings, plain_address
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.memory import return_large_blocks
from retrieval.serving.probe import probe_fault
from retrieval.serving.runtime import Device
from retrieval.serving.store.address import Address, place_of

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_SECONDS = 150
"""An idle connection is kept longer than nginx (60 s) and Caddy (120 s) keep theirs, so that they
close first.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_RULE = (
    "A name has 1 to 100 letters, digits, dots, dashes and underscores, and begins with a letter or"
    " digit"
)

Source = StrPath | Address | Index


def serve(
    index: Source | Mapping[str, Source],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    plugins: Sequence[str] = (),
    device: Device = "auto",
    wait: bool | None = None,
) -> Serving | None:
    """Serve an index until SIGINT or SIGTERM; requests under way are finished first.

    In a notebook, whose event loop runs already, the server runs beside it, and this returns at
    once.

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
        StoreError: the index cannot be used, the address cannot be listened on, or others could
            reach a server without keys.
        RetrievalError: the keys cannot be used, or a setting is wrong.
    """
    require_packages()
    settings = checked(settings or Settings(workers=cores()), host)
    beside = _in_event_loop() if wait is None else not wait
    place = index.path if isinstance(index, Index) else index
    sources = index if isinstance(index, Mapping) else {default_name(str(place)): index}
    parts = Parts(sources, settings, device, tuple(plugins))
    if settings.processes > 1 and beside:
        raise StoreError(
            "Several processes serve in the foreground only: start them with `retrieval serve"
            " --processes N`."
        )
    if settings.processes > 1 and any(isinstance(source, Index) for source in sources.values()):
        raise StoreError(
            "Several processes cannot share an opened index: give its folder or its address."
        )
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(host, port, "--port"))]
        if settings.health_port is not None:
            listeners.append(
                stack.enter_context(listen(host, settings.health_port, "--health-port"))
            )
            health_port = listeners[1].getsockname()[1]
            parts = replace(parts, settings=replace(settings, health_port=health_port))
        if settings.processes > 1:
            _serve_several(parts, host, listeners)
            return None
        serving = Serving(parts, host, listeners, beside)
        stack.pop_all()  # uvicorn closes the sockets
    if not beside:
        serving.run()
        return None
    serving.start()
    return serving


class Serving:
    """A server of one process; after `start` it runs beside the program, as in a notebook.

    Attributes:
        url: where the page is; it ends with a slash. Programs post an image as the field `image` of
            a form, and `k`, to `v1/search` below it, and are answered in JSON.
    """

    def __init__(
        self, parts: Parts, host: str, listeners: list[socket.socket], beside: bool
    ) -> None:
        import uvicorn

        from retrieval.serving.http.monitoring import start_log

        return_large_blocks()
        self._app = parts.application()
        self._log = start_log(parts.settings.log_format or "text")
        self._listeners, self._sources = listeners, parts.sources
        self._app.ends_process = not beside
        self._server = uvicorn.Server(_config(self._app))
        self._thread = threading.Thread(target=self.run, name="serve", daemon=True)
        items = sum(len(served.index) for served in self._app.served.values())
        self.url = announce(
            host, listeners, items, "close() stops it" if beside else "Ctrl-C stops"
        )

    def __repr__(self) -> str:
        return (
            f"Serving {self.url} ({'close() stops it' if self._thread.is_alive() else 'stopped'})"
        )

    def run(self) -> None:
        """Serve until a signal, or `close`."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn takes signals itself while it serves, and raises them again at its end, which
            # is no failure; one that comes before it listens must end the server too

            def leave(number: int, frame: Any) -> None:
                self._server.should_exit = True

            signal.signal(signal.SIGTERM, leave)
            signal.signal(signal.SIGINT, leave)
        self._server.run(sockets=self._listeners)
        for name, served in self._app.served.items():
            if not isinstance(self._sources[name], Index) and self._app.workers.idle:
                served.index.close()  # closing it under a search that hangs would crash
        self._log.stop()

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop; requests under way are finished first."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Parts:
    """What one process makes a server of: opened indexes, or where they are, by name.

    Several processes pickle it.
    """

    sources: Mapping[str, Any]
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
        reopen = {
            name: partial(self.open, index)
            for name, index in self.sources.items()
            if not isinstance(index, Index)
        }
        opened = {
            name: reopen[name]() if name in reopen else index
            for name, index in self.sources.items()
        }
        return Application(opened, self.settings, keys, audit, traces_of_environment(), reopen)

    def __call__(self) -> Any:
        """Return the application of one of several processes, or end the process."""
        from retrieval.serving.http.monitoring import start_log

        return_large_blocks()
        start_log(self.settings.log_format or "text", names_process=True)
        try:
            app = self.application()
        except RetrievalError as error:
            logging.getLogger("retrieval.serving.http").error("%s", error)
            raise SystemExit(3) from None  # uvicorn does not start it again
        app.ends_process = True
        return app


def _serve_several(parts: Parts, host: str, listeners: list[socket.socket]) -> None:
    """Serve with several processes on the same sockets; uvicorn starts those again that end."""
    from uvicorn.supervisors import Multiprocess

    items = 0
    for place in parts.sources.values():
        with parts.open(place) as index:  # a fault of it is told here, and once
            items += len(index)
    with tempfile.TemporaryDirectory(prefix="retrieval-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        announce(host, listeners, items, "Ctrl-C stops")
        Multiprocess(
            _config(parts, factory=True, workers=parts.settings.processes), listeners
        ).run()


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
        timeout_graceful_shutdown=DRAIN_SECONDS,
        **more,
    )


# Settings and sockets


def checked(settings: Settings, host: str) -> Settings:
    """Return settings with hosts and proxies as requests are compared with them.

    Raises:
        RetrievalError: a setting is wrong, or others could reach a server without keys.
    """
    for option, folders in (("--images", settings.images), ("--snapshots", [settings.snapshots])):
        for folder in folders:
            if folder is not None and not folder.is_dir():
                raise StoreError(
                    f"There is no folder {folder}, which {option} names. Make it first."
                )
    proxies = tuple(_proxy(text) for text in settings.proxies)
    if key_source(settings.keys) is None and settings.open is None:
        where = "through a proxy (--proxy-header-from)" if proxies else f"at {host}"
        if proxies or not _is_loopback(host):
            raise StoreError(
                f"This server has no keys, and others could reach it {where}. Make keys (retrieval"
                " keys add NAME --output KEYS) and name them with --keys KEYS, or say with --open"
                " read what everybody may do."
            )
    names = {_host(text) for text in settings.hosts or ()}
    return replace(
        settings,
        hosts=tuple(sorted({*names, host.lower(), socket.gethostname().lower()})),
        proxies=proxies,
    )


def _host(text: str) -> str:
    """Return a host name as requests are compared with it; RetrievalError: none could match."""
    if not _HOST.fullmatch(text.lower()):
        raise RetrievalError(
            "--allow-host takes a host name as clients write it, such as photos.example: no"
            f" scheme, port or star. '{text}' would never match."
        )
    return text.lower().removesuffix(".")


def _proxy(text: str) -> str:
    """Return an address or network as it is compared; RetrievalError where it is none."""
    try:
        network = ipaddress.ip_network(plain_address(text))
    except ValueError:
        raise RetrievalError(
            "--proxy-header-from takes the address of a proxy or its network, such as 10.0.0.5 or"
            f" 10.0.0.0/24, not '{text}'."
        ) from None
    return str(network) if "/" in text else str(network.network_address)


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host's addresses; an unknown host is nobody's."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(
        ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in addresses
    )


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens; StoreError, which names the port's option, where it cannot."""
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise StoreError(
            f"{option} is a whole number from 0, which takes a free port, to 65535, not {port!r}."
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StoreError(
            f"Cannot listen on {host}: {error.strerror or error}. --host takes an address of this"
            " machine, such as 127.0.0.1, or 0.0.0.0 for all."
        ) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        listener.close()
        advice = f"Choose another port with {option}."
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            advice = (
                "No network interface of this machine has that address: use 127.0.0.1, or 0.0.0.0"
                " for all, with --host."
            )
        reason = error.strerror or error
        raise StoreError(f"Cannot listen on {host}, port {port}: {reason}. {advice}") from None
    return listener


# Names of indexes


def named(texts: Iterable[str]) -> dict[str, str]:
    """Return indexes by name, from `PATH` (named after its folder) and `NAME=PATH`.

    Raises:
        StoreError: a name that none can have, or one given twice.
    """
    places: dict[str, str] = {}
    for text in texts:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists() or "/" in name:
            name, path = default_name(text), text
        place_of(path)  # refuses an address that holds a secret, before anything repeats it
        if not _NAME.fullmatch(name):
            raise StoreError(f"An index cannot be called {name[:100]!a}. {_RULE}.")
        if name in places:
            raise StoreError(
                f"Two indexes are called '{name}': {places[name]} and {path}. "
                f"Name them: retrieval serve A={places[name]} B={path}"
            )
        places[name] = path
    return places


def default_name(path: str) -> str:
    """Return an index's name by its folder; "index" where that cannot stand in an address."""
    name = Path(path.partition("?")[0]).absolute().name.removesuffix(".index")
    return name if _NAME.fullmatch(name) else "index"


# What they share


def require_packages() -> None:
    """Refuse to serve without the packages of the extra: MissingDependency."""
    modules = ["uvicorn", "starlette", "python_multipart", "httptools", "prometheus_client"]
    for module in modules + (["uvloop"] if sys.platform != "win32" else []):
        try:
            importlib.import_module(module)
        except ImportError:
            package = module.replace("_", "-")
            raise MissingDependency(
                f"Serving needs {package}. Install it with: pip install"
                " 'embedding-retrieval[serve]'"
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
