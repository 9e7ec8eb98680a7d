"""The files and names that a disk may hold after a power cut at any moment, from a record of system
calls.

A file has the content of its last completed sync. Each sector written since then has the old or any
newer version, independently of other sectors. A folder has the names of its last sync, and each
later change of a name has happened or not. Nothing is assumed about the order in which a disk
writes, nor about a file system beyond POSIX.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

WRITES = {"write", "pwrite64", "writev"}
ON_HANDLES = WRITES | {"lseek", "fsync", "fdatasync", "ftruncate", "close"}
OPENS = {"open", "openat", "creat"}
CALLS = ",".join([*sorted(ON_HANDLES | OPENS), "pwritev,pwritev2,fallocate,truncate"]) + (
    ",rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,mkdir,mkdirat"
    ",sync_file_range,msync"
)
_COPIES = "sendfile,copy_file_range"
"""Calls whose bytes a trace does not show. They are refused, so that Python reads and writes."""
_PLAIN = re.compile(r"^(\d+)\s+(\w+)\((.*)$", re.DOTALL)
_RESUMED = re.compile(r"^(\d+)\s+<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_HANDLE = re.compile(r"(?:^|, )(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
MODES = ("none", "all", "prefix", "any")
SECTORS = (512, 4096)


def strace(output: Path, kill: int | None = None) -> list[str]:
    """Return a command that records changes of files; the sync number `kill` kills its process."""
    killed = [] if kill is None else ["-e", f"inject=fsync,fdatasync:signal=SIGKILL:when={kill}"]
    line = f"strace -f --seccomp-bpf -qq -y -xx -s {1 << 26} -e trace={CALLS},{_COPIES}"
    line += f" -e inject={_COPIES}:error=ENOSYS -e signal=none"
    return [*line.split(), *killed, "-o", str(output)]


Span = tuple[int, float]
"""When a call began and when it ended."""


@dataclass(eq=False)
class File:
    """The writes (begin, end, position, bytes; or None for a cut to a length), and the syncs."""

    changes: list[tuple[int, float, int, bytes | None]] = field(default_factory=list)
    syncs: list[Span] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The current length."""
        size = 0
        for _, _, place, content in self.changes:
            size = place if content is None else max(size, place + len(content))
        return size


@dataclass(eq=False)
class Folder:
    """Changes of names (begin, end, new target of each name), syncs, and the current names."""

    changes: list[tuple[int, float, dict[str, File | Folder | None]]] = field(default_factory=list)
    syncs: list[Span] = field(default_factory=list)
    names: dict[str, File | Folder] = field(default_factory=dict)


Parts = tuple[str, ...]
"""A path below the folder."""


def _texts(name: str, words: str) -> list[bytes]:
    """Return the texts in a call; the trace must show them in full."""
    texts = _TEXT.findall(words)
    if any(cut for _, cut in texts):
        raise ValueError(f"A {name} is cut short in the trace.")
    return [bytes.fromhex(text.replace("\\x", "")) for text, _ in texts]


def _handles(words: str) -> list[tuple[int, str]]:
    """Return the descriptors in a call (-1: the current folder) and their paths."""
    return [
        (
            -1 if number == "AT_FDCWD" else int(number),
            bytes.fromhex(path.replace("\\x", "")).decode(errors="surrogateescape"),
        )
        for number, path in _HANDLE.findall(words)
    ]


def _paths(name: str, texts: list[bytes], handles: list[tuple[int, str]]) -> list[Path]:
    """Return the absolute paths in a call; the trace must name the folder of each."""
    bases = [path for _, path in handles if name.endswith(("at", "at2"))]
    paths = []
    for number, text in enumerate(texts):
        path = text.decode(errors="surrogateescape")
        if not bases and not path.startswith("/"):
            raise ValueError(f"{name} of {path}: which folder it is in is not in the trace.")
        paths.append(Path(bases[min(number, len(bases) - 1)] if bases else "/") / path)
    return paths


def _last(words: str) -> int:
    """Return the last argument of a call, a number."""
    return int(words.rstrip(") ").rpartition(", ")[2])


def _synced(node: File | Folder, cut: int) -> float:
    """Return the time before which all changes are certainly on the disk."""
    return max((began for began, ended in node.syncs if ended <= cut), default=-1)


