"""Settings that a server's operator chooses, and limits that are fixed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrieval.feedback import JUDGED_SECONDS, UNJUDGED_SECONDS

Role = Literal["read", "feedback", "write", "admin"]
"""Permissions of a caller: "read" for searching and reading items, "feedback" also for marking
hits, "write" also for changing items, and "admin" also for snapshots and metrics.
"""

ROLES: tuple[Role, ...] = ("read", "feedback", "write", "admin")
HEALTH = ("/livez", "/readyz", "/metrics")
"""Paths for monitoring; the health port answers only these."""

_SCRIPTS = (
    "address",
    "call",
    "duplicates",
    "edit",
    "feedback",
    "filter",
    "identify",
    "keys",
    "marks",
    "more",
    "part",
    "query",
)
PAGE_FILES = {
    "/": "page.html",
    "/duplicates": "page-duplicates.html",
    **{f"/{name}.css": f"{name}.css" for name in ("page", "page-duplicates")},
    "/page.js": "page.js",
    **{f"/page-{part}.js": f"page-{part}.js" for part in _SCRIPTS},
}
"""Files of the web pages by their paths, which need no key."""

MAX_PROCESSES = 128
JSON_BYTES = 2_000_000
JSON_BATCH_BYTES = 16_000_000
JSON_VALUES = 100_000
"""Maximum number of commas and opening brackets of a JSON body; it bounds time and memory."""
JSON_BATCH_VALUES = 500_000
BATCH_BYTES = 64_000_000
BODY_MEMORY = 256_000_000
"""Maximum memory of all request bodies of one process, in bytes."""
BODY_SECONDS = 60.0
SEND_SECONDS = 20.0
GRACE_SECONDS = 10.0
"""The process exits within this time after SIGTERM, even if a thread hangs."""
DRAIN_SECONDS = 6
"""Part of `GRACE_SECONDS` in which running requests may finish."""
PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """Limits and permissions of one server.

    Attributes:
        workers: number of concurrent searches per process.
        processes: number of server processes.
        hosts: names that a request's header `Host` may hold besides localhost and IP addresses.
            `None` allows any name.
        health_port: additional port that answers only `HEALTH`. `None` opens no such port.
        images: folders whose files the server may show as images of items.
        snapshots: folder for snapshots. `None` permits no snapshots.
        keys: file of API keys. `None` uses the environment variable RETRIEVAL_KEYS, if it is set.
        open: role of everybody without a key. `None` means no role if the server has keys;
            otherwise "feedback" if it takes feedback, and "read" if not.
        audit: file that records changes. `None` records none.
        proxies: addresses and networks of proxies whose X-Forwarded-For header is trusted.
        log_format: format of a log line per request, "text" or "json". `None` logs only problems.
        max_pixels: maximum number of pixels of an uploaded image.
        max_bytes: maximum size of an uploaded image file in bytes.
        batch: maximum number of images, vectors or items per request.
        deadline: time limit in seconds from the end of a request's body to the response.
        feedback: whether to keep searches and take marks on their hits.
        feedback_file: file of the feedback. `None` means `feedback.sqlite` in the index's folder.
        explore: while a challenger is on trial, the share of searches whose hits are interleaved.
        keep_searches: seconds for which a search without marks is kept.
        keep_marks: seconds for which a search with marks is kept, and its marks.
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
    feedback: bool = False
    feedback_file: Path | None = None
    explore: float = 0.5
    keep_searches: float = UNJUDGED_SECONDS
    keep_marks: float = JUDGED_SECONDS
