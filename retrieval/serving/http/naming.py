"""What the indexes of a server are called in its addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.store.address import place_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RULE = "A name has 1 to 100 letters, digits, dots, dashes and underscores, and begins with a letter or digit"


def named(given: Iterable[str]) -> dict[str, str]:
    """Return indexes by name, from texts `PATH` and `NAME=PATH`: without a name, it is the folder's, less `.index`.

    Raises:
        StoreError: a name that none can have, or one given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists() or "/" in name:
            name, path = default_name(text), text
        place_of(path)  # refuses an address that holds a secret, before anything repeats it
        check_name(name)
        if name in found:
            raise StoreError(
                f"Two indexes are called '{name}': {found[name]} and {path}. Name them: retrieval serve A={found[name]} B={path}"
            )
        found[name] = path
    return found


def default_name(path: str) -> str:
    """Return what an index is called that has been given no name; "index" where its folder's cannot be used alone."""
    name = Path(path.partition("?")[0]).absolute().name.removesuffix(".index")
    return name if _NAME.fullmatch(name) else "index"


def check_name(name: str) -> None:
    """Refuse what no index can be called.

    Raises:
        StoreError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(f"An index cannot be called {name[:100]!a}. {_RULE}.")
