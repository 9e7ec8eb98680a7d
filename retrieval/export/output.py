"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import BundleError
from retrieval.manifest import FILE


@contextlib.contextmanager
def whole_folder(output: Path, *, replace: bool) -> Iterator[Path]:
    """Give a hidden folder beside `output` to fill; it takes the name `output` at the end, or disappears on any fault.

    A process that is killed leaves the hidden folder `.NAME.XXXXXXXX.part`, never a half-written `output`; it may be
    deleted.

    Args:
        output: the folder to make.
        replace: whether a bundle that is there already gives way, once the new one is complete.

    Raises:
        BundleError: something is there that may not be replaced, or the disk is full or refuses.
    """
    output = Path(os.path.realpath(output))
    refuse_existing(output, replace)
    temporary: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".part", dir=output.parent))
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        refuse_existing(output, replace)
        _move(temporary, output)
        _sync(output.parent)
    except OSError as fault:
        raise BundleError(
            f"The bundle {output} cannot be written: {fault.strerror or fault}. Nothing was left behind."
        ) from fault
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse to write over what is there, unless it is a bundle (or an empty folder) and may be replaced.

    Raises:
        BundleError: `output` exists and stays.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise BundleError(f"{output} is a file, and a bundle is a folder. Choose another --output.")
    if not any(output.iterdir()):
        return
    if not (output / FILE).is_file():
        raise BundleError(f"{output} exists and is no bundle: name another output.")
    if not replace:
        raise BundleError(f"The bundle {output} exists. Say replace (--replace), or name another output.")


def _move(source: Path, target: Path) -> None:
    """Rename a folder; with one already under the name, the two swap, and the old one is then at `source`."""
    if not target.exists():
        source.rename(target)
    elif not _swap(source, target):
        aside = source.with_suffix(".old")
        target.rename(aside)
        try:
            source.rename(target)
        except OSError:
            aside.rename(target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _swap(first: Path, second: Path) -> bool:
    """Swap two folders' names in one step (Linux); False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk: a name must not survive a power cut that its content doesn't."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
