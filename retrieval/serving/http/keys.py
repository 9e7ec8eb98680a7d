"""API keys and roles: who asks, and what they may do.

A key is `rk_ID_SECRET`. The id is no secret: it finds the key's line in the file. The secret has 256 random bits, so
that nobody finds it by trying however fast its hash is: a salted HMAC-SHA256 is right here, where a password would
need a slow hash.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retrieval.errors import RetrievalError, listed
from retrieval.host.files import whole_file
from retrieval.serving.files.locks import hold
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.http.problems import RequestError
from retrieval.serving.http.settings import HEALTH, ROLES, Role, Settings

log = logging.getLogger("retrieval.serving.http")

VARIABLE = "RETRIEVAL_KEYS"
MAX_FILE_BYTES = 1_000_000
MAX_KEYS = 1_000
MAX_SENT = 200
"""Characters of a key that a request sends."""

_KEY = re.compile(r"rk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_HEAD = b"# Keys of `retrieval serve`, as salted hashes, one JSON object a line. See: retrieval keys --help\n"
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_Index = Annotated[str, Field(min_length=1, max_length=200)]


class Key(BaseModel):
    """What is kept of a key: a line of the file.

    Attributes:
        name: what the log and the record of changes call the key.
        role: what its holder may do.
        id: the key's own part that is no secret.
        salt: 16 random bytes, hexadecimal.
        hash: HMAC-SHA256 of the secret by the salt, hexadecimal.
        created: a date and time.
        indexes: names of the indexes that it opens; None: all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    role: Role
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: Annotated[str, Field(max_length=40)] = ""
    indexes: Annotated[tuple[_Index, ...], Field(strict=False, min_length=1, max_length=100)] | None = None

    def line(self) -> str:
        """Return the key's line of the file."""
        return json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False) + "\n"


class Keys(tuple[Key, ...]):
    """The keys of a file; no two of one name or id."""

    def find(self, sent: str) -> Key | None:
        """Return the key that was sent, or None. The time that takes says nothing of a secret."""
        parts = _KEY.fullmatch(sent) if len(sent) <= MAX_SENT else None
        key = next((key for key in self if parts and key.id == parts[1]), None)
        if parts is None or key is None:
            return None
        return key if hmac.compare_digest(_hash(key.salt, parts[2]), key.hash) else None


def new_key(name: str, role: Role, indexes: Iterable[str] = ()) -> tuple[str, Key]:
    """Make a key; return what its holder sends, and what is kept of it.

    Args:
        name: of the key.
        role: what its holder may do.
        indexes: names of the indexes that it opens; empty for all.

    Raises:
        RetrievalError: the name has characters that no key's name may have.
    """
    secret, salt, id = secrets.token_urlsafe(32), secrets.token_hex(16), secrets.token_hex(6)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        key = Key(name=name, role=role, id=id, salt=salt, hash=_hash(salt, secret), created=now, indexes=tuple(indexes) or None)  # fmt: skip
    except ValidationError as error:
        raise RetrievalError(f"This key cannot be made: {_problems(error)}.") from None
    return f"rk_{id}_{secret}", key


def _hash(salt: str, secret: str) -> str:
    return hmac.digest(bytes.fromhex(salt), secret.encode(), "sha256").hex()


def _problems(error: ValidationError) -> str:
    """Return what pydantic found, without the values: one may be somebody's key in the wrong place."""
    found = []
    for each in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
        where = ".".join(map(str, each["loc"][:1])) or "it"
        if where == "name" and each["type"] == "string_pattern_mismatch":
            found.append("name: it has letters, digits and . _ @ -, at most 64 of them, and begins with a letter or digit")  # fmt: skip
        else:
            found.append(f"{where}: {each['msg']}")
    return "; ".join(found)


# The file


def parse_keys(text: bytes, where: str) -> Keys:
    """Return the keys in a file's text.

    Args:
        text: a JSON object a line; empty lines and lines that begin with # say nothing. A text without any line is
            refused, since a file that is being written begins so.
        where: whose text it is, for errors.

    Raises:
        RetrievalError: names every line that is wrong, and none of its content.
    """
    if len(text) > MAX_FILE_BYTES:
        raise RetrievalError(
            f"{where} is too large for a file of keys: the limit is {MAX_FILE_BYTES:,} bytes."
        )
    if not text.strip():
        raise RetrievalError(f"{where} is empty. Make a key with: retrieval keys add NAME --output FILE")
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if _is_key(line)]
    if len(lines) > MAX_KEYS:
        raise RetrievalError(f"{where} has {len(lines):,} keys; the limit is {MAX_KEYS:,}.")
    keys: list[Key] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in lines:
        try:
            key = _parsed(line)
        except ValidationError as error:
            problems.append(f"line {number}: {_problems(error)}.")
        except ValueError:
            problems.append(f"line {number} is not a JSON object.")
        else:
            for what in (f"name {key.name}", f"id {key.id}"):
                if what in seen:
                    problems.append(f"line {number} has the {what} of line {seen[what]} again.")
                seen[what] = number
            keys.append(key)
    if problems:
        raise RetrievalError(listed(where, problems))
    return Keys(keys)


