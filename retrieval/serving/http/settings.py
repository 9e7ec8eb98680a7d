"""Every limit of the server in one place: the command line's options, their help and their defaults are made of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["read", "write", "admin"]
"""Search and look; change items; change what the operator sees of the index, such as its snapshots. Each may do what those before it may."""

HEALTH = ("/livez", "/readyz", "/metrics")
"""Addresses for monitors: some connections are kept for them, and `health_port` answers nothing else."""


MOST_PROCESSES = 128


def _limit(default: Any, least: float, text: str, most: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """What one server takes on at a time, and for how long.

    Attributes:
        workers: searches at a time.
        hosts: names that a request's `Host` may have besides localhost and IP addresses; None takes any.
        health_port: an additional port that answers what is in `HEALTH` only; None for none.
        images: folders whose files may be shown as items' images, besides those of an index that this user built here.
        log_format: "text" or "json": the log has a line for each request, for people or for programs; None: it has events only, as text.
        debug: whether the log holds tracebacks.
        snapshots: the folder that snapshots are written to; None for none.
        keys: file of API keys; None: what the environment variable RETRIEVAL_KEYS says, or there are none.
        open: the role that everybody has without a key; None: to read where there are no keys, else none.
        cors_origins: other sites whose pages may use the server.
        proxies: addresses and networks of proxies whose X-Forwarded-For is believed.
        certificate: file of the TLS certificate; None: no TLS.
        private_key: file of its private key; None: it is in the certificate's.
        audit: file in which changes are recorded; None: they are not.
    """

    workers: int = 1
    hosts: tuple[str, ...] | None = None
    health_port: int | None = None
    images: tuple[Path, ...] = ()
    log_format: Literal["text", "json"] | None = None
    debug: bool = False
    snapshots: Path | None = None
    keys: Path | None = None
    open: Role | None = None
    cors_origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    certificate: Path | None = None
    private_key: Path | None = None
    audit: Path | None = None
    processes: int = _limit(
        1, 1, "Processes that serve; each takes its share of what follows, and of --workers.", MOST_PROCESSES
    )
    max_pixels: int = _limit(25_000_000, 1, "Largest image.")
    max_bytes: int = _limit(20_000_000, 1, "Largest file.")
    deadline: float = _limit(8.0, 0.1, "Seconds from a complete request to its answer; then 503.")
    decode_seconds: float = _limit(5.0, 0.1, "Of these, for decoding an image; then it is refused, 422.")
    waiting: int = _limit(
        16,
        1,
        "Searches that may wait for each worker, or as many as have their turn within a second; then 503.",
    )
    together: int = _limit(
        32, 1, "Alike searches that have waited for a worker and are done at once; 1: one by one."
    )
    batch: int = _limit(100, 1, "Images or vectors of one request, searched for or added.")
    batch_bytes: int = _limit(64_000_000, 1, "Largest request of several images or vectors.")
    writes: int = _limit(16, 1, "Changes of an index that may wait for their turn; then 503.")
    connections: int = _limit(512, 8, "Connections at a time; then idle ones are closed, or 503.")
    connections_per_address: int = _limit(256, 1, "Of these, from one address.")
    idle_seconds: float = _limit(
        15.0, 0.5, "A connection that sends no complete header is closed after this."
    )
    body_seconds: float = _limit(60.0, 1, "A request must have arrived within this; then 408.")
    body_memory: int = _limit(256_000_000, 1_000_000, "Bytes that all bodies under way may hold; then 503.")
    requests_per_second: float = _limit(
        0.0, 0, "Requests a second of one key, or of one address without keys; 0 for no limit; then 429."
    )
    burst: int = _limit(0, 0, "Of these, at once after a pause; 0 for those of a second.")
    concurrent: int = _limit(0, 0, "Requests of one key or address at a time; 0 for no limit; then 429.")
    bytes_per_minute: int = _limit(
        0, 0, "Bytes that one key or address may send and receive; 0 for no limit; then 429."
    )
    probe_seconds: float = _limit(5.0, 0.1, "A search of the server's own is run this often, for readiness.")
    log_lines: int = _limit(
        200, 1, "Lines a second in the log about requests that were answered; others are counted."
    )
    grace: float = _limit(10.0, 3.0, "Seconds from SIGTERM to the end of the process, whatever hangs.")

    @property
    def changeable(self) -> bool:
        """Whether somebody may change an index: everybody, or holders of keys."""
        keyed = self.keys is not None or "RETRIEVAL_KEYS" in os.environ
        return keyed or self.open in ("write", "admin")