class Disk:
    """Replays traces of a folder, which is empty at first and whose own name is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = PurePosixPath(root)
        self.tree = Folder()
        self.time = 0
        self.moments: list[int] = []
        self.marks: list[tuple[int, bytes]] = []
        self._open: dict[int, tuple[File | Folder, int, bool]] = {}

    def replay(self, trace: Path, marks: Path) -> None:
        """Read the trace of a process that has ended; writes to the file `marks` are kept with
        their time.

        Raises:
            ValueError: a call is not understood, or was interrupted by a kill (except syncs).
        """
        self._open.clear()
        waiting: dict[str, tuple[int, str]] = {}
        with trace.open(encoding="ascii") as lines:
            for line in lines:
                self.time += 1
                if match := _RESUMED.match(line):
                    began, text = waiting.pop(match[1], (self.time, f"{match[2]}("))
                    name, text = match[2], text.partition("(")[2] + match[3]
                    if name == "close":
                        continue
                elif match := _PLAIN.match(line):
                    began, name, text = self.time, match[2], match[3]
                    waiting.pop(match[1], None)  # interrupted by a signal, and restarted
                    if text.rstrip().endswith("<unfinished ...>"):
                        waiting[match[1]] = (began, f"{name}({text.rpartition('<unfinished')[0]}")
                        # another thread may get the number before this call returns
                        if name == "close":
                            self._call(name, text, 0, began, marks)
                        continue
                else:
                    continue
                words, _, result = text.rpartition(" = ")
                if result.startswith("?"):
                    waiting[match[1]] = (began, f"{name}({words}")
                # Without a number, the call failed or its process was killed.
                if number := re.match(r"\d+", result):
                    self._call(name, words, int(number[0]), began, marks)
        self.time += 1
        for _, text in waiting.values():
            if not text.startswith(("fsync(", "fdatasync(")):  # did not return: has not happened
                raise ValueError(f"How far a call came that a kill ended is not known: {text}")

    def _call(self, name: str, words: str, result: int, began: int, marks: Path) -> None:
        texts, handles = _texts(name, words), _handles(words)
        if texts and name not in ON_HANDLES:
            paths = [self._inside(str(path)) for path in _paths(name, texts, handles)]
            if any(path is not None for path in paths):
                self._on_names(name, words, paths, result, began)
            return
        handle, path = handles[0] if handles else (-1, "")
        if name == "write" and path == str(marks):
            self.marks.append((began, texts[0]))
        elif handle in self._open and self._inside(path.removesuffix("(deleted)")) is None:
            del self._open[handle]
        elif handle in self._open:
            self._on_open(name, words, handle, texts, result, began)
        elif self._inside(path) and name not in ("close", "lseek", "fsync"):
            raise ValueError(f"{name} on {path}, which no call has opened.")

    def _inside(self, path: str) -> Parts | None:
        """Return the parts of a path below the root, or None if it lies outside."""
        pure = PurePosixPath(path)
        return pure.relative_to(self.root).parts if pure.is_relative_to(self.root) else None

    def _on_open(
        self, name: str, words: str, handle: int, texts: list[bytes], result: int, began: int
    ) -> None:
        node, position, appends = self._open[handle]
        if name == "close":
            del self._open[handle]
        elif name == "lseek":
            self._open[handle] = (node, result, appends)
        elif name in ("fsync", "fdatasync"):
            node.syncs.append((began, self.time))
            self.moments.append(self.time)
        elif isinstance(node, File) and (name in WRITES or name == "ftruncate"):
            content = None if name == "ftruncate" else b"".join(texts)[:result]
            if name == "pwrite64" or content is None:
                place = _last(words)
            else:
                place = node.size if appends else position
                self._open[handle] = (node, place + result, appends)
            node.changes.append((began, self.time, place, content))
            self.moments.append(self.time)
        else:
            raise ValueError(f"What {name} does to a file is not modelled.")

    def _on_names(
        self, name: str, words: str, paths: list[Parts | None], result: int, began: int
    ) -> None:
        path = paths[0]
        if None in paths or not path:
            if name in ("open", "openat") and path is not None:
                self._open[result] = (self.tree, 0, False)
                return
            raise ValueError(f"{name} on the folder itself, or into or out of it.")
        node = self._find(path)
        if name in OPENS:
            if node is None:
                node = File()
                self._set(began, {path: node})
            if "O_TRUNC" in words and isinstance(node, File) and node.size:
                node.changes.append((began, self.time, 0, None))
            self._open[result] = (node, 0, "O_APPEND" in words)
        elif name in ("mkdir", "mkdirat"):
            self._set(began, {path: Folder()})
        elif name in ("unlink", "unlinkat", "rmdir"):
            self._set(began, {path: None})
        elif name.startswith("rename") and paths[1] and "RENAME_EXCHANGE" not in words:
            self._set(began, {path: None, paths[1]: node})
        else:
            raise ValueError(f"What {name} does to names is not modelled.")

    def _find(self, path: Parts) -> File | Folder | None:
        node: File | Folder | None = self.tree
        for part in path:
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def _set(self, began: int, changed: dict[Parts, File | Folder | None]) -> None:
        """Change names; changes in one folder happen together, as with every journal."""
        folders: dict[Folder, dict[str, File | Folder | None]] = {}
        for path, node in changed.items():
            folder = self._find(path[:-1])
            if not isinstance(folder, Folder):
                raise ValueError(f"No folder holds {'/'.join(path)}.")
            folders.setdefault(folder, {})[path[-1]] = node
        for folder, names in folders.items():
            folder.changes.append((began, self.time, names))
            known = {**folder.names, **names}
            folder.names = {name: node for name, node in known.items() if node is not None}
        self.moments.append(self.time)

    def write(self, target: Path, cut: int, names: str, data: str, draw: random.Random) -> None:
        """Write what a power cut may leave to a new folder.

        Args:
            target: the new folder.
            cut: the moment of the power cut.
            names: which unsynced changes of names have happened; see `MODES`.
            data: which unsynced writes have happened; see `MODES`.
            draw: the source of randomness.
        """
        # with "prefix", changes before this moment have happened
        order = draw.uniform(max(0, cut - draw.choice([3, 30, 300])), cut)
        sector, likely = draw.choice(SECTORS), draw.random()
        _write_folder(self.tree, target, _Chance(cut, names, data, order, sector, likely, draw))


@dataclass(frozen=True)
class _Chance:
    """The random choices of one cut; `likely` is the share of sectors that reached the disk."""

    cut: int
    names: str
    data: str
    order: float
    sector: int
    likely: float
    draw: random.Random

    def there(self, mode: str, ended: float) -> bool:
        """Return whether an unsynced change has happened."""
        if mode == "any":
            return self.draw.random() < self.likely
        return mode == "all" or (mode == "prefix" and ended <= self.order)


def _write_folder(folder: Folder, target: Path, chance: _Chance) -> None:
    target.mkdir()
    synced = _synced(folder, chance.cut)
    names: dict[str, File | Folder | None] = {}
    for began, ended, changed in folder.changes:
        if ended <= synced or (began <= chance.cut and chance.there(chance.names, ended)):
            names |= changed
    for name, node in names.items():
        if isinstance(node, Folder):
            _write_folder(node, target / name, chance)
        elif node is not None:
            content = _content(node, chance)
            if name.endswith("-shm"):  # a mapped file, whose writes no trace shows: any bytes
                content = chance.draw.randbytes(len(content))
            (target / name).write_bytes(content)


def _content(file: File, chance: _Chance) -> bytes:
    synced, content = _synced(file, chance.cut), bytearray()
    pending = []
    for began, ended, place, written in file.changes:
        if ended <= synced:
            _apply(content, place, written)
        elif began <= chance.cut and chance.data != "none":
            pending.append((ended, place, written))
    if chance.data == "any":
        return _torn(content, [change[1:] for change in pending], chance)
    happened = [change for change in pending if chance.there(chance.data, change[0])]
    for _, place, written in happened:
        _apply(content, place, written)
    return _torn(content, [change[1:] for change in pending[len(happened) :][:1]], chance)


def _apply(content: bytearray, place: int, written: bytes | None) -> None:
    """Apply a write, or a cut to a length."""
    content.extend(bytes(max(0, place - len(content))))
    if written is None:
        del content[place:]
    else:
        content[place : place + len(written)] = written


def _torn(content: bytearray, pending: list[tuple[int, bytes | None]], chance: _Chance) -> bytes:
    """Return a file whose sectors and length are each from some moment since the sync."""
    if not pending:
        return bytes(content)
    now, lengths, sector = bytearray(content), [len(content)], chance.sector
    versions: dict[int, list[bytes]] = {}
    for start, written in pending:
        _apply(now, start, written)
        lengths.append(len(now))
        for place in range(start // sector, -(-(start + len(written or b"")) // sector)):
            versions.setdefault(place, []).append(bytes(now[place * sector : (place + 1) * sector]))
    for place, contents in versions.items():
        if chance.draw.random() < chance.likely:
            _apply(content, place * sector, chance.draw.choice(contents))
    length = chance.draw.choice([lengths[-1], chance.draw.choice(lengths)])
    return bytes(content[:length]).ljust(length, b"\0")
