"""Locations of indexes: folders, and addresses such as `milvus://host:19530/photos?timeout=5`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from retrieval.base.folder_kinds import StrPath
from retrieval.errors import StoreError

LOCAL = "local"
"""Scheme of folders: `local:///data/photos.index` names the folder `/data/photos.index`."""
INDEX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A name that an index has in URLs."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9_.+-]+)://(.*)", re.DOTALL)
_SECRET = re.compile(
    r"token|passw|pwd|secret|credential|auth|user|(^|[_-])key$|apikey", re.IGNORECASE
)


@dataclass(frozen=True)
class Address:
    """The parsed address of an index; `parse` refuses an address with a password or token.

    Attributes:
        text: the whole address, also `str(address)`.
        scheme: name of the store, `NAME` or in full `PLUGIN.NAME`.
        host: host name, or None if the address has none, as in `journal:///data/photos`.
        port: port number, or None.
        path: decoded path with its leading slash, such as `/photos`; may be empty.
        options: query parameters by name. Numbers, true, false and null are parsed; other values
            are text.
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
            StoreError: `text` is not an address, or it holds a user name, password or token, which
                the message does not repeat.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise StoreError(f"'{text}' is not an address. Write SCHEME://HOST:PORT/NAME.")
        if match[1].lower() in ("http", "https"):
            raise StoreError(
                "A search server cannot be opened as an index. Search it with"
                " retrieval.client.Client(URL).search(…), and add to it with 'retrieval push'."
            )
        scheme = match[1]
        rest = match[2]
        _refuse_secrets(scheme, rest)
        where, _, query = rest.partition("?")
        if not text.isprintable():
            raise StoreError(f"This {scheme}:// address has a character that is not printable.")
        authority, slash, path = where.partition("/")
        try:
            parts = urlsplit(f"//{authority}")
            host = parts.hostname
            port = parts.port
        except ValueError as fault:
            raise StoreError(f"{text} is not an address: {fault}.") from None
        if "#" in where:
            raise StoreError(
                f"{text} is not an address, because it has a '#'. Write a '#' in a name as %23."
            )
        return cls(text, scheme, host or None, port, unquote(slash + path), _options(text, query))


IndexPlace: TypeAlias = "Path | Address"
"""Location of an index: a folder or an address."""


def place_of(location: StrPath | Address) -> IndexPlace:
    """Return the folder or address that a user names, in Python or on the command line.

    Args:
        location: path of a folder, as text or `Path`, or an address as text.

    Raises:
        StoreError: the address is invalid, see `Address.parse`; or the path is not UTF-8.
    """
    if isinstance(location, Address):
        return location
    if isinstance(location, str) and (match := _ADDRESS.fullmatch(location)):
        if match[1] not in (LOCAL, f"core.{LOCAL}"):
            return Address.parse(location)
        path, mark, _ = match[2].partition("?")
        if mark or not path:
            raise StoreError(
                f"{location} names no folder. Write {LOCAL}:///PATH, or the path alone."
            )
        return folder_of(unquote(path))
    return folder_of(location)


def folder_of(path: StrPath) -> Path:
    """Return the path of an index's folder; raise a StoreError if it is not UTF-8."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        # SQLite cannot open it.
        sentence = f"The path {os.fspath(path)!a} is not valid UTF-8. Give the index another path."
        raise StoreError(sentence) from None
    return Path(path)


def _refuse_secrets(scheme: str, rest: str) -> None:
    """Raise a `StoreError` for a user name, password or token: addresses are printed and logged."""
    where, _, query = rest.partition("?")
    names = [part.partition("=")[0] for part in query.split("&")]
    if "@" in where or any(_SECRET.search(unquote(name)) for name in names):
        raise StoreError(
            "An address must not hold user names, passwords or tokens, since it is printed and"
            f" logged. Write {scheme}://HOST:PORT/NAME, and put the token of {scheme} into the"
            " environment variable that its documentation names. (Write an @ in a name as %40.)"
        )


def _options(text: str, query: str) -> dict[str, Any]:
    """Parse the query string of an address: numbers, true, false, null and text."""
    try:
        if query:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
        else:
            pairs = []
    except ValueError:
        raise StoreError(f"{text}: write the options after '?' as name=value&name=value.") from None
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name in options:
            raise StoreError(f"{text} has the option '{name}' twice.")
        options[name] = value
        with suppress(ValueError, RecursionError):
            plain = json.loads(value, parse_constant=lambda word: word)
            if plain is None or isinstance(plain, bool | int | float):
                options[name] = plain
    return options


def index_name(path: str) -> str:
    """Return the name of an index's folder, or "index" if a URL cannot hold it."""
    name = Path(path.partition("?")[0]).absolute().name.removesuffix(".index")
    if INDEX_NAME.fullmatch(name):
        return name
    return "index"
