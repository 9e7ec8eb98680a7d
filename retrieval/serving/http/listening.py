"""Where a server listens, what it is called, and what settings must be before it starts."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.http.keys import key_source
from retrieval.serving.http.settings import Settings
from retrieval.serving.store.address import place_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_RULE = "A name has 1 to 100 letters, digits, dots, dashes and underscores, and begins with a letter or digit"


def checked(settings: Settings, host: str) -> Settings:
    """Return settings with hosts and proxies as requests are compared with them.

    Raises:
        RetrievalError: a setting is wrong, or others could reach a server without keys.
    """
    for option, folders in (("--images", settings.images), ("--snapshots", [settings.snapshots])):
        for folder in folders:
            if folder is not None and not folder.is_dir():
                raise StoreError(f"There is no folder {folder}, which {option} names. Make it first.")
    proxies = tuple(_proxy(each) for each in settings.proxies)
    if key_source(settings.keys) is None and settings.open is None:
        where = "through a proxy (--proxy-header-from)" if proxies else f"at {host}"
        if proxies or not _is_loopback(host):
            raise StoreError(
                f"This server has no keys, and others could reach it {where}. Make keys (retrieval keys add NAME "
                "--output KEYS) and name them with --keys KEYS, or say with --open read what everybody may do."
            )
    names = {_host(each) for each in settings.hosts or ()}
    return replace(
        settings,
        hosts=tuple(sorted({*names, host.lower(), socket.gethostname().lower()})),
        proxies=proxies,
    )


def _host(text: str) -> str:
    """Return a name as it is compared with a request's Host.

    Raises:
        RetrievalError: no request could ever name it.
    """
    if not _HOST.fullmatch(text.lower()):
        raise RetrievalError(
            f"--allow-host takes a host name as clients write it, such as photos.example: no scheme, port or star. "
            f"'{text}' would never match."
        )
    return text.lower().removesuffix(".")


def _proxy(text: str) -> str:
    """Return an address or network as it is compared.

    Raises:
        RetrievalError: it is none.
    """
    try:
        network = ipaddress.ip_network(plain_address(text))
    except ValueError:
        raise RetrievalError(
            "--proxy-header-from takes the address of a proxy or its network, such as 10.0.0.5 or 10.0.0.0/24, "
            f"not '{text}'."
        ) from None
    return str(network) if "/" in text else str(network.network_address)


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host's addresses; an unknown host is nobody's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens.

    Raises:
        StoreError: it cannot.
    """
    if not isinstance(port, int) or not 0 <= port < 2**16:
        raise StoreError(
            f"{option} is a whole number from 0, which takes a free port, to 65535, not {port!r}."
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StoreError(
            f"Cannot listen on {host}: {error.strerror or error}. --host takes an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
        ) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        listener.close()
        advice = f"Choose another port with {option}."
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            advice = "No network interface of this machine has that address: use 127.0.0.1, or 0.0.0.0 for all, with --host."
        raise StoreError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}. {advice}"
        ) from None
    return listener


# Names of indexes


def named(given: Iterable[str]) -> dict[str, str]:
    """Return indexes by name, from texts `PATH` and `NAME=PATH`: without a name it is the folder's, less `.index`.

    Raises:
        StoreError: a name that none can have, or one given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists() or "/" in name:
            name, path = default_name(text), text
        place_of(path)  # refuses an address that holds a secret, before anything repeats it
        if not _NAME.fullmatch(name):
            raise StoreError(f"An index cannot be called {name[:100]!a}. {_RULE}.")
        if name in found:
            raise StoreError(
                f"Two indexes are called '{name}': {found[name]} and {path}. "
                f"Name them: retrieval serve A={found[name]} B={path}"
            )
        found[name] = path
    return found


def default_name(path: str) -> str:
    """Return the name of an index that is given none; "index" where its folder's cannot stand in an address."""
    name = Path(path.partition("?")[0]).absolute().name.removesuffix(".index")
    return name if _NAME.fullmatch(name) else "index"


def plain_address(address: str) -> str:
    """Return an IPv4 address that a dual-stack socket gives as `::ffff:127.0.0.1` as it is; others unchanged."""
    mapped = address.lower().removeprefix("::ffff:")
    return mapped if "." in mapped else address