def read_keys(path: Path) -> Keys:
    """Return the keys in a file.

    Raises:
        RetrievalError: the file cannot be read, or a line of it is wrong.
    """
    return parse_keys(_read(path), str(path))


def add_key(path: Path, key: Key) -> None:
    """Add a key to a file, which is made where there is none.

    Raises:
        RetrievalError: the file has a key of this name, or cannot be read or written.
    """
    with hold(path, "changing these keys"):
        text = _read(path) if path.exists() else _HEAD
        if any(each.name == key.name for each in parse_keys(text, str(path))):
            raise RetrievalError(
                f"{path} has a key {key.name} already. Choose another name, or remove that one first."
            )
        text = text + (b"" if text.endswith(b"\n") else b"\n") + key.line().encode()
        parse_keys(text, str(path))  # refuses one key too many
        _write(path, text)


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file; the other lines stay as they are.

    Raises:
        RetrievalError: there is no such key, or the file cannot be read or written.
    """
    with hold(path, "changing these keys"):
        text = _read(path)
        names = sorted(each.name for each in parse_keys(text, str(path)))
        if name not in names:
            raise RetrievalError(f"{path} has no key {name}. It has: {', '.join(names[:20]) or 'none'}.")
        kept = [line for line in text.split(b"\n") if not _is_key(line) or _parsed(line).name != name]
        rest = b"\n".join(kept)
        _write(path, rest if rest.strip() else _HEAD)


def _is_key(line: bytes) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(b"#")


def _parsed(line: bytes) -> Key:
    return Key.model_validate(strict_loads(line))


def _read(path: Path) -> bytes:
    try:
        handle = os.open(path, _READ)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RetrievalError(f"{path} is not a regular file.")
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise RetrievalError(
            f"There is no file of keys {path}. Make one with: retrieval keys add NAME --output {path}"
        ) from None
    except OSError as error:
        raise RetrievalError(f"{path} cannot be read: {error.strerror or error}.") from None


def _write(path: Path, text: bytes) -> None:
    """Write the file whole. Its owner and mode stay: a server that may read it may go on reading it."""
    place = Path(os.path.realpath(path))
    with whole_file(place, RetrievalError, private=True) as temporary:
        temporary.write_bytes(text)
        if place.exists() and os.name == "posix":
            known = place.stat()
            if (known.st_uid, known.st_gid) != (os.getuid(), os.getgid()):
                os.chown(temporary, known.st_uid, known.st_gid)
            temporary.chmod(stat.S_IMODE(known.st_mode))


class KeySource:
    """The keys that a server knows now: read again when their file changes, kept when the new file is broken.

    Args:
        path: the file; None where `text` is given.
        text: of an environment variable.

    Attributes:
        keys: those that are known now.

    Raises:
        RetrievalError: the file or text cannot be used.
    """

    def __init__(self, path: Path | None, text: str = "") -> None:
        self.path = path
        self._read = self._seen = self._stamp()
        self.keys = parse_keys(text.encode(), VARIABLE) if path is None else read_keys(path)

    def look(self) -> None:
        """Read a file that has changed and was the same twice in a row: nobody writes it any more. For a thread."""
        if self.path is None:
            return
        before, self._seen = self._seen, self._stamp()
        if self._seen != before or self._seen == self._read:
            return
        self._read = self._seen
        try:
            self.keys = read_keys(self.path)
        except RetrievalError as error:
            log.warning("The keys stay as they were. %s", error)
        else:
            count = "1 key" if len(self.keys) == 1 else f"{len(self.keys):,} keys"
            log.warning("Read %s again; it has %s.", self.path, count)

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            known = None if self.path is None else self.path.stat()
        except OSError:
            return None
        return known and (known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns)


def key_source(path: Path | None) -> KeySource | None:
    """Return where keys come from: a file, the environment variable RETRIEVAL_KEYS (a path or the text itself), or nowhere.

    Raises:
        RetrievalError: both are given, or what is given cannot be used.
    """
    text = os.environ.get(VARIABLE, "")
    if path is not None and text:
        raise RetrievalError(
            f"Keys are given twice: by --keys and by the environment variable {VARIABLE}. Give one of them."
        )
    if text and not text.lstrip().startswith(("{", "#")):
        path = Path(text)
    return KeySource(path, text) if path is not None or text else None


# Roles

_FREE = re.compile(r"/|/page(?:-part|-edit)?\.(?:css|js)|/livez|/readyz|/v1/openapi\.json")
_SEARCHES = re.compile(r"/v1(?:/indexes/[^/]+)?/search(?:/batch)?")
_ADMIN = re.compile(r"/metrics|/v1(?:/indexes/[^/]+)?/snapshots")
_DOES = {
    "read": "searching and looking",
    "write": "adding, changing and deleting",
    "admin": "snapshots and figures",
}


def is_free(method: str, path: str) -> bool:
    """Return whether a request takes no key: for the page, which is code and no data, and for health."""
    return method in ("GET", "HEAD") and _FREE.fullmatch(path) is not None


@lru_cache(64)
def needed_role(method: str, path: str, keyed: bool) -> Role:
    """Return the role that a request takes; metrics are for everybody where there are no keys."""
    if path == "/metrics" and not keyed:
        return "read"
    if _ADMIN.fullmatch(path):
        return "admin"
    if method in ("GET", "HEAD") or (method == "POST" and _SEARCHES.fullmatch(path)):
        return "read"
    return "write"


@dataclass(frozen=True)
class Caller:
    """Who has sent a request.

    Attributes:
        name: the key's; empty without a key.
        role: what they may do; None: nothing.
        address: where the request came from.
        indexes: names of the indexes that they may use; None: all.
        keyed: whether the server has keys.
    """

    name: str
    role: Role | None
    address: str
    indexes: tuple[str, ...] | None = None
    keyed: bool = True

    def require(self, role: Role) -> None:
        """Refuse a caller who may not do so much.

        Raises:
            RequestError: 401, a key is needed; 403, a key with another role is, or the server has none.
        """
        if self.role is not None and ROLES.index(self.role) >= ROLES.index(role):
            return
        if not self.keyed:
            raise RequestError(
                403, "This server is read-only. Its operator can allow changes with keys, or with --open."
            )
        if not self.name:
            sentence = (
                f"A key is needed for {_DOES[role]}. Send one in the header: Authorization: Bearer KEY."
            )
            raise _unauthorised(sentence)
        asked = f'Bearer realm="retrieval", error="insufficient_scope", scope="{role}"'
        raise RequestError(
            403,
            f"This key has the role {self.role}; {_DOES[role]} takes a key with the role {role}.",
            headers={"WWW-Authenticate": asked},
        )

    def may_use(self, index: str) -> bool:
        """Return whether an index is one of theirs."""
        return self.indexes is None or index in self.indexes


class Access:
    """Says who sends a request, and refuses what they may not do.

    Args:
        settings: what everybody may do.
        source: of the keys; None: there are none.
    """

    def __init__(self, settings: Settings, source: KeySource | None) -> None:
        self.source = source
        self._open: Role | None = settings.open or (None if source is not None else "read")
        self._health_port = settings.health_port

    def admit(self, scope: Any, authorization: list[bytes]) -> Caller:
        """Return who has sent a request.

        Args:
            scope: of ASGI.
            authorization: the values of that header.

        Raises:
            RequestError: 401 or 403.
        """
        address, method, path = (scope.get("client") or ("",))[0], scope["method"], scope["path"]
        nobody = Caller("", self._open, address, keyed=self.source is not None)
        on_health_port = self._health_port is not None and scope["server"][1] == self._health_port
        if is_free(method, path) or (on_health_port and path in HEALTH):
            return nobody
        caller = self._holder(address, authorization) if self.source and authorization else nobody
        caller.require(needed_role(method, path, self.source is not None))
        return caller

    def _holder(self, address: str, authorization: list[bytes]) -> Caller:
        assert self.source is not None
        scheme, _, sent = authorization[0].partition(b" ")
        if len(authorization) > 1 or scheme.lower() != b"bearer" or len(sent) > MAX_SENT:
            sentence = "The header Authorization cannot be read. Send it once, as: Bearer KEY."
            raise _unauthorised(sentence, ', error="invalid_request"')
        key = self.source.keys.find(sent.strip().decode("latin-1"))
        if key is None:
            sentence = "This key is not known here. Ask the server's operator for one."
            raise _unauthorised(sentence, ', error="invalid_token"')
        return Caller(key.name, key.role, address, key.indexes)


def _unauthorised(sentence: str, error: str = "") -> RequestError:
    return RequestError(401, sentence, headers={"WWW-Authenticate": f'Bearer realm="retrieval"{error}'})
