"""Tar shards in the layout of WebDataset: files of one name make one item.

Read as a stream; nothing is extracted.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, BinaryIO, cast

from retrieval.errors import DataError, listed, printable
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.images import EXTENSIONS
from retrieval.serving.index.locations import Location, Origin, Source, plain, shown, text_problem

_HEADER = 256 * 1024
"""Bytes that the headers of one member may take: an archive's author chooses how many there are."""
_TEXT_BYTES = 1_000_000
_MEMBERS = 10_000_000
_PIECE = 1 << 20
_RATIO, _FREE = 100, 100_000_000
"""A compressed shard may grow to so many times its size, and so many bytes; images are compressed
already, and grow by little.
"""
_TEXTS = ("json", "cls", "txt")
_PROBLEMS = 1000
_PART = re.compile(r"(.*)@(\d{1,18})\+(\d{1,18})", re.DOTALL)


class _Stream(io.RawIOBase):
    """A shard's bytes, compressed or not, that go forward only and refuse what no sound archive
    asks for.

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
                raise tarfile.ReadError(
                    f"it grows to more than {_RATIO} times its size when it is unpacked"
                )
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
            f"{location} is damaged, or not a tar file that can be read: {printable(said)[:200]}."
        ) from None


def _files(
    location: Location, stream: _Stream, left_out: Counter[str]
) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of an archive, at whose content the stream then stands; count what
    else there is.

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
                # tarfile takes a damaged header, and the end of the file, for the end of the
                # archive
                if len(stream.block) < tarfile.BLOCKSIZE or any(stream.block[: tarfile.BLOCKSIZE]):
                    raise tarfile.ReadError("it is cut off, or has a damaged header")
                return
            if member.size < 0:
                raise tarfile.ReadError("a member has a negative size")
        count += 1
        if count > _MEMBERS:
            raise DataError(f"{location} has more than {_MEMBERS:,} members.")
        if member.isfile() and not member.issparse():
            yield member
        elif not member.isdir():
            left_out["links, devices or files with holes"] += 1


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return a member's path up to the first dot of the file's name, and what follows that dot, in
    lower case.
    """
    folder, slash, file = member.name.rpartition("/")
    stem, _, ending = file.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def read_shard(location: Location) -> tuple[list[Source], list[str]]:
    """Return the items of a tar shard, and notes on what is left out.

    Consecutive members whose paths are equal up to the first dot of the file's name make one item:
    an image, `.json` (metadata, an object), `.cls` or `.txt` (the label; with both, the text is
    metadata). Its id is the shard's name and that path.

    Raises:
        DataError: the archive is damaged, cut off or larger than may be read, holds no image, or
            has items that cannot be used.
    """
    stamp = location.stamp()
    items: list[Source] = []
    problems: list[str] = []
    left_out: Counter[str] = Counter()
    with closing(_Stream(location)) as stream:
        files = _files(location, stream, left_out)
        for name, members in groupby(files, key=lambda member: _split_name(member)[0]):
            sample = _Sample()
            for member in members:
                if not sample.take(location, stream, member):
                    left_out["neither an image nor .json, .cls or .txt, or a second image"] += 1
            if sample.part is None:
                left_out["without an image"] += bool(sample.texts or sample.metadata)
                continue
            items.append(sample.item(location, stamp, name))
            problems += sample.problems
            if len(problems) > _PROBLEMS:
                break
    if problems:
        raise DataError(listed(location.name, problems))
    if not items:
        raise DataError(f"{location} holds no image.")
    notes = [
        f"{location}: {count:,} member{'s are' if count > 1 else ' is'} left out, being {reason}."
        for reason, count in left_out.items()
        if count
    ]
    return items, notes


@dataclass
class _Sample:
    """The members of one name, so far.

    Attributes:
        part: of the image, as `ShardImages` reads it; None without an image.
        ending: of the image.
        texts: content of other members, by ending.
        metadata: content of `.json`.
        problems: what is wrong with members, a sentence each.
    """

    part: str | None = None
    ending: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def take(self, location: Location, stream: _Stream, member: tarfile.TarInfo) -> bool:
        """Take a member at which the stream stands; return whether it has a place here."""
        ending = _split_name(member)[1]
        if f".{ending.rpartition('.')[2]}" in EXTENSIONS:
            if self.part is not None and ("." in ending or "." not in self.ending):
                return False
            self.part, self.ending = f"{member.name}@{member.offset_data}+{member.size}", ending
            return True
        if ending not in _TEXTS:
            return False
        name = _clean(member.name)
        if member.size > _TEXT_BYTES:
            self.problems.append(f"{name} has {member.size:,} bytes; {_TEXT_BYTES:,} are read.")
            return True
        with _sentences(location):
            content = stream.content(member.size)
        try:
            if ending != "json":
                self.texts[ending] = content.decode().strip()
            elif isinstance(metadata := strict_loads(content, finite=False), dict):
                self.metadata = plain(metadata)
            else:
                self.problems.append(f"{name} is no JSON object.")
        except (ValueError, RecursionError) as fault:
            self.problems.append(
                f"{name} is not {'JSON' if ending == 'json' else 'UTF-8 text'}: {fault}."
            )
        return True

    def item(self, location: Location, stamp: str, name: str) -> Source:
        """Return the item that the members make."""
        texts = dict(self.texts)
        label = texts.pop("cls", None) or texts.pop("txt", None)
        metadata = {**self.metadata, **texts}
        key = f"{location.stem}/{_clean(name)}"
        if problem := text_problem(key, label, metadata):
            self.problems.append(f"{key[:100]}: {problem}.")
        return Source(key, label or None, None, metadata, origin=Origin(location, self.part, stamp))


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
            raise DataError(f"{self._location} has no member '{_clean(part[:100])}'.")
        offset, size = int(found[2]), int(found[3])
        if size > most:
            raise DataError(
                f"{self._location}, {_clean(found[1])}, has {size:,} bytes; the limit is {most:,}."
                " Save it smaller, or raise the limit."
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
