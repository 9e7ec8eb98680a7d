"""Where a server listens: its sockets, how many connections they may have, and who can reach them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.http.settings import Settings

_FILES = 256  # descriptors besides connections: the index, the gallery, libraries, pipes


def require_keys(host: str, settings: Settings, has_keys: bool) -> None:
    """Refuse to listen where others can reach a server that asks for no key.

    Raises:
        StoreError: there are no keys, and nobody said that there need be none.
    """
    if has_keys or settings.open is not None:
        return
    where = "through a proxy (--proxy-header-from)" if settings.proxies else f"at {host}"
    if settings.proxies or not _is_loopback(host):
        raise StoreError(
            f"This server has no keys, and others could reach it {where}. Make keys (retrieval keys add NAME --output KEYS) and name "
            "them with --keys KEYS, or say with --open read what everybody may do."
        )


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host's addresses; an unknown host is nobody's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def check_proxies(proxies: Iterable[str]) -> tuple[str, ...]:
    """Return addresses and networks as they are compared.

    Raises:
        RetrievalError: one of them is none.
    """
    found = []
    for each in proxies:
        try:
            network = ipaddress.ip_network(each)
        except ValueError:
            raise RetrievalError(
                f"--proxy-header-from takes the address of a proxy or its network, such as 10.0.0.5 or 10.0.0.0/24, not '{each}'."
            ) from None
        found.append(str(network) if "/" in each else each)
    return tuple(found)


def allow_files(connections: int) -> None:
    """Raise the limit on open files as far as so many connections need it.

    Raises:
        StoreError: the system does not allow as many.
    """
    if os.name != "posix":
        return
    import resource

    wanted = connections + _FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise StoreError(
                f"This process may open {hard:,} files, and {wanted:,} are needed: {_FILES} besides one for each "
                "connection. Raise the limit (ulimit -Hn, LimitNOFILE= of systemd), or lower --connections."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    except OSError as fault:
        raise StoreError(
            f"Cannot listen on {host}: {fault.strerror or fault}. --host takes an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
        ) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as fault:
        listener.close()
        wrong_host = fault.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        advice = (
            "No network interface of this machine has that address: use 127.0.0.1, or 0.0.0.0 for all, with --host."
            if wrong_host
            else f"Choose another port with {option}."
        )
        raise StoreError(
            f"Cannot listen on {host}, port {port}: {fault.strerror or fault}. {advice}"
        ) from None
    return listener
