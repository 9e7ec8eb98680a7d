"""The installed version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PROJECT = "embedding-retrieval"
"""The name of this distribution."""


def installed_version() -> str:
    """Return this distribution's version; "0" in a source tree that was never installed."""
    try:
        return version(PROJECT)
    except PackageNotFoundError:
        return "0"
