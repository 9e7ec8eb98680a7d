"""ROxford and RParis: queries with lists of easy, hard and junk images, and 1M distractors."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.errors import DataError
from retrieval.helpers import Count, Counts
from retrieval.plugin import Dataset

from retrieval_sets.published import (
    Published,
    Row,
    annotation_bytes,
    documented,
    gallery_images,
)

_MAX_BYTES = 16 << 20  # of a file of annotations
_LISTS = ("easy", "hard", "junk")
_ARRAYS = {
    (module, name)
    for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("_reconstruct", "dtype", "ndarray", "scalar")
}
_TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
_ORDERS = ("<", ">", "|")
_COUNTS = {"roxford5k": (70, 4_993), "rparis6k": (70, 6_322)}


@documented
def roxford5k(
    folder: Path, distractors: str = "", counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load ROxford: 70 queries of buildings in Oxford, and a gallery of 4,993 images.

    Radenović, Iscen, Tolias, Avrithis & Chum, "Revisiting Oxford and Paris: Large-Scale Image
    Retrieval Benchmarking", CVPR 2018. Nothing is downloaded. A query is cropped to its box. Its
    metadata list the keys of its `easy`, `hard` and `junk` images, and a protocol names the lists:

    - easy: `[evaluate] relevant = ["easy"]` and `ignored = ["hard", "junk"]`;
    - medium: `relevant = ["easy", "hard"]` and `ignored = ["junk"]`;
    - hard: `relevant = ["hard"]` and `ignored = ["easy", "junk"]`.

    The metrics are `sets.oxford_ap` and `sets.oxford_precision_at`. All images are of the test
    side; a label is the image's own name, since only the lists say what is relevant.

    Args:
        folder: the folder that holds `jpg` and `gnd_roxford5k.pkl`.
        distractors: subfolder or link in `folder` with the R1M distractors; by default, none.
    """
    return _revisited("roxford5k", "ROxford5k", folder, distractors, counts, skip_bad)


@documented
def rparis6k(
    folder: Path, distractors: str = "", counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load RParis: 70 queries of buildings in Paris, and a gallery of 6,322 images.

    See `sets.roxford5k` for the source, the lists, the protocols and the metrics.

    Args:
        folder: the folder that holds `jpg` and `gnd_rparis6k.pkl`.
        distractors: subfolder or link in `folder` with the R1M distractors; by default, none.
    """
    return _revisited("rparis6k", "RParis6k", folder, distractors, counts, skip_bad)


def _revisited(
    name: str, title: str, folder: Path, distractors: str, counts: Counts, skip_bad: bool
) -> Dataset:
    file = f"gnd_{name}.pkl"
    queries, images = _COUNTS[name]
    unrelated = gallery_images(folder, distractors) if distractors else []
    published = Published(
        title,
        "its makers (cmp.felk.cvut.cz/revisitop)",
        f"jpg/ and {file}",
        {"query": [Count(queries)], "gallery": [Count(images + len(unrelated))]},
        unknown=True,
    )
    listing = published.listing(folder, "jpg", file)
    listing.rows += unrelated
    table = _read_pickle(listing.root / file)
    keys = [f"jpg/{image}.jpg" for image in _texts(table, "imlist", file)]
    listing.rows += [Row(key, key, "test", "gallery") for key in keys]
    annotations = _entry(table, "gnd", file)
    names = _texts(table, "qimlist", file)
    if not isinstance(annotations, list) or len(annotations) != len(names):
        raise DataError(f"{listing.root / file}: 'gnd' must have one entry for each of 'qimlist'.")
    for image, entry in zip(names, annotations, strict=True):
        key = f"jpg/{image}.jpg"
        try:
            lists = {kind: _listed(_entry(entry, kind, file), keys) for kind in _LISTS}
            left, top, right, bottom = _numbers(_entry(entry, "bbx", file))
        except (ValueError, TypeError, IndexError, OverflowError):
            listing.problems.append(
                f"{file}: {image} needs a box of four numbers, and lists of numbers of images."
            )
            continue
        box = left, top, right, bottom
        listing.rows.append(Row(key, key, "test", "query", box, lists))
    return listing.dataset(counts, skip_bad, crop=True)


def _listed(value: Any, keys: Sequence[str]) -> str:
    """Return the keys of the images whose numbers, from 0, an annotation lists."""
    numbers = _numbers(value)
    if any(number % 1 or number < 0 for number in numbers):
        raise ValueError
    return ";".join(keys[int(number)] for number in numbers)


def _entry(table: Any, key: str, file: str) -> Any:
    if not isinstance(table, dict) or key not in table:
        raise DataError(f"{file} has no entry {key!r} where annotations have one.")
    return table[key]


def _texts(table: Any, key: str, file: str) -> list[str]:
    names = _entry(table, key, file)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: {key!r} must be a list of names.")
    return names


class _Inert:
    """Stands for an array, a type or a number of NumPy in a pickle, and only keeps its content."""

    state: Any = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle._Unpickler):  # type: ignore[name-defined, misc, unused-ignore]
    """Reads a pickle without running its code: NumPy's names become `_Inert`, others an error.

    Python's own unpickler, not the one in C, whose table of references a few bytes can make as
    large as the memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of a module."""
        if (module, name) == ("_codecs", "encode"):
            return lambda text, _: str(text).encode("latin1")
        # old protocols write the bytes of an empty array as a call without arguments
        if (module, name) == ("__builtin__", "bytes"):
            return lambda: b""
        if (module, name) in _ARRAYS:
            return _Inert
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _read_pickle(path: Path) -> Any:
    """Return a pickle's lists, dictionaries, text and numbers.

    Raises:
        DataError: the file is too large, damaged, or holds anything else than these and arrays.
    """
    content = annotation_bytes(path, _MAX_BYTES)
    try:
        return _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises various errors
        raise DataError(
            f"{path} is damaged, or no file of annotations: {error}. Only lists, dictionaries, text"
            " and arrays of numbers are read."
        ) from error


def _numbers(value: Any) -> list[float]:
    """Return a list of numbers, or the numbers of an array of one dimension.

    Raises:
        ValueError: the value is something else, or a number is not finite.
    """
    if isinstance(value, list | tuple):
        numbers = [_scalar(item) for item in value]
    else:
        state: Any = getattr(value, "state", ())
        if len(state) != 5:
            raise ValueError
        numbers = _from_bytes(state[2], state[4])
    if not all(map(math.isfinite, numbers)):
        raise ValueError
    return numbers


def _scalar(value: Any) -> float:
    if isinstance(value, int | float):
        return value
    arguments = getattr(value, "arguments", ())
    if len(arguments) != 2:
        raise ValueError
    (number,) = _from_bytes(*arguments)
    return number


def _from_bytes(kind: Any, data: Any) -> list[float]:
    """Return the numbers in an array's bytes; `kind` is an inert `dtype`."""
    name = getattr(kind, "arguments", ("",))[0]
    order = getattr(kind, "state", (3, ""))[1]
    # the bytes in a file that Python 2 wrote
    if isinstance(data, str):
        data = data.encode("latin1")
    if name not in _TYPES or order not in _ORDERS or not isinstance(data, bytes):
        raise ValueError
    numbers: list[float] = np.frombuffer(data, f"{order}{name}").tolist()
    return numbers
