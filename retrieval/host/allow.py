"""Which plugin files may run: those that this user named, wrote in a folder of their own, or trusted before.

A recipe or a run's folder may bring plugin files, and a plugin is a program: reading such a recipe runs it with the reader's
rights. So what a recipe brings runs only if its contents are known here, by their SHA-256, or if it lies in a folder that the
user called their own. What the user names on the command line is the user's word, and is remembered. The record is one JSON
file in the user's data folder (`RETRIEVAL_DATA` moves it), which only its owner may write.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from retrieval.errors import PluginError
from retrieval.host.file_plugins import FilePlugin, is_file_plugin
from retrieval.host.files import write_bytes

LARGEST_PLUGIN = 4_000_000
"""Bytes of a plugin's file; a larger one is not a program that anyone reads."""
MOST_FILES = 1_000
"""Files of a folder that is a plugin."""
LARGEST_RECORD = 16_000_000
"""Bytes of the record; a larger one was not written here."""

Ask = Callable[[str], bool]
_ask: ContextVar[Ask | None] = ContextVar("ask", default=None)


@dataclass
class Record:
    """What this user trusts.

    Attributes:
        files: where each content was first seen, by its SHA-256.
        folders: whose files may run whatever they hold.
        note: what is wrong with the file on disk, which is then not believed.
    """

    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    note: str = ""


@contextlib.contextmanager
def answering(ask: Ask | None) -> Iterator[None]:
    """Inside, `ask` is put the question whether unknown files may run; None refuses them."""
    token = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(token)


def require(items: Sequence[str], where: Path) -> None:
    """Refuse plugin files that the user does not know.

    Args:
        items: files, folders or modules that a recipe brings; paths are absolute.
        where: the recipe.

    Raises:
        PluginError: some are unknown, and nobody said that they may run; the sentence lists them with their hashes.
    """
    paths = [path for item in items for path in sources(item, where.parent)]
    if not paths:
        return
    record = read_record()
    hashes = {path: digest(path) for path in dict.fromkeys(paths)}
    unknown = {p: sha for p, sha in hashes.items() if sha not in record.files and not _own(p, record)}
    if unknown:
        listed = ", ".join(f"{path} (SHA-256 {sha[:16]}…)" for path, sha in unknown.items())
        several = len(unknown) > 1
        brings = (
            f"{where} brings {'plugin files that run' if several else 'a plugin file that runs'} with your rights, and that you have "
            f"neither named nor trusted before: {listed}."
        )
        ask = _ask.get()
        if ask is None or not ask(brings):
            raise PluginError(
                f"{brings}{record.note} Nothing was run. Read {'them' if several else 'it'}, then repeat the command with --trust. "
                "What lies in a folder of your own runs unasked after: retrieval plugins trust FOLDER."
            )
    remember(hashes)


def sources(item: str, near: Path) -> list[Path]:
    """Return the files that loading a plugin runs; none for a module that is installed.

    Args:
        item: a `.py` file, which runs what it imports beside itself; a folder, or a module's name.
        near: the folder of the recipe that names it.
    """
    if is_file_plugin(item):
        if not Path(item).exists():
            return []  # which is said where it is loaded
        plugin = FilePlugin.at(item)
        return [plugin.home / name for name in plugin.sources]
    return _module_files(item.partition(".")[0], near)


def _below(folder: Path) -> list[Path]:
    found = sorted(p.resolve() for p in folder.rglob("*.py") if p.is_file())
    if len(found) > MOST_FILES:
        raise PluginError(
            f"{folder} holds {len(found):,} Python files: a plugin's folder has {MOST_FILES:,} at most."
        )
    return found


