"""Run a server: check settings, open sockets, and start and stop one or several processes."""

from __future__ import annotations

import asyncio
import errno
import importlib
import ipaddress
import logging
import os
import re
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import cores, default_threads, return_large_blocks
from retrieval.base.runtime import Device
from retrieval.bundle.probe import probe_fault
from retrieval.errors import (
    BundleError,
    DataError,
    MissingDependency,
    RetrievalError,
    StoreError,
    quantity,
)
from retrieval.feedback.feedback_record import FeedbackRecord, feedback_file
from retrieval.index.index import Index, open_index
from retrieval.store.address import INDEX_NAME, Address, index_name, place_of

from retrieval_server.keys import key_source
from retrieval_server.settings import DRAIN_SECONDS, Settings

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_SECONDS = 150
"""Seconds until an idle connection is closed.

This is longer than the idle time-outs of nginx (60 s) and Caddy (120 s), so that a proxy closes the
connection first.
"""

_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_CLOSE = "close() stops it"

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
    """Serve an index until SIGINT or SIGTERM, then finish running requests.

    In a notebook, where an event loop runs already, the server runs in a background thread and
    this function returns at once.

    Args:
        index: an open index, its folder or its address; or a mapping from names to indexes.
        host: address to listen on.
        port: port to listen on; 0 chooses a free port and prints it.
        settings: limits and permissions. By default, one search per core runs at a time.
        plugins: plugin files or modules to load, for an index whose store a plugin provides.
        device: where the encoder runs.
        wait: whether to return only after the server has ended. `None` waits unless an event loop
            is running.

    Returns:
        The running server, or `None` after waiting for its end.

    Raises:
        MissingDependency: the extra `serve` is not installed.
        StoreError: the index cannot be used, the server cannot listen on the address, or others
            could reach a server without keys.
        RetrievalError: the keys or a setting are invalid.
    """
    require_packages()
    settings = checked(settings or Settings(workers=cores()), host)
    beside = _in_event_loop() if wait is None else not wait
    if isinstance(index, Mapping):
        sources = index
    elif isinstance(index, Index):
        sources = {index_name(str(index.path)): index}
    else:
        sources = {index_name(str(index)): index}
    if settings.feedback_file is not None and len(sources) > 1:
        raise StoreError(
            "One file cannot hold the feedback of several indexes, whose items may have the same"
            " ids: with --feedback alone, each index has a file in its folder."
        )
    if settings.feedback:
        for source in sources.values():
            # Without a file, no index is opened.
            place = source.path if isinstance(source, Index) else place_of(source)
            feedback_file(place, settings.feedback_file)
    parts = Parts(sources, settings, device, tuple(plugins))
    multiprocess = settings.processes > 1
    if multiprocess and (beside or any(isinstance(source, Index) for source in sources.values())):
        opened = [str(getattr(source, "path", source)) for source in sources.values()]
        command = ["retrieval", "serve", *opened, "--processes", str(settings.processes)]
        raise StoreError(
            "Several processes serve folders and addresses, not open indexes, and only in the"
            f" foreground: start them with `{shlex.join(command)}`."
        )
    with ExitStack() as stack:
        # Sockets are opened first: an address that is taken is reported before the index is loaded.
        listeners = [stack.enter_context(listen(host, port, "port"))]
        if settings.health_port is not None:
            listeners.append(stack.enter_context(listen(host, settings.health_port, "health_port")))
            health_port = listeners[1].getsockname()[1]
            parts = replace(parts, settings=replace(settings, health_port=health_port))
        if multiprocess:
            _serve_several(parts, host, listeners)
            return None
        serving = Serving(parts, host, listeners, beside)
        # From here on, uvicorn closes the sockets.
        stack.pop_all()
    if not beside:
        serving.run()
        return None
    serving.start()
    return serving


