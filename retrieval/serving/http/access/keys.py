"""API keys: made, kept as hashes, and known again.

A key is `rk_ID_SECRET`. The id is no secret: it finds the line. The secret is 256 random bits, so nobody finds it by trying, however
fast its hash is: SHA-256 is right here, and a slow hash, as passwords need, would only let strangers spend the server's time. A salt for each
key (HMAC-SHA256) keeps equal secrets from looking equal, and tables of hashes from being of use.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retrieval.errors import RetrievalError
from retrieval.serving.http.settings import Role

LONGEST = 200  # characters of a key that is sent

_KEY = re.compile(r"rk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_Index = Annotated[str, Field(min_length=1, max_length=200)]


class Allowance(BaseModel):
    """How much one key, or one address without a key, may ask for; None: what the server gives by default, 0: no limit.

    Attributes:
        requests_per_second: on average.
        burst: requests at once after a pause.
        concurrent: requests at a time.
        bytes_per_minute: of bodies, sent and received, on average.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_per_second: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    burst: Annotated[int, Field(ge=0, le=10**9)] | None = None
    concurrent: Annotated[int, Field(ge=0, le=10**9)] | None = None
    bytes_per_minute: Annotated[int, Field(ge=0, le=10**15)] | None = None


class Key(Allowance):
    """What is kept of a key: a line of the file.

    Attributes:
        name: what the audit log calls it.
        role: what it may do.
        id: the key's own part that is no secret.
        salt: 16 random bytes, hexadecimal.
        hash: HMAC-SHA256 of the secret by the salt, hexadecimal.
        created: a date and time.
        indexes: those that it may use; None: all.
    """

    name: _Name
    role: Role
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: Annotated[str, Field(max_length=40)] = ""
    indexes: Annotated[tuple[_Index, ...], Field(strict=False, min_length=1, max_length=100)] | None = None

    def line(self) -> str:
        """Return its line of the file."""
        return json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False) + "\n"


class Keys:
    """Keys that are known.

    Args:
        keys: no two of one name or id.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, sent: str) -> Key | None:
        """Return the key that was sent; None if there is no such one. How long that takes says nothing of its secret."""
        parts = _KEY.fullmatch(sent) if len(sent) <= LONGEST else None
        known = None if parts is None else self._keys.get(parts[1])
        if parts is None or known is None:
            return None
        return known if hmac.compare_digest(_hash(known.salt, parts[2]), known.hash) else None


_CHARACTERS = {
    "name": "it has letters, digits and . _ @ -, at most 64 of them, and begins with a letter or digit",
}


def _hash(salt: str, secret: str) -> str:
    return hmac.digest(bytes.fromhex(salt), secret.encode(), "sha256").hex()


def new_key(
    name: str, role: Role, indexes: Iterable[str] = (), allowance: Allowance | None = None
) -> tuple[str, Key]:
    """Make a key; return what its holder sends, and what is kept of it.

    Raises:
        RetrievalError: the name is none.
    """
    secret, salt = secrets.token_urlsafe(32), secrets.token_hex(16)
    limits = {} if allowance is None else allowance.model_dump(exclude_none=True)
    try:
        kept = Key(
            name=name,
            role=role,
            id=secrets.token_hex(6),
            salt=salt,
            hash=_hash(salt, secret),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            indexes=tuple(indexes) or None,
            **limits,
        )
    except ValidationError as fault:
        raise RetrievalError(f"This key cannot be made: {told(fault)}.") from None
    return f"rk_{kept.id}_{secret}", kept


def told(fault: ValidationError) -> str:
    """Return every problem that pydantic found, without the values, which may be somebody's key in the wrong place."""
    problems = fault.errors(include_url=False, include_context=False, include_input=False)
    said = []
    for each in problems[:5]:
        where = ".".join(map(str, each["loc"][:1])) or "it"
        known = _CHARACTERS.get(where) if each["type"] == "string_pattern_mismatch" else None
        said.append(f"{where}: {known or each['msg']}")
    return "; ".join(said)
