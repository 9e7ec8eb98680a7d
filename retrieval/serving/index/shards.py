"""Tar shards in the layout of WebDataset: files of one name make one item. Read as a stream; nothing is extracted."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from retrieval.errors import DataError, listed, printable
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.images import EXTENSIONS
from retrieval.serving.index.locations import Location, shown
from retrieval.serving.index.origins import Origin, Source, plain, text_problem

_HEADER = 256 * 1024
"""Bytes that the headers of one member may take: an archive's author chooses how many there are."""
_TEXT = 1_000_000
_MEMBERS = 10_000_000
_PIECE = 1 << 20
_RATIO, _FREE = 100, 100_000_000
"""A compressed shard may grow to so many times its size, and so many bytes; images are compressed already, and grow by little."""
_TEXTS = ("json", "cls", "txt")
_PROBLEMS = 1000
_PART = re.compile(r"(.*)@(\d{1,18})\+(\d{1,18})", re.DOTALL)


class _Stream(io.RawIOBase):
    """A shard's bytes, compressed or not, that go forward only and refuse what no sound archive asks for.

    Attributes:
        block: what was read last.
    """

    def __init__(self, location: Location) -> None:
        self._raw = location.open()
        self._location = location
        self._packed = not location.file_name.lower().endswith(".tar")
        self._file = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw)) if self._packed else self._raw
        self.most = _HEADER
        self._at = 0
        self.block = b""

    def read(self, size: int = -1) -> bytes:
        self.most -= size
        if size < 0 or self.most < 0:
            raise tarfile.ReadError("a member's headers are larger than any that is read")
        self.block = self._read(size)
        return self.block

    def _read(self, size: int) -> bytes:
        """Return so many bytes, or all there are."""
        parts: list[bytes] = []
        while size > 0 and (part := self._file.read(min(size, _PIECE))):
            parts.append(part)
            size -= len(part)
            self._at += len(part)
            if self._packed and self._at > _FREE and self._at > _FREE + _RATIO * self._raw.tell():
                raise tarfile.ReadError(f"it grows to more than {_RATIO} times its size when it is unpacked")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content(self, size: int) -> bytes:
        """Return the next bytes, all of them.

        Raises:
            tarfile.ReadError: there are fewer.
        """
        found = self._read(size)
        if len(found) < size:
            raise tarfile.ReadError("it is cut off")
        return found

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or offset < self._at:
            raise tarfile.ReadError("a header points backwards")
        if not self._packed:
            self._at = self._raw.seek(offset)
        while self._at < offset and self._read(min(offset - self._at, _PIECE)):
            pass
        return self._at

    def close(self) -> None:
        self._file.close()
        self._raw.close()
        super().close()


@contextmanager
def _sentences(location: Location) -> Iterator[None]:
    """Turn what is wrong with an archive into a sentence that names it."""
    try:
        yield
    except (
        *(tarfile.TarError, OSError, EOFError, zlib.error, ValueError),
        *(OverflowError, RecursionError, LookupError),
    ) as fault:
        said = str(fault).rstrip(".") or type(fault).__name__
        raise DataError(
            f"{location.name} is damaged, or not a tar file that can be read: {printable(said)[:200]}."
        ) from None


def _members(location: Location, stream: _Stream) -> Iterator[tarfile.TarInfo]:
    """Give the members of an archive; after each the stream stands at its content.

    Raises:
        DataError: the archive is damaged, cut off or larger than may be read.
    """
    with _sentences(location):
        archive = tarfile.open(fileobj=cast(Any, stream), mode="r:")  # noqa: SIM115 (the stream is the caller's)
    count = 0
    while True:
        with _sentences(location):
            stream.most = _HEADER
            member = archive.next()
            cast(Any, archive).members.clear()  # a list of all that was read, which nobody needs
            if member is None:
                # tarfile takes a damaged header, and the end of the file, for the end of the archive
                if len(stream.block) < tarfile.BLOCKSIZE or any(stream.block[: tarfile.BLOCKSIZE]):
                    raise tarfile.ReadError("it is cut off, or has a damaged header")
                return
            if member.size < 0:
                raise tarfile.ReadError("a member has a negative size")
        count += 1
        if count > _MEMBERS:
            raise DataError(f"{location.name} has more than {_MEMBERS:,} members.")
        yield member


