"""A folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import BundleError
from retrieval.host import files
from retrieval.serving.files.locks import hold
from retrieval.serving.manifest import FILE


@contextlib.contextmanager
def whole_folder(output: Path, *, replace: bool) -> Iterator[Path]:
    """Give a hidden folder beside `output` to fill; it takes the name `output` at the end, or
    disappears on any fault.

    A process that is killed leaves the hidden folder `.NAME.XXXXXXXX.part`, never a half-written
    `output`; it may be deleted.

    Args:
        output: the folder to make.
        replace: whether a bundle that is there already gives way, once the new one is complete.

    Raises:
        BundleError: something is there that may not be replaced, another process is exporting to
            it, or the disk is full or refuses.
    """
    output = Path(os.path.realpath(output))
    refuse_existing(output, replace)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with hold(output, "exporting this bundle", BundleError):
            refuse_existing(output, replace)  # again: who held it until now may have made it
            with files.whole_folder(
                output, replace=replace, taken=_exists_already(output)
            ) as temporary:
                yield temporary
                refuse_existing(
                    output, replace
                )  # again: a program without our lock may have made it
    except OSError as fault:
        raise BundleError(
            f"The bundle {output} cannot be written: {fault.strerror or fault}. Nothing was left"
            " behind."
        ) from fault


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse to write over what is there, unless it is a bundle (or an empty folder) and may be
    replaced.

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
        raise BundleError(f"{output} exists and is not a bundle: name another output.")
    if not replace:
        raise _exists_already(output)


def _exists_already(output: Path) -> BundleError:
    return BundleError(
        f"The bundle {output} exists. Say replace (--replace, in Python replace=True), or name"
        " another output."
    )
