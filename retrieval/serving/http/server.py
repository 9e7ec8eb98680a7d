"""Serve indexes until told to stop: sockets, one process or several, the end in time."""

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
from retrieval.serving.files.places import StrPath
from retrieval.serving.http.settings import GRACE_SECONDS, Settings
from retrieval.serving.index.base import Index
from retrieval.serving.index.open import open_index
from retrieval.serving.memory import return_large_blocks
from retrieval.serving.probing import probe_fault
from retrieval.serving.providers import Device
from retrieval.serving.stores.address import Address, place_of

if TYPE_CHECKING:
    import uvicorn

KEEP_ALIVE_SECONDS = 150
"""An idle connection is kept longer than nginx (60 s) and Caddy (120 s) keep theirs, so that they close first."""

_DRAIN_SECONDS = 6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_RULE = "A name has 1 to 100 letters, digits, dots, dashes and underscores, and begins with a letter or digit"

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
    settings = checked(settings or Settings(workers=os.cpu_count() or 1), host)
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

    def open(self, place: StrPath | Address) -> Any:
        """Open an index.

        Raises:
            BundleError: its encoder is not what it was when it was exported.
        """
        threads = max(1, (os.cpu_count() or 1) // (self.settings.workers * self.settings.processes))
        index = open_index(place, threads=threads, device=self.device, plugins=self.plugins)
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
        opened = {name: one if isinstance(one, Index) else self.open(one) for name, one in self.given.items()}
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


# What settings must be


def checked(settings: Settings, host: str) -> Settings:
    """Return settings with hosts and proxies as requests are compared with them.

    Raises:
        RetrievalError: a setting is wrong, or others could reach a server without keys.
    """
    from retrieval.serving.http.keys import key_source

    for option, folders in (("--images", settings.images), ("--snapshots", [settings.snapshots])):
        for folder in folders:
            if folder is not None and not folder.is_dir():
                raise StoreError(f"There is no folder {folder}, which {option} names. Make it first.")
    proxies = tuple(_proxy(each) for each in settings.proxies)
    if key_source(settings.keys) is None and settings.open is None:
        where = "through a proxy (--proxy-header-from)" if proxies else f"at {host}"
        if proxies or not _is_loopback(host):
            raise StoreError(
                f"This server has no keys, and others could reach it {where}. Make keys (retrieval keys add NAME "
                "--output KEYS) and name them with --keys KEYS, or say with --open read what everybody may do."
            )
    names = {_host(each) for each in settings.hosts or ()}
    return replace(
        settings,
        hosts=tuple(sorted({*names, host.lower(), socket.gethostname().lower()})),
        proxies=proxies,
    )


def _host(text: str) -> str:
    """Return a name as it is compared with a request's Host.

    Raises:
        RetrievalError: no request could ever name it.
    """
    if not _HOST.fullmatch(text.lower()):
        raise RetrievalError(
            f"--allow-host takes a host name as clients write it, such as photos.example: no scheme, port or star. "
            f"'{text}' would never match."
        )
    return text.lower().removesuffix(".")


def _proxy(text: str) -> str:
    """Return an address or network as it is compared.

    Raises:
        RetrievalError: it is none.
    """
    from retrieval.serving.http.app import plain_address

    try:
        network = ipaddress.ip_network(plain_address(text))
    except ValueError:
        raise RetrievalError(
            "--proxy-header-from takes the address of a proxy or its network, such as 10.0.0.5 or 10.0.0.0/24, "
            f"not '{text}'."
        ) from None
    return str(network) if "/" in text else str(network.network_address)


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host's addresses; an unknown host is nobody's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens.

    Raises:
        StoreError: it cannot.
    """
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
            f"Cannot listen on {host}: {error.strerror or error}. --host takes an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
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
            advice = "No network interface of this machine has that address: use 127.0.0.1, or 0.0.0.0 for all, with --host."
        raise StoreError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}. {advice}"
        ) from None
    return listener


# Names of indexes


def named(given: Iterable[str]) -> dict[str, str]:
    """Return indexes by name, from texts `PATH` and `NAME=PATH`: without a name it is the folder's, less `.index`.

    Raises:
        StoreError: a name that none can have, or one given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists() or "/" in name:
            name, path = default_name(text), text
        place_of(path)  # refuses an address that holds a secret, before anything repeats it
        if not _NAME.fullmatch(name):
            raise StoreError(f"An index cannot be called {name[:100]!a}. {_RULE}.")
        if name in found:
            raise StoreError(
                f"Two indexes are called '{name}': {found[name]} and {path}. "
                f"Name them: retrieval serve A={found[name]} B={path}"
            )
        found[name] = path
    return found


def default_name(path: str) -> str:
    """Return the name of an index that is given none; "index" where its folder's cannot stand in an address."""
    name = Path(path.partition("?")[0]).absolute().name.removesuffix(".index")
    return name if _NAME.fullmatch(name) else "index"


def _name_of(index: Given) -> str:
    return default_name(str(index.path if isinstance(index, Index) else index))
