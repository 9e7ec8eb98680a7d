"""Create API keys, store their hashes in a file, and verify them.

A key is `rk_ID_SECRET`. The id is not secret; it identifies the key's line in the file. The secret
has 256 random bits, so it cannot be guessed, and a fast hash (salted HMAC-SHA256) is safe. Only
passwords need a slow hash.
"""

from __future__ import annotations

import codecs
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from retrieval.base.files import hold, whole_file
from retrieval.base.regular_files import read_plain
from retrieval.base.strict_json import strict_loads
from retrieval.errors import RetrievalError, listed, quantity

from retrieval_server.settings import Role

log = logging.getLogger("retrieval_server")

VARIABLE = "RETRIEVAL_KEYS"
MAX_FILE_BYTES = 1_000_000
MAX_SENT = 200
"""Maximum number of characters in a key that a request sends."""

_KEY = re.compile(r"rk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_HEAD = "# Keys of `retrieval serve`, as salted hashes; `retrieval keys` rewrites this file."
_Index = Annotated[str, Field(min_length=1, max_length=200)]


class Key(BaseModel):
    """The stored part of a key, which is one line of the file.

    Attributes:
        name: name of the key in the log and the record of changes.
        role: role of the key's holder.
        id: public part of the key.
        salt: 16 random bytes, hexadecimal.
        hash: HMAC-SHA256 of the secret, keyed with the salt, hexadecimal.
        created: date and time of creation.
        expires: date and time from which the key is refused; `None` never.
        indexes: names of the indexes that the key opens; `None` opens all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    role: Role
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    indexes: Annotated[tuple[_Index, ...], Field(min_length=1, max_length=100)] | None = None

    @property
    def expired(self) -> bool:
        """Whether the key is to be refused now."""
        return self.expires is not None and self.expires <= datetime.now(UTC)


class Keys(tuple[Key, ...]):
    """The keys of a file. Ids are unique; of the keys with one name, only the last may stay."""

    def find(self, sent: str) -> Key | None:
        """Return the key with the text `sent`, or `None`; resists timing attacks.

        The key may have expired.
        """
        if parts := _KEY.fullmatch(sent):
            for key in self:
                # The id is not secret, so only the comparison of the hashes takes constant time.
                if key.id == parts[1]:
                    if hmac.compare_digest(_hash(key.salt, parts[2]), key.hash):
                        return key
                    return None
        return None


def new_key(
    name: str, role: Role, indexes: Iterable[str] = (), lifetime: timedelta | None = None
) -> tuple[str, Key]:
    """Create a key; return the text for its holder and the part to store in the file.

    Raises:
        RetrievalError: the name or an index name is invalid, or the lifetime is 0.
    """
    if lifetime is not None and not lifetime:
        raise RetrievalError("A key that is valid for no time is of no use. Give it a longer time.")
    secret = secrets.token_urlsafe(32)
    salt = secrets.token_hex(16)
    id = secrets.token_hex(6)
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        key = Key(
            name=name,
            role=role,
            id=id,
            salt=salt,
            hash=_hash(salt, secret),
            created=now,
            expires=None if lifetime is None else now + lifetime,
            indexes=tuple(indexes) or None,
        )
    except ValidationError as error:
        raise RetrievalError(f"This key cannot be created: {_problems(error)}.") from None
    return f"rk_{id}_{secret}", key


def _hash(salt: str, secret: str) -> str:
    return hmac.digest(bytes.fromhex(salt), secret.encode(), "sha256").hex()


def _problems(error: ValidationError) -> str:
    """Describe pydantic's errors without any value, because a value may be a secret."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)[:5]
    problems = []
    for fault in faults:
        member = ".".join(map(str, fault["loc"][:1])) or "it"
        message = fault["msg"]
        if member == "name" and fault["type"] == "string_pattern_mismatch":
            message = (
                "it must have at most 64 characters, only letters, digits and . _ @ -, and begin"
                " with a letter or digit"
            )
        problems.append(f"{member}: {message}")
    return "; ".join(problems)


# The file


def parse_keys(text: bytes, where: str) -> Keys:
    """Parse keys from text with one JSON object per line; lines that begin with `#` are comments.

    An empty text is refused, because another process may still be writing the file.

    Raises:
        RetrievalError: lines are invalid; the message names all of them without their content.
    """
    if len(text) > MAX_FILE_BYTES:
        raise RetrievalError(f"{where} is too large: the limit is {MAX_FILE_BYTES:,} bytes.")
    if not text.strip():
        advice = "Create a key with: retrieval keys add NAME --output FILE"
        raise RetrievalError(f"{where} is empty. {advice}")
    # Editors on Windows write a byte-order mark.
    text = text.removeprefix(codecs.BOM_UTF8)
    keys = list[Key]()
    problems = list[str]()
    lines = dict[str, int]()
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        try:
            # pydantic accepts repeated members and NaN.
            strict_loads(line)
            key = Key.model_validate_json(line)
        except ValidationError as error:
            problems.append(f"line {number}: {_problems(error)}.")
        except ValueError:
            problems.append(f"line {number} is not a JSON object.")
        else:
            for value in (f"name {key.name}", f"id {key.id}"):
                if value in lines:
                    problems.append(f"line {number} repeats the {value} of line {lines[value]}.")
                # A rotated key has the name of its successor until it expires.
                if value.startswith("id") or key.expires is None:
                    lines[value] = number
            keys.append(key)
    if problems:
        raise RetrievalError(listed(where, problems))
    return Keys(keys)


def read_keys(path: Path) -> Keys:
    """Read keys from a file; raise a RetrievalError if it cannot be read or a line is invalid."""
    return parse_keys(_read(path), str(path))


def add_key(path: Path, key: Key) -> None:
    """Add a key to a file; create the file if it does not exist.

    Raises:
        RetrievalError: the file has a key of this name, or cannot be read or written.
    """
    with hold(path, "changing these keys"):
        keys = read_keys(path) if path.exists() else Keys()
        if any(other.name == key.name for other in keys):
            raise RetrievalError(
                f"{path} has a key {key.name} already. Replace it with 'retrieval keys rotate"
                f" {key.name} --output {path}', or choose another name."
            )
        _write(path, [*keys, key])


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file.

    Raises:
        RetrievalError: the key does not exist, or the file cannot be read or written.
    """
    with hold(path, "changing these keys"):
        keys = read_keys(path)
        _last_of(keys, name, path)
        _write(path, [key for key in keys if key.name != name])


def rotate_key(
    path: Path, name: str, grace: timedelta, lifetime: timedelta | None = None
) -> tuple[str, Key]:
    """Replace a key by a new one with the same name, role and indexes.

    Args:
        path: the file.
        name: name of the key.
        grace: how long the old key stays valid.
        lifetime: how long the new key is valid, by default as long as the old key was.

    Returns:
        The text for the holder of the new key, and the part of it in the file.

    Raises:
        RetrievalError: the key does not exist, or the file cannot be read or written.
    """
    with hold(path, "changing these keys"):
        keys = read_keys(path)
        old = _last_of(keys, name, path)
        if lifetime is None and old.expires and old.created:
            lifetime = old.expires - old.created
        text, new = new_key(name, old.role, old.indexes or (), lifetime)
        assert new.created is not None
        end = new.created + grace
        remaining = [key for key in keys if key.name != name]
        for key in keys:
            if key.name == name and grace and not key.expired:
                expires = min(key.expires or end, end)
                remaining.append(key.model_copy(update={"expires": expires}))
        _write(path, [*remaining, new])
    return text, new


def _last_of(keys: Keys, name: str, path: Path) -> Key:
    """Return the newest key of a name; raise a RetrievalError if there is none."""
    for key in reversed(keys):
        if key.name == name:
            return key
    names = ", ".join(sorted({key.name for key in keys})[:20]) or "none"
    raise RetrievalError(f"{path} has no key {name}. It has: {names}.")


def _read(path: Path) -> bytes:
    try:
        return read_plain(Path(os.path.realpath(path)), MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        advice = f"Create it with: retrieval keys add NAME --output {path}"
        raise RetrievalError(f"There is no file of keys {path}. {advice}") from None
    except OSError as error:
        raise RetrievalError(f"{path} cannot be read: {error.strerror or error}.") from None


def _write(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file atomically; keep its owner and mode, so that a server can still read it."""
    real_path = Path(os.path.realpath(path))
    lines = [json.dumps(key.model_dump(mode="json", exclude_none=True)) for key in keys]
    text = "\n".join([_HEAD, *lines, ""]).encode()
    # This refuses a file that would be too large to read again.
    parse_keys(text, str(path))
    with whole_file(real_path, RetrievalError, private=True) as temporary:
        temporary.write_bytes(text)
        if real_path.exists():
            state = real_path.stat()
            if (state.st_uid, state.st_gid) != (os.getuid(), os.getgid()):
                os.chown(temporary, state.st_uid, state.st_gid)
            temporary.chmod(stat.S_IMODE(state.st_mode))


class KeySource:
    """The keys of a server; the server calls `look` regularly to read a changed file again.

    Args:
        path: file of keys, or `None` to use `text`.
        text: value of the environment variable.

    Attributes:
        keys: the current keys; an invalid change of the file does not change them.

    Raises:
        RetrievalError: the file or text is invalid.
    """

    def __init__(self, path: Path | None, text: str = "") -> None:
        self._path = path
        self._read_stamp = self._seen_stamp = self._stamp()
        self.keys = parse_keys(text.encode(), VARIABLE) if path is None else read_keys(path)

    def look(self) -> None:
        """Read the file again if it has changed; reading blocks, so call this in a thread.

        A changed file may be half written. A call therefore reads the file only if its state is the
        same as at the previous call.
        """
        before = self._seen_stamp
        self._seen_stamp = self._stamp()
        if self._path is None or self._seen_stamp != before or self._seen_stamp == self._read_stamp:
            return
        self._read_stamp = self._seen_stamp
        try:
            self.keys = read_keys(self._path)
        except RetrievalError as error:
            log.warning("The keys stay as they were. %s", error)
        else:
            log.warning("Read %s again; it has %s.", self._path, quantity(len(self.keys), "key"))

    def _stamp(self) -> tuple[int, ...] | None:
        """Return values that differ if the file has changed; `None` if there is no file."""
        if self._path is None:
            return None
        try:
            state = self._path.stat()
        except OSError:
            return None
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def key_source(path: Path | None) -> KeySource | None:
    """Return the source of keys, or `None` if there are none.

    Args:
        path: file of keys. If it is `None`, the environment variable RETRIEVAL_KEYS may hold the
            file's path or the keys themselves.

    Raises:
        RetrievalError: both `path` and the variable are set, or the keys are invalid.
    """
    text = os.environ.get(VARIABLE, "").removeprefix("\ufeff")
    if path is not None and text:
        raise RetrievalError(
            f"Keys are set twice: by --keys and by the environment variable {VARIABLE}. Use only"
            " one of them."
        )
    if text and not text.lstrip().startswith(("{", "#")):
        path = Path(text)
    if path is not None or text:
        return KeySource(path, text)
    return None