def _module_files(name: str, near: Path) -> list[Path]:
    """The files of a module that is found where the command runs or beside the recipe, rather than installed."""
    if name in sys.modules or not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)  # of a name without dots: nothing is imported
    except (ImportError, ValueError):
        return []
    installed = [Path(sysconfig.get_path(each)).resolve() for each in ("stdlib", "purelib", "platlib")]
    places = [Path.cwd().resolve(), near.resolve()]
    found: list[Path] = []
    for place in [spec.origin, *(spec.submodule_search_locations or ())] if spec else []:
        path = Path(place or "").resolve()
        if any(path.is_relative_to(p) for p in places) and not any(path.is_relative_to(p) for p in installed):
            found += _below(path) if path.is_dir() else [path]
    return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a plugin's file.

    Raises:
        PluginError: it cannot be read, or is not a regular file, or too large for a plugin.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PluginError(f"The plugin file {path} is not a regular file.")
            data = file.read(LARGEST_PLUGIN + 1)
    except OSError as error:
        raise PluginError(f"The plugin file {path} cannot be read: {error.strerror or error}.") from error
    if len(data) > LARGEST_PLUGIN:
        raise PluginError(
            f"The plugin file {path} is larger than {LARGEST_PLUGIN:,} bytes, which no plugin is."
        )
    return hashlib.sha256(data).hexdigest()


def name_files(items: Iterable[str]) -> None:
    """Remember the plugin files that the user names on the command line; what is not there is said where it is loaded."""
    paths = [path for item in items for path in sources(item, Path.cwd())]
    with contextlib.suppress(PluginError):
        remember({path: digest(path) for path in paths})


def remember(hashes: dict[Path, str]) -> bool:
    """Add files to the record; return whether it could be written. Trust for this once needs no record."""
    try:
        with _changing() as record:
            record.files.update({sha: str(path) for path, sha in hashes.items() if sha not in record.files})
    except OSError:
        return False
    return True


def trust(paths: Iterable[Path], forget: bool = False) -> None:
    """Trust files by what they hold, and folders whatever is in them; or no longer.

    Raises:
        PluginError: a path does not exist, or the record cannot be written.
    """
    for path in paths:
        if not (forget or path.exists()):
            raise PluginError(f"{path} does not exist.")
    try:
        with _changing() as record:
            for path in map(Path.resolve, paths):
                if forget:
                    record.folders = [each for each in record.folders if each != str(path)]
                    gone = digest(path) if path.is_file() else None
                    record.files = {
                        sha: at for sha, at in record.files.items() if sha != gone and at != str(path)
                    }
                elif path.is_dir():
                    record.folders = sorted({*record.folders, str(path)})
                else:
                    record.files[digest(path)] = str(path)
    except OSError as error:
        raise PluginError(f"{record_file()} cannot be written: {error.strerror or error}.") from error


def record_file() -> Path:
    """Return where the record is kept."""
    import platformdirs

    chosen = os.environ.get("RETRIEVAL_DATA")
    return (Path(chosen) if chosen else Path(platformdirs.user_data_dir("retrieval"))) / "trusted.json"


def read_record() -> Record:
    """Return what is trusted: nothing, with a note, where the file is damaged or others may write it."""
    path = record_file()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                return Record(note=f" ({path} can be written by others, so it is not believed.)")
            table = json.loads(file.read(LARGEST_RECORD + 1))
        files, folders = table["files"], table["folders"]
        if not all(isinstance(x, str) for x in (*files, *files.values(), *folders)):
            raise TypeError
        return Record(dict(files), list(folders))
    except FileNotFoundError:
        return Record()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Record(note=f" ({path} is damaged, so it is not believed.)")


@contextlib.contextmanager
def _changing() -> Iterator[Record]:
    """Give the record to change, and write it whole when it was; one process at a time."""
    from filelock import FileLock

    path = record_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(path.with_suffix(".lock")):
        record = read_record()
        before = json.dumps(vars(record))
        yield record
        if record.note:  # what cannot be believed is kept beside, for whoever wonders
            path.replace(path.with_suffix(".damaged"))
        elif json.dumps(vars(record)) == before:
            return
        content = json.dumps({"files": record.files, "folders": record.folders}, indent=1)
        write_bytes(path, content.encode(), private=True)


def _own(path: Path, record: Record) -> bool:
    return any(path.is_relative_to(folder) for folder in record.folders)
