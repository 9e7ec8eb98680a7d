"""The file of keys: JSON lines, read within bounds, written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import ValidationError

from retrieval.errors import RetrievalError, listed
from retrieval.host.files import whole_file
from retrieval.serving.files.locks import hold
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.http.access.keys import Key, Keys, told

MOST_BYTES = 1_000_000
MOST_KEYS = 1_000

_HEAD = b"# Keys of `retrieval serve`, as salted hashes, one JSON object a line. See: retrieval keys --help\n"
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def parse_keys(text: bytes, where: str) -> Keys:
    """Return the keys that a file's text holds.

    Args:
        text: a JSON object a line; empty lines and those that begin with # say nothing. A text without any line is refused, since
            a file that is being written begins so.
        where: whose text it is, for errors.

    Raises:
        RetrievalError: every line that is wrong, none with what it holds.
    """
    if len(text) > MOST_BYTES:
        raise RetrievalError(f"{where} is too large for a file of keys: the limit is {MOST_BYTES:,} bytes.")
    if not text.strip():
        raise RetrievalError(f"{where} is empty. Make a key with: retrieval keys add NAME --output FILE")
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if _says(line)]
    if len(lines) > MOST_KEYS:
        raise RetrievalError(f"{where} has {len(lines):,} keys; the limit is {MOST_KEYS:,}.")
    found: list[Key] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in lines:
        try:
            key = _parsed(line)
        except ValidationError as fault:
            problems.append(f"line {number}: {told(fault)}.")
            continue
        except ValueError:
            problems.append(f"line {number} is not a JSON object.")
            continue
        for each in (f"name {key.name}", f"id {key.id}"):
            if each in seen:
                problems.append(f"line {number} has the {each} of line {seen[each]} again.")
            seen[each] = number
        found.append(key)
    if problems:
        raise RetrievalError(listed(where, problems))
    return Keys(found)


def read_keys(path: Path) -> Keys:
    """Return the keys that a file holds. A link to it is followed: where secrets are mounted they often are links.

    Raises:
        RetrievalError: it cannot be read, or is not such a file.
    """
    return parse_keys(_read(path), str(path))


def add_key(path: Path, key: Key) -> None:
    """Add a key to a file; the other lines stay as they are. A new file is its owner's only.

    Raises:
        RetrievalError: the name is taken, the file is not one of keys, or cannot be written.
    """
    with hold(path, "changing these keys"):
        text = _read(path) if path.exists() else _HEAD
        if any(each.name == key.name for each in parse_keys(text, str(path))):
            raise RetrievalError(
                f"{path} has a key {key.name} already. Choose another name, or remove that one first."
            )
        made = text + (b"" if text.endswith(b"\n") else b"\n") + key.line().encode()
        parse_keys(made, str(path))  # refuses one too many
        _write(path, made)


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file; the other lines stay as they are.

    Raises:
        RetrievalError: there is no such key, or the file cannot be read or written.
    """
    with hold(path, "changing these keys"):
        text = _read(path)
        known = sorted(each.name for each in parse_keys(text, str(path)))
        if name not in known:
            raise RetrievalError(f"{path} has no key {name}. It has: {', '.join(known[:20]) or 'none'}.")
        kept = [line for line in text.split(b"\n") if not _says(line) or _parsed(line).name != name]
        made = b"\n".join(kept)
        _write(path, made if made.strip() else _HEAD)


def _says(line: bytes) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(b"#")


def _parsed(line: bytes) -> Key:
    return Key.model_validate(strict_loads(line))


def _read(path: Path) -> bytes:
    try:
        handle = os.open(path, _FLAGS)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RetrievalError(f"{path} is not a regular file.")
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise RetrievalError(
            f"There is no file of keys {path}. Make one with: retrieval keys add NAME --output {path}"
        ) from None
    except OSError as fault:
        raise RetrievalError(f"{path} cannot be read: {fault.strerror or fault}.") from None


def _write(path: Path, text: bytes) -> None:
    """Write the file whole; its owner and mode stay, so that a server which may read it may go on reading it."""
    place = Path(os.path.realpath(path))
    with whole_file(place, RetrievalError, private=True) as temporary:
        temporary.write_bytes(text)
        if place.exists() and os.name == "posix":
            known = place.stat()
            if (known.st_uid, known.st_gid) != (os.getuid(), os.getgid()):
                os.chown(temporary, known.st_uid, known.st_gid)
            temporary.chmod(stat.S_IMODE(known.st_mode))