@dataclass
class _Sample:
    """The members of one name, so far."""

    name: str
    image: tuple[str, str] | None = None
    texts: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_shard(location: Location) -> tuple[list[Source], list[str]]:
    """Return the items of a tar shard, and notes on what is left out.

    Consecutive members whose paths are equal up to the first dot of the file's name make one item: an image, `.json` (metadata, an
    object), `.cls` or `.txt` (the label; with both, the text is metadata). Its id is the shard's name and that path.

    Raises:
        DataError: the archive is damaged, cut off or larger than may be read, holds no image, or has items that cannot be used.
    """
    stamp = location.stamp()
    items: list[Source] = []
    problems: list[str] = []
    left_out: Counter[str] = Counter()
    sample = _Sample("")

    def finish() -> None:
        if sample.image is None:
            left_out["without an image"] += len(sample.texts) or bool(sample.metadata)
            return
        found = _item(location, stamp, sample)
        problems.extend(sample.problems) if sample.problems else items.append(found)

    with ExitStack() as stack:
        stream = _Stream(location)
        stack.callback(stream.close)
        for member in _members(location, stream):
            if member.isdir():
                continue
            if not member.isfile() or member.issparse():
                left_out["links, devices or files with holes"] += 1
                continue
            folder, _, file = member.name.rpartition("/")
            stem, _, ending = file.partition(".")
            name = f"{folder}/{stem}" if folder else stem
            if name != sample.name:
                finish()
                sample = _Sample(name)
            if not _take(location, stream, member, ending.lower(), sample):
                left_out["neither an image nor .json, .cls or .txt, or a second image"] += 1
            if len(problems) > _PROBLEMS:
                break
        finish()
    if problems:
        raise DataError(listed(location.name, problems))
    if not items:
        raise DataError(f"{location.name} holds no image.")
    notes = [
        f"{location.name}: {count:,} member{'s are' if count > 1 else ' is'} left out, being {reason}."
        for reason, count in left_out.items()
        if count
    ]
    return items, notes


def _take(location: Location, stream: _Stream, member: tarfile.TarInfo, ending: str, sample: _Sample) -> bool:
    """Put a member into its sample; return whether it has a place there."""
    extension = f".{ending.rpartition('.')[2]}"
    if extension in EXTENSIONS:
        if sample.image is not None and ("." in ending or "." not in sample.image[0]):
            return False
        sample.image = ending, f"{member.name}@{member.offset_data}+{member.size}"
        return True
    if ending not in _TEXTS:
        return False
    called = f"{_clean(member.name)}"
    if member.size > _TEXT:
        sample.problems.append(f"{called} has {member.size:,} bytes; {_TEXT:,} are read.")
        return True
    with _sentences(location):
        content = stream.content(member.size)
    try:
        if ending != "json":
            sample.texts[ending] = content.decode().strip()
        elif isinstance(found := strict_loads(content, finite=False), dict):
            sample.metadata = plain(found)
        else:
            sample.problems.append(f"{called} is no JSON object.")
    except (ValueError, RecursionError) as fault:
        sample.problems.append(f"{called} is not {'JSON' if ending == 'json' else 'UTF-8 text'}: {fault}.")
    return True


def _item(location: Location, stamp: str, sample: _Sample) -> Source:
    assert sample.image is not None
    texts = dict(sample.texts)
    label = texts.pop("cls", None) or texts.pop("txt", None)
    metadata = {**sample.metadata, **texts}
    key = f"{location.stem}/{_clean(sample.name)}"
    if fault := text_problem(key, label, metadata):
        sample.problems.append(f"{key[:100]}: {fault}.")
    return Source(key, label or None, None, metadata, origin=Origin(location, sample.image[1], stamp))


def _clean(name: str) -> str:
    """Return a member's name as text that a terminal may show."""
    return printable(shown(name)).replace("\n", "\\n").replace("\t", "\\t")


class ShardImages:
    """The images of a tar shard; a part is `NAME@OFFSET+SIZE`, counted in the unpacked archive.

    Args:
        location: of the shard.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._stream = _Stream(location)

    def read(self, part: str, most: int) -> bytes:
        """Return a member's content; see `retrieval.serving.index.sources.Readers`."""
        found = _PART.fullmatch(part)
        if found is None:
            raise DataError(f"{self._location.name} has no member '{_clean(part[:100])}'.")
        offset, size = int(found[2]), int(found[3])
        if size > most:
            raise DataError(
                f"{self._location.name}, {_clean(found[1])}, has {size:,} bytes; the limit is {most:,}. Save it smaller, or raise the limit."
            )
        with _sentences(self._location):
            if offset < self._stream.tell():
                self._stream.close()
                self._stream = _Stream(self._location)
            self._stream.seek(offset)
            return self._stream.content(size)

    def close(self) -> None:
        """Close the shard."""
        self._stream.close()
