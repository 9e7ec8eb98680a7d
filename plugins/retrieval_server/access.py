"""Access control: allowed hosts, cross-site requests, API keys and their roles."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from retrieval_server.keys import MAX_SENT, KeySource
from retrieval_server.problems import RequestError
from retrieval_server.settings import HEALTH, PAGE_FILES, ROLES, Role, Settings

_KEYLESS = {*PAGE_FILES, "/livez", "/readyz", "/v1/openapi.json"}
_READS = re.compile(r"/v1(?:/indexes/[^/]+)?/(?:search(?:/batch)?|identify|encode|embeddings)")
_FEEDBACK = re.compile(r"/v1(?:/indexes/[^/]+)?/feedback")
_ADMIN = re.compile(r"/metrics|/v1(?:/indexes/[^/]+)?/snapshots")
_CLOSE = {"Connection": "close"}
# What each role permits, in words for messages.
_TASKS = {
    "read": "searching and looking",
    "feedback": "marking hits",
    "write": "adding, changing and deleting",
    "admin": "snapshots and metrics",
}


def is_free(method: str, path: str) -> bool:
    """Return whether a request needs no key: health checks, web page and OpenAPI document."""
    return method in ("GET", "HEAD") and path in _KEYLESS


def needed_role(method: str, path: str, keyed: bool) -> Role:
    """Return the role that a request needs.

    Metrics need the role "admin", or only "read" if the server has no keys (`keyed` is False).
    """
    if path == "/metrics" and not keyed:
        return "read"
    if _ADMIN.fullmatch(path):
        return "admin"
    if method in ("GET", "HEAD") or (method == "POST" and _READS.fullmatch(path)):
        return "read"
    if method == "POST" and _FEEDBACK.fullmatch(path):
        return "feedback"
    return "write"


class Caller(NamedTuple):
    """The sender of a request.

    Attributes:
        name: name of the sender's API key; empty without a key.
        role: role of the sender; `None` permits nothing.
        address: IP address that the request came from.
        indexes: names of the indexes that the sender may use; `None` permits all.
        keyed: whether the server has keys.
    """

    name: str
    role: Role | None
    address: str
    indexes: tuple[str, ...] | None = None
    keyed: bool = True

    def require(self, role: Role) -> None:
        """Raise a RequestError if the caller lacks a role: 401 without a key, 403 with one."""
        if self.role is not None and ROLES.index(self.role) >= ROLES.index(role):
            return
        if not self.keyed:
            raise RequestError(
                403,
                "This server is read-only. Its operator can allow changes with keys, or with"
                " --open.",
            )
        if not self.name:
            raise _unauthorised(
                f"A key is needed for {_TASKS[role]}. Send one in the header: Authorization: Bearer"
                " KEY."
            )
        needed = f"{_TASKS[role]} need a key with the role {role}"
        raise RequestError(403, f"This key has the role {self.role}; {needed}.")

    def may_use(self, index: str) -> bool:
        """Return whether the caller may use an index."""
        return self.indexes is None or index in self.indexes


class Access:
    """Identifies the sender of a request by its API key, and checks the sender's permissions.

    Args:
        settings: settings of the server.
        source: the server's keys, or `None`.
    """

    def __init__(self, settings: Settings, source: KeySource | None) -> None:
        self._settings = settings
        self._source = source
        self._keyless_role = settings.open
        if settings.open is None and source is None:
            self._keyless_role = "feedback" if settings.feedback else "read"

    def admit(self, scope: Any) -> Caller:
        """Return the sender of an ASGI request.

        Raises:
            RequestError: 400 or 421 if the request has no host or one that the server does not
                answer for; 404 for a path that the health port does not serve; 401 or 403 if the
                sender lacks permission.
        """
        method = scope["method"]
        path = scope["path"]
        headers = dict(scope["headers"])
        client = scope.get("client")
        address = ""
        if client:
            address = client[0]
        keyed = self._source is not None
        caller = Caller("", self._keyless_role, address, keyed=keyed)
        host = headers.get(b"host", b"").decode("latin-1")
        if not host and scope["http_version"] == "1.1":
            raise RequestError(400, "The request has no Host.", headers=_CLOSE)
        health_port = self._settings.health_port
        if health_port is not None and scope["server"][1] == health_port:
            # Monitors may use any host name, because this port shows no items.
            if path not in HEALTH:
                sentence = f"This port answers {', '.join(HEALTH)} only."
                raise RequestError(404, sentence, headers=_CLOSE)
            return caller
        if host and not self._is_our_name(host):
            sentence = (
                "The server does not answer for this host name. Its operator can add names with"
                " --allow-host."
            )
            raise RequestError(421, sentence, headers=_CLOSE)
        if method not in ("GET", "HEAD"):
            self._refuse_other_sites(host, headers)
        # A browser shows the page before anybody can type a key into it.
        if is_free(method, path):
            return caller
        authorization = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._source is not None and authorization:
            caller = _holder(self._source, address, authorization)
            # Set before the role is checked, so that the log names the key that is refused.
            scope["retrieval.caller"] = caller
        caller.require(needed_role(method, path, keyed))
        return caller

    def _refuse_other_sites(self, host: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise a RequestError 403 for a request from another site's page."""
        # Browsers send these headers; a program that sends neither obeys no other site's page.
        foreign = headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none")
        if b"origin" in headers:
            site = headers[b"origin"].decode("latin-1").partition("://")[2]
            ours = site.lower() == host.lower() or _name(site) in (self._settings.hosts or ())
            foreign = foreign or not ours
        if foreign:
            raise RequestError(403, "The request comes from another site's page.", headers=_CLOSE)

    def _is_our_name(self, host: str) -> bool:
        """Return whether the server answers for a host name; this prevents DNS rebinding."""
        hosts = self._settings.hosts
        name = _name(host)
        # A page of another site can let its own name point here, but not an address or localhost.
        return hosts is None or name in hosts or name == "localhost" or _is_address(name)


def plain_address(address: str) -> str:
    """Strip the `::ffff:` of a dual-stack socket from an IPv4 address."""
    mapped = address.lower().removeprefix("::ffff:")
    if "." in mapped:
        return mapped
    return address


def _name(host: str) -> str:
    """Return the name in a `Host` header in lower case, without port and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _holder(source: KeySource, address: str, authorization: list[bytes]) -> Caller:
    scheme, _, sent = authorization[0].partition(b" ")
    if len(authorization) > 1 or scheme.lower() != b"bearer" or len(sent) > MAX_SENT:
        sentence = "The header Authorization is invalid. Send one such header: Bearer KEY."
        raise _unauthorised(sentence)
    key = source.keys.find(sent.strip().decode("latin-1"))
    if key is None:
        sentence = "This server does not know this key. Ask its operator for a key."
        raise _unauthorised(sentence)
    if key.expired:
        raise _unauthorised(f"This key expired at {key.expires}. Ask the operator for another.")
    return Caller(key.name, key.role, address, key.indexes)


def _unauthorised(sentence: str) -> RequestError:
    return RequestError(401, sentence, headers={"WWW-Authenticate": 'Bearer realm="retrieval"'})
