"""What an operator can set of a server, and the limits that nobody has to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["read", "write", "admin"]
"""What a caller may do: search and look; also change items; also take snapshots and read metrics.
"""

ROLES: tuple[Role, ...] = ("read", "write", "admin")
HEALTH = ("/livez", "/readyz", "/metrics")
"""Addresses for monitors; the health port answers nothing else."""

MAX_PROCESSES = 128
JSON_BYTES = 2_000_000
BATCH_BYTES = 64_000_000
BODY_MEMORY = 256_000_000
"""Bytes that the bodies of all requests of one process may take together."""
BODY_SECONDS = 60.0
SEND_SECONDS = 20.0
GRACE_SECONDS = 10.0
"""From SIGTERM to the end of the process, whatever hangs."""
DRAIN_SECONDS = 6
"""Of these, for requests under way."""
PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """What one server takes on, and for whom.

    Attributes:
        workers: searches at a time in one process.
        processes: processes that serve.
        hosts: names that a request's `Host` may have besides localhost and IP addresses; None takes
            any.
        health_port: an additional port that answers `HEALTH` only; None for none.
        images: folders whose files may be shown as items' images.
        snapshots: the folder that snapshots are written to; None for none.
        keys: file of API keys; None: what the environment variable RETRIEVAL_KEYS says, or none.
        open: the role that everybody has without a key; None: to read where there are no keys, else
            none.
        audit: file in which changes are recorded; None: they are not.
        proxies: addresses and networks of proxies whose X-Forwarded-For is believed.
        log_format: a log line for each request, for people or for programs; None: only what goes
            wrong.
        max_pixels: of an image that is sent.
        max_bytes: of an image file that is sent.
        batch: images, vectors or items of one request.
        deadline: seconds from a complete request to its answer.
    """

    workers: int = 1
    processes: int = 1
    hosts: tuple[str, ...] | None = None
    health_port: int | None = None
    images: tuple[Path, ...] = ()
    snapshots: Path | None = None
    keys: Path | None = None
    open: Role | None = None
    audit: Path | None = None
    proxies: tuple[str, ...] = ()
    log_format: Literal["text", "json"] | None = None
    max_pixels: int = 25_000_000
    max_bytes: int = 20_000_000
    batch: int = 100
    deadline: float = 8.0

    @property
    def changeable(self) -> bool:
        """Whether somebody may change an index: everybody, or holders of keys."""
        keyed = self.keys is not None or "RETRIEVAL_KEYS" in os.environ
        return keyed or self.open in ("write", "admin")


def plain_address(address: str) -> str:
    """Return an IPv4 address without the `::ffff:` of a dual-stack socket; others unchanged."""
    mapped = address.lower().removeprefix("::ffff:")
    return mapped if "." in mapped else address
