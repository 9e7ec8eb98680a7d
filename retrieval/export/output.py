"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import BundleError
from retrieval.serving.files.locks import hold
from retrieval.serving.files.renaming import rename_whole, sync_file
from retrieval.serving.manifest import FILE


@contextlib.contextmanager
def whole_folder(output: Path, *, replace: bool) -> Iterator[Path]:
    """Give a hidden folder beside `output` to fill; it takes the name `output` at the end, or disappears on any fault.

    A process that is killed leaves the hidden folder `.NAME.XXXXXXXX.part`, never a half-written `output`; it may be
    deleted.

    Args:
        output: the folder to make.
        replace: whether a bundle that is there already gives way, once the new one is complete.

    Raises:
        BundleError: something is there that may not be replaced, another process is exporting to it, or the disk is full or
            refuses.
    """
    output = Path(os.path.realpath(output))
    refuse_existing(output, replace)
    temporary: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with hold(output, "exporting this bundle", BundleError):
            refuse_existing(output, replace)  # again: who held it until now may have made it
            temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".part", dir=output.parent))
            temporary.chmod(0o777 & ~_umask())
            yield temporary
            for path in [*temporary.iterdir(), temporary]:
                sync_file(path)
            refuse_existing(output, replace)  # again: a program without our lock may have made it
            with contextlib.suppress(OSError):
                output.rmdir()  # an empty folder gives way
            rename_whole(temporary, output, replace=replace, taken=_exists_already(output))
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
        raise _exists_already(output)


def _exists_already(output: Path) -> BundleError:
    return BundleError(f"The bundle {output} exists. Say replace (--replace), or name another output.")


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
