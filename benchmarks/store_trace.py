"""Whether an acknowledged write is on the disk: what `strace` saw between a call and its return, and what a killed process left."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,msync,sync_file_range,syncfs,sync,openat,open,ftruncate,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat"
)
WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate"}
SYNCS = {"fsync", "fdatasync"}
LINE = re.compile(r"^(\d+)\s+(\w+)\((.*)$")
RESUMED = re.compile(r"^(\d+)\s+<\.\.\. (\w+) resumed>(.*)$")


def strace(output: Path) -> list[str]:
    """Return the beginning of a command whose system calls are to be written to a file."""
    return ["strace", "-f", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", str(output)]


@dataclass
class Seen:
    """What a process did to one folder between two marks, in order."""

    calls: list[tuple[str, list[str], int]] = field(default_factory=list)


def between(trace: str, begin: str, end: str, folder: Path) -> Seen:
    """Return the calls on files of a folder that ended between two marks: name, paths, what was returned.

    Raises:
        ValueError: a mark is missing.
    """
    seen, inside, waiting = Seen(), False, {}
    for line in trace.splitlines():
        if f'"/mark-{begin}"' in line:
            inside = True
        elif f'"/mark-{end}"' in line and "resumed" not in line:
            return seen
        if (resumed := RESUMED.match(line)) is not None:
            pid, name, rest = resumed.groups()
            text = waiting.pop((pid, name), "") + rest
        elif (plain := LINE.match(line)) is not None:
            pid, name, text = plain.groups()
            if text.endswith("<unfinished ...>"):
                waiting[pid, name] = text
                continue
        else:
            continue
        result = re.search(r"\) += (-?\d+)", text)
        paths = [p for p in re.findall(r'"([^"]+)"|<(/[^<>]*)>', text.split(") = ")[0]) for p in p if p]
        paths = [path for path in paths if Path(path).is_relative_to(folder)]
        if inside and paths and result is not None and int(result[1]) >= 0:
            if name in ("open", "openat") and "O_CREAT" not in text:
                continue
            if name in ("open", "openat"):
                name = "create"
            seen.calls.append((name, paths, int(result[1])))
    raise ValueError(f"The trace has no marks {begin} and {end}.")


def judge(seen: Seen, folder: Path) -> dict[str, Any]:
    """Return what was written, and what of it no sync came after.

    A file is unsynced when its last write has no fsync or fdatasync behind it; a name (renamed, linked, or a rollback journal's
    removal) when its folder has none. SQLite's `-shm` files are left out: they are made anew after a crash.
    """
    written: dict[str, int] = {}
    unsynced: set[str] = set()
    names: dict[str, str] = {}
    for name, paths, result in seen.calls:
        path = paths[0]
        if path.endswith("-shm"):
            continue
        if name in WRITES:
            written[path] = written.get(path, 0) + (result if name != "ftruncate" else 0)
            unsynced.add(path)
        elif name in SYNCS:
            unsynced.discard(path)
            names = {new: said for new, said in names.items() if str(Path(new).parent) != path}
        elif name.startswith(("rename", "link")) and len(paths) > 1:
            old, new = paths[0], paths[-1]
            for held in (unsynced,):
                if old in held:
                    held.add(new)
                    held.discard(old)
            if old in written:
                written[new] = written.pop(old)
            names[new] = "named"
        elif name.startswith("unlink"):
            written.pop(path, None)
            unsynced.discard(path)
            if path.endswith("-journal"):
                names[path] = "removed"

    def short(path: str) -> str:
        return re.sub(r"[0-9a-f-]{16,}|\d{6,}", "…", str(Path(path).relative_to(folder)))

    syncs = [name for name, paths, _ in seen.calls if name in SYNCS]
    return {
        "written": sorted({short(path) for path in written}),
        "bytes": sum(written.values()),
        "syncs": len(syncs),
        "unsynced": sorted({short(path) for path in unsynced}),
        "names": sorted({f"{short(path)} ({said})" for path, said in names.items()}),
    }


def verdict(found: dict[str, Any]) -> str:
    """Return "yes", "no" or "all but the journal's removal"."""
    if not found["written"] or found["unsynced"]:
        return "no"
    removed = [name for name in found["names"] if name.endswith("-journal (removed)")]
    if found["names"] and len(removed) == len(found["names"]):
        return "all but the journal's removal"
    return "no" if found["names"] else "yes"