class Serving:
    """A server in one process; `start` runs it in a background thread, as in a notebook.

    Attributes:
        url: URL of the web page, with a final slash. Programs post a form with the fields `image`
            and `k` to `v1/search` below it, and get JSON.
    """

    def __init__(
        self, parts: Parts, host: str, listeners: list[socket.socket], beside: bool
    ) -> None:
        import uvicorn

        from retrieval_server.app import start_log

        # glibc would keep the memory of large images for their threads.
        return_large_blocks()
        self._app = parts.application()
        self._log = start_log(parts.settings.log_format or "text")
        self._listeners = listeners
        self._sources = parts.sources
        self._app.ends_process = not beside
        self._server = uvicorn.Server(_config(self._app))
        self._thread = threading.Thread(target=self.run, name="serve", daemon=True)
        items = sum(len(served.index) for served in self._app.served.values())
        self.url = announce(host, listeners, items, _CLOSE if beside else "Ctrl-C stops")

    def __repr__(self) -> str:
        return f"Serving {self.url} ({_CLOSE if self._thread.is_alive() else 'stopped'})"

    def run(self) -> None:
        """Serve until a signal or `close`."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn handles signals while it serves, and raises them again when it has ended. This
            # handler ignores the repeated signal, and ends a server that does not listen yet.

            def leave(number: int, frame: Any) -> None:
                self._server.should_exit = True

            signal.signal(signal.SIGTERM, leave)
            signal.signal(signal.SIGINT, leave)
        self._server.run(sockets=self._listeners)
        for name, served in self._app.served.items():
            if not isinstance(self._sources[name], Index) and self._app.workers.idle:
                # Closing an index during a hanging search would crash the process.
                served.index.close()
        self._log.stop()

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish running requests and stop."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Parts:
    """What one server process needs; each of several processes gets a pickled copy.

    `sources` maps each name to an open index, or to the folder or address of an index to open.
    """

    sources: Mapping[str, Any]
    settings: Settings
    device: Device = "auto"
    plugins: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Number of threads of an encoder: the share of the cores if all searches run at once."""
        searches = self.settings.workers * self.settings.processes
        return max(1, min(default_threads(), cores() // searches))

    def open(self, source: StrPath | Address) -> Any:
        """Open an index.

        Raises:
            BundleError: the encoder's output differs from its output at export.
        """
        index = open_index(source, threads=self.threads, device=self.device, plugins=self.plugins)
        if fault := probe_fault(index.bundle):
            index.close()
            raise BundleError(f"{source} is not served. {fault}")
        return index

    def application(self) -> Any:
        """Open the indexes and return the application.

        Raises:
            RetrievalError: an index, the keys or the record of changes cannot be used.
        """
        from retrieval.index.change_log import Audit

        from retrieval_server.app import Application
        from retrieval_server.feedback import Feedback

        keys = key_source(self.settings.keys)
        audit = None
        if self.settings.audit is not None:
            audit = Audit(self.settings.audit)
        opened: dict[str, Index] = {}
        feedback = {}
        reopen = {}
        for name, source in self.sources.items():
            if isinstance(source, Index):
                opened[name] = source
            else:
                reopen[name] = partial(self.open, source)
                opened[name] = reopen[name]()
            if self.settings.feedback:
                path = feedback_file(opened[name].path, self.settings.feedback_file)
                feedback[name] = Feedback(path, self.settings)
        return Application(opened, self.settings, keys, audit, reopen, feedback)

    def __call__(self) -> Any:
        """Return the application of one of several processes; on an error, end the process."""
        from retrieval_server.app import start_log

        return_large_blocks()
        log = start_log(self.settings.log_format or "text", names_process=True)
        try:
            app = self.application()
        except RetrievalError as error:
            logging.getLogger("retrieval_server").error("%s", error)
            # The log's thread would end with the process, before it has written the error.
            log.stop()
            # uvicorn does not restart a process that ends with this status.
            raise SystemExit(3) from None
        app.ends_process = True
        return app


def _serve_several(parts: Parts, host: str, listeners: list[socket.socket]) -> None:
    """Serve with several processes on the same sockets; uvicorn restarts those that end.

    Raises:
        DataError: a process could not start, which ends the others.
    """
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    items = 0
    for source in parts.sources.values():
        # An error here is reported once, not by each process.
        with parts.open(source) as index:
            items += len(index)
            if parts.settings.feedback:
                path = feedback_file(index.path, parts.settings.feedback_file)
                FeedbackRecord.open(path, create=True).close()
    with tempfile.TemporaryDirectory(prefix="retrieval-metrics-") as folder:
        # prometheus_client reads the variable when a process imports it.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        announce(host, listeners, items, "Ctrl-C stops")
        config = _config(parts, factory=True, workers=parts.settings.processes)
        supervisor = Multiprocess(config, listeners)
        supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise DataError("A process of the server could not start; the log above says why.")


def _config(app: Any, **more: Any) -> uvicorn.Config:
    import uvicorn

    from retrieval_server.connection import Protocol

    # uvicorn's log of requests and its reading of X-Forwarded-For are off: the application does
    # both, as the operator has set them.
    return uvicorn.Config(
        app,
        http=Protocol,
        loop="uvloop",
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
    """Check settings and return them with normalised hosts and proxies.

    Raises:
        RetrievalError: a setting is invalid, or others could reach a server without keys.
    """
    folders = [("--images", folder) for folder in settings.images]
    folders += [("--snapshots", settings.snapshots)] if settings.snapshots else []
    for option, folder in folders:
        if not folder.is_dir():
            raise StoreError(f"There is no folder {folder}, which {option} names. Create it first.")
    proxies = tuple(_proxy(text) for text in settings.proxies)
    if key_source(settings.keys) is None and settings.open is None:
        where = "through a proxy (--proxy-header-from)" if proxies else f"at {host}"
        if proxies or not _is_loopback(host):
            raise StoreError(
                f"This server has no keys, but others could reach it {where}. Create keys"
                " (retrieval keys add NAME --output KEYS) and use them with --keys KEYS, or permit"
                " everybody to search with --open read."
            )
    names = {_host(text) for text in settings.hosts or ()}
    return replace(
        settings,
        hosts=tuple(sorted({*names, host.lower(), socket.gethostname().lower()})),
        proxies=proxies,
    )


def _host(text: str) -> str:
    """Normalise a host name; raise a RetrievalError if no request could match it."""
    if not _HOST.fullmatch(text.lower()):
        raise RetrievalError(
            "--allow-host takes a host name as clients write it, such as photos.example: no"
            f" scheme, port or star. '{text}' would never match."
        )
    return text.lower().removesuffix(".")


def _proxy(text: str) -> str:
    """Normalise a proxy's address or network; raise a RetrievalError if it is invalid."""
    # Imported here, because it needs starlette: `require_packages` first says if that is missing.
    from retrieval_server.access import plain_address

    try:
        network = ipaddress.ip_network(plain_address(text))
    except ValueError:
        raise RetrievalError(
            "--proxy-header-from takes the address of a proxy or its network, such as 10.0.0.5 or"
            f" 10.0.0.0/24, not '{text}'."
        ) from None
    if "/" in text:
        return str(network)
    return str(network.network_address)


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback addresses, or the host is unknown."""
    try:
        texts = [str(info[4][0]).partition("%")[0] for info in _addresses(host, 0)]
    except OSError:
        return True
    return all(ipaddress.ip_address(text).is_loopback for text in texts)


def _addresses(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket.

    Raises:
        StoreError: the server cannot listen there; the message names `option`, which sets the port.
    """
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise StoreError(
            f"{option} must be a whole number from 0 (any free port) to 65535, not {port!r}."
        )
    try:
        family, kind, protocol, _, address = _addresses(host, port)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StoreError(
            f"Cannot listen on {host}: {error.strerror or error}. `host` takes an address of this"
            " machine, such as 127.0.0.1, or 0.0.0.0 for all."
        ) from None
    try:
        # Without this, a server could not start again while connections of the last one linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        listener.close()
        advice = f"Choose another port with {option}."
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            lacking = "No network interface of this machine has that address"
            advice = f"{lacking}: use 127.0.0.1, or 0.0.0.0 for all."
        reason = error.strerror or error
        raise StoreError(f"Cannot listen on {host}, port {port}: {reason}. {advice}") from None
    return listener


# Names of indexes


def named(texts: Iterable[str]) -> dict[str, str]:
    """Return the paths of indexes by name, from texts `NAME=PATH` or `PATH` (the folder's name).

    Raises:
        StoreError: a name is invalid or used twice.
    """
    paths: dict[str, str] = {}
    for text in texts:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists() or "/" in name:
            name = index_name(text)
            path = text
        # This refuses an address with a secret, before a message can repeat it.
        place_of(path)
        if not INDEX_NAME.fullmatch(name):
            raise StoreError(
                f"An index cannot be called {name[:100]!a}. A name has 1 to 100 letters, digits,"
                " dots, dashes and underscores, and begins with a letter or digit."
            )
        if name in paths:
            raise StoreError(
                f"Two indexes are called '{name}': {paths[name]} and {path}. "
                f"Name them: retrieval serve A={paths[name]} B={path}"
            )
        paths[name] = path
    return paths


# Helpers


def require_packages() -> None:
    """Raise a MissingDependency if a package of the extra `serve` is missing."""
    modules = "uvicorn starlette python_multipart httptools prometheus_client uvloop"
    try:
        for module in modules.split():
            importlib.import_module(module)
    except ImportError as error:
        package = str(error.name).replace("_", "-")
        raise MissingDependency(
            f"Serving needs {package}. Install it with: pip install 'embedding-retrieval[serve]'"
        ) from None


def announce(host: str, listeners: list[socket.socket], items: int, end: str) -> str:
    """Print the server's address, and return its URL; `end` says how to stop the server."""
    health = ""
    if len(listeners) > 1:
        health = f", health at port {listeners[1].getsockname()[1]}"
    url = f"http://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}/"
    print(f"Serving {quantity(items, 'item')} at {url} ({end}){health}", flush=True)
    return url


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
