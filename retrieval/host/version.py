"""The installed version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return this distribution's version; "0" in a source tree that was never installed."""
    try:
        return version("embedding-retrieval")
    except PackageNotFoundError:
        return "0"
