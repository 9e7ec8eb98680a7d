"""Where an index is: a folder, or an address such as `milvus://host:19530/photos?timeout=5`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from retrieval.errors import StoreError
from retrieval.serving.files.places import StrPath

LOCAL = "local"
"""The scheme of folders: `local:///data/photos.index` is `/data/photos.index`."""
_FORM = re.compile(r"([A-Za-z][A-Za-z0-9_.+-]+)://(.*)", re.DOTALL)
_EATEN = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]+:/[^/]")
_SECRET = re.compile(
    r"token|passw|pwd|secret|credential|auth|user|(^|[_-])key$|apikey", re.IGNORECASE
)
_LONGEST = 2000
_OPTIONS = 50


@dataclass(frozen=True)
class Address:
    """An address that was parsed. Its text holds no secret: `parse` refuses those that do.

    Attributes:
        text: the whole address; `str` gives it too.
        scheme: name of the store, or `PLUGIN.name` in full.
        host: None where there is none, as in `journal:///data/photos`.
        port: None where there is none.
        path: behind the host, with its first slash, decoded: `/photos`; empty where there is none.
        options: values behind `?` by name: numbers, true, false and null as such, the rest as text.
    """

    text: str
    scheme: str
    host: str | None = None
    port: int | None = None
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address.

        Raises:
            StoreError: it is none; or it holds a password or the like, which is not repeated.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise StoreError(f"'{text}' is no address: write SCHEME://HOST:PORT/NAME.")
        scheme, rest = match[1], match[2]
        _refuse_secrets(scheme, rest)
        where, _, query = rest.partition("?")
        if len(text) > _LONGEST or not text.isprintable():
            raise StoreError(
                f"An address of {scheme}:// has at most {_LONGEST:,} printable characters; "
                "this one is longer, or has others."
            )
        authority, slash, path = where.partition("/")
        try:
            parts = urlsplit(f"//{authority}")
            host, port = parts.hostname, parts.port
        except ValueError as fault:
            raise StoreError(f"{text} is no address: {fault}.") from None
        if "#" in where:
            raise StoreError(f"{text} is no address: it has a '#'. Write %23 for one in a name.")
        return cls(text, scheme, host or None, port, unquote(slash + path), _options(text, query))


IndexPlace: TypeAlias = "Path | Address"
"""Where an index is."""


def place_of(place: StrPath | Address) -> IndexPlace:
    """Return the folder or address that a user names, in Python or on the command line.

    Args:
        place: the path of a folder, as text or `Path`; or an address, as text.

    Raises:
        StoreError: see `Address.parse`; or an address was made a `Path`, which loses a slash.
    """
    if isinstance(place, Address):
        return place
    if isinstance(place, str) and (match := _FORM.fullmatch(place)):
        if match[1] not in (LOCAL, f"core.{LOCAL}"):
            return Address.parse(place)
        path, mark, _ = match[2].partition("?")
        if mark or not path:
            raise StoreError(f"{place} names no folder: write {LOCAL}:///PATH, or the path alone.")
        return Path(unquote(path))
    path_text = os.fspath(place)
    if (
        not isinstance(place, str)
        and _EATEN.match(path_text)
        and not Path(path_text).parent.exists()
    ):
        raise StoreError(
            f"'{path_text}' looks like an address that was made a Path, which loses a slash. "
            "Give addresses as text."
        )
    return Path(path_text)


def _refuse_secrets(scheme: str, rest: str) -> None:
    """Refuse a name, password or token: an address is printed, logged and kept."""
    where, _, query = rest.partition("?")
    names = [part.partition("=")[0] for part in query.split("&")]
    if "@" in where or any(_SECRET.search(unquote(name)) for name in names):
        raise StoreError(
            "An address holds no names, passwords or tokens, since it is printed and logged: write"
            f" {scheme}://HOST:PORT/NAME, and give {scheme} its token by the environment variable"
            " that its documentation names. (An @ in a name is written %40.)"
        )


def _options(text: str, query: str) -> dict[str, Any]:
    """Return what stands behind `?`."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, strict_parsing=True, max_num_fields=_OPTIONS
        )
    except ValueError:
        raise StoreError(
            f"{text}: write what stands behind '?' as name=value&name=value."
        ) from None
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name in options:
            raise StoreError(f"{text} says '{name}' twice.")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    """Return a number, true, false or null as such, anything else as text."""
    try:
        value = json.loads(text, parse_constant=lambda word: text)
    except (ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, bool | int | float) else text
