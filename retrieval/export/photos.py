"""Photos without labels, as a backbone takes them: a bounded number, drawn by a seed."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.serving.files.places import StrPath
from retrieval.serving.image_files import find_images
from retrieval.serving.images import Preprocessing, decode, from_array
from retrieval.serving.progress import Meter
from retrieval.serving.sessions import ahead

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]

_SHOWN = 5
"""Photos that a message names."""
_CROPS = 64


class Photos:
    """The user's own photos, found and shuffled, not yet decoded.

    Photos that cannot be read are left out when they are met, and named on the log.

    Args:
        places: image files, and folders of them; a file that is named twice is one photo.
        seed: of the order.

    Raises:
        DataError: a place does not exist, or a folder holds no image.
    """

    def __init__(self, places: Sequence[StrPath], seed: int) -> None:
        found: dict[Path, None] = {}
        for place in map(Path, places):
            if not place.exists():
                raise DataError(f"{place} does not exist. Name files or folders of photos.")
            inside = [place]
            if place.is_dir():
                below = find_images(place)
                inside = below.images
                if dangling := below.dangling(place):
                    log.warning("%s", dangling)
            found.update((Path(os.path.realpath(file)), None) for file in inside)
        if not found:
            raise DataError("There are no photos: name files or folders of them.")
        files = list(found)
        self.files = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]

    def batches(self, preprocessing: Preprocessing, most: int, size: int = 32) -> Iterator[Pixels]:
        """Yield the first photos as uint8 (B, channels, H, W), decoded in threads while earlier
        ones are used.

        Args:
            preprocessing: the backbone's.
            most: how many of them are read.
            size: B.

        Raises:
            DataError: none of them can be read.
        """
        bad: list[str] = []
        files = self.files[:most]

        def read(file: Path) -> Pixels | DataError:
            try:
                return preprocessing(decode(file))
            except DataError as fault:
                return fault

        def sound() -> Iterator[Pixels]:
            for photo in ahead(read, files, workers=cores(), most=2 * size):
                meter.update()
                if isinstance(photo, DataError):
                    bad.append(str(photo))
                else:
                    yield photo

        with Meter("reading photos", len(files), "photos") as meter:
            photos = sound()
            while batch := list(itertools.islice(photos, size)):
                yield np.stack(batch)
        if len(bad) == len(files):
            raise DataError(f"None of the {len(bad):,} photos can be read. {bad[0]}")
        if bad:
            more = f"\n  - … and {len(bad) - _SHOWN:,} more." if len(bad) > _SHOWN else ""
            log.warning(
                "%d of %d photos cannot be read and are left out:%s%s",
                len(bad),
                len(files),
                "".join(f"\n  - {text}" for text in bad[:_SHOWN]),
                more,
            )


def example_photos(preprocessing: Preprocessing) -> Pixels:
    """Return 64 crops of the two photographs that come with scikit-learn, uint8 (64, channels, H,
    W).

    What a backbone is verified on where the user names no photos.
    """
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    rng = np.random.default_rng(0)
    crops = []
    for number in range(_CROPS):
        image = images[number % len(images)]
        height, width = image.shape[:2]
        side = int(rng.integers(height // 4, height))
        y, x = rng.integers(0, height - side), rng.integers(0, width - side)
        crop = np.ascontiguousarray(image[y : y + side, x : x + side])
        crops.append(preprocessing(from_array(crop)))
    return np.stack(crops)
