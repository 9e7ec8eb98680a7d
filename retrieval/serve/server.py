"""Run the application under uvicorn until it is told to stop."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from retrieval.bundle import Device
from retrieval.decoders import Decoders
from retrieval.errors import MissingDependency, StoreError
from retrieval.images import Limits
from retrieval.index.store import Index

_GRACE = 10  # seconds for requests that are under way when the server is stopped


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int | None = None,
    max_pixels: int = Limits.pixels,
    max_bytes: int = Limits.bytes,
    plugins: Sequence[str] = (),
    device: Device = "auto",
) -> None:
    """Serve an index until SIGINT or SIGTERM; requests under way are finished first.

    Args:
        path: the index folder.
        host: the address to listen on.
        port: 0 takes a free one, which is printed.
        workers: searches at a time; as many as there are cores by default.
        max_pixels: larger query images are refused.
        max_bytes: larger query files are refused.
        plugins: files or modules of a third-party back end.
        device: of the encoder.

    Raises:
        MissingDependency: the extra `serve` is not installed.
        StoreError: the index cannot be used, or the address cannot be listened on.
    """
    for module in ("uvicorn", "starlette", "python_multipart"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingDependency(
                f"Serving needs {module.replace('_', '-')}. Install it with: pip install 'embedding-retrieval[serve]'"
            ) from None
    import uvicorn

    from retrieval.serve.app import create_app
    from retrieval.serve.searcher import Searcher

    cores = os.cpu_count() or 1
    workers = workers or cores
    listener = _listen(host, port)
    with (
        listener,
        Index.open(Path(path), threads=max(1, cores // workers), device=device, plugins=plugins) as index,
    ):
        decoders = Decoders(
            index.bundle.manifest.input.preprocessing,
            workers=workers,
            limits=Limits(max_pixels, max_bytes),
        )
        app = create_app(Searcher(index, workers, decoders))
        config = uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=_GRACE,
            limit_concurrency=512,
            server_header=False,
        )
        shown = f"[{host}]" if ":" in host else host
        print(
            f"Serving {len(index):,} items at http://{shown}:{listener.getsockname()[1]}/ (Ctrl-C stops)",
            flush=True,
        )
        if threading.current_thread() is threading.main_thread():
            # uvicorn shuts down in good order, then raises the signal again: that must not count as a failure.
            signal.signal(signal.SIGTERM, _leave)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as fault:
        raise StoreError(f"Cannot listen on {host}: {fault.strerror or fault}.") from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as fault:
        listener.close()
        raise StoreError(
            f"Cannot listen on {host}, port {port}: {fault.strerror or fault}. Choose another one with --port."
        ) from None
    return listener


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
