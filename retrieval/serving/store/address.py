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
"""Scheme of folders: `local:///data/photos.index` is the folder `/data/photos.index`."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9_.+-]+)://(.*)", re.DOTALL)
_PATH_OF_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]+:/[^/]")
_SECRET = re.compile(
    r"token|passw|pwd|secret|credential|auth|user|(^|[_-])key$|apikey", re.IGNORECASE
)
_MAX_CHARACTERS = 2000
_MAX_OPTIONS = 50


@dataclass(frozen=True)
class Address:
    """The parsed address of an index. It never holds a secret: `parse` refuses those that do.

    Attributes:
        text: the whole address, also `str(address)`.
        scheme: short name of the store, or `PLUGIN.name` in full.
        host: host name, or None if the address has none, as in `journal:///data/photos`.
        port: port number, or None.
        path: decoded path with its leading slash, such as `/photos`; may be empty.
        options: query parameters by name. Numbers, true, false and null are parsed, the rest is
            text.
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
        """Last component of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address.

        Raises:
            StoreError: `text` is not an address, or it holds a name, password or token; the
                message does not repeat those.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise StoreError(f"'{text}' is no address: write SCHEME://HOST:PORT/NAME.")
        if match[1].lower() in ("http", "https"):
            raise StoreError(
                "A search server is no index that can be opened: ask it with"
                " retrieval.client.Client(URL).search(…), and add to it with 'retrieval push'."
            )
        scheme, rest = match[1], match[2]
        _refuse_secrets(scheme, rest)
        where, _, query = rest.partition("?")
        if len(text) > _MAX_CHARACTERS or not text.isprintable():
            raise StoreError(
                f"An address of {scheme}:// has at most {_MAX_CHARACTERS:,} printable characters; "
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
"""Location of an index: a folder or an address."""


def place_of(place: StrPath | Address) -> IndexPlace:
    """Return the folder or address that a user names, in Python or on the command line.

    Args:
        place: path of a folder, as text or `Path`, or an address as text.

    Raises:
        StoreError: the address is invalid (see `Address.parse`), or it was passed as a `Path`,
            which drops one of its slashes.
    """
    if isinstance(place, Address):
        return place
    if isinstance(place, str) and (match := _ADDRESS.fullmatch(place)):
        if match[1] not in (LOCAL, f"core.{LOCAL}"):
            return Address.parse(place)
        path, mark, _ = match[2].partition("?")
        if mark or not path:
            raise StoreError(f"{place} names no folder: write {LOCAL}:///PATH, or the path alone.")
        return Path(unquote(path))
    path_text = os.fspath(place)
    if (
        not isinstance(place, str)
        and _PATH_OF_ADDRESS.match(path_text)
        and not Path(path_text).parent.exists()
    ):
        raise StoreError(
            f"'{path_text}' looks like an address that was made a Path, which loses a slash. "
            "Give addresses as text."
        )
    return Path(path_text)


def _refuse_secrets(scheme: str, rest: str) -> None:
    """Refuse a user name, password or token, since addresses are printed, logged and stored."""
    where, _, query = rest.partition("?")
    names = [part.partition("=")[0] for part in query.split("&")]
    if "@" in where or any(_SECRET.search(unquote(name)) for name in names):
        raise StoreError(
            "An address holds no names, passwords or tokens, since it is printed and logged: write"
            f" {scheme}://HOST:PORT/NAME, and give {scheme} its token by the environment variable"
            " that its documentation names. (An @ in a name is written %40.)"
        )


def _options(text: str, query: str) -> dict[str, Any]:
    """Parse the query string of an address."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_OPTIONS
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
    """Parse a number, true, false or null; return anything else as text."""
    try:
        value = json.loads(text, parse_constant=lambda word: text)
    except (ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, bool | int | float) else text
