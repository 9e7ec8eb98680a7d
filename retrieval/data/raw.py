"""A dataset's items as a `Model` takes them: sliced from one array where that is possible, decoded
in threads elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.serving.images import from_array

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.data.augment import Changes, Draws
    from retrieval.model.contracts import Dataset
    from retrieval.serving.images import Preprocessing

BUDGET = 1 << 30
_PARTS = 4  # that each thread has of a batch: some images take longer
_TRIED = 4  # items that tell how long one takes
_WORTH = 0.4e-3  # seconds of an item from which on threads are quicker: below, they wait for one another, and cost twice the CPU time


class RawInputs:
    """What the encoder is given for a dataset's items.

    Where the dataset has its items in an array that needs no preprocessing, batches are slices of
    it. Elsewhere preprocessed pixels are kept in memory once made, when those of all items fit.

    Args:
        dataset: the items; `dataset[i]` is called from several threads.
        preprocessing: the backbone's; None for vectors.
        budget: largest size of the kept pixels, in bytes.

    Raises:
        DataError: images for a backbone of vectors, or the other way round.
    """

    def __init__(
        self, dataset: Dataset, preprocessing: Preprocessing | None, budget: int = BUDGET
    ) -> None:
        if dataset.kind == "features" and preprocessing is not None:
            raise DataError(
                "The dataset's items are vectors, and the backbone takes images. Use the backbone"
                " core.features."
            )
        if dataset.kind == "image" and preprocessing is None:
            raise DataError(
                "The dataset's items are images, and the backbone takes vectors. Use a backbone for"
                " images."
            )
        self.dataset = dataset
        self.preprocessing = preprocessing
        self.array = _as_inputs(dataset.arrays, preprocessing)
        self._quick: dict[str, bool] = {}
        self._kept: NDArray[np.uint8] | None = None
        if self.array is None and preprocessing is not None:
            shape = (len(dataset), *preprocessing.shape)
            if np.prod(shape, dtype=np.int64) <= budget:
                self._kept = np.empty(shape, np.uint8)
                self._made = np.zeros(len(dataset), bool)

    @property
    def in_memory(self) -> bool:
        """Whether batches are slices of an array, or will be once each item was decoded."""
        return self.array is not None or self._kept is not None

    def ready(self, indices: NDArray[np.int64]) -> bool:
        """Whether these items cost no decoding."""
        return self.array is not None or (
            self._kept is not None and bool(self._made[indices].all())
        )

    def batch(
        self,
        indices: NDArray[np.int64],
        changes: Changes | None = None,
        draws: Draws | None = None,
    ) -> NDArray[Any]:
        """Return inputs, uint8 (B, channels, H, W) or float32 (B, F), in memory of their own.

        Args:
            indices: (B,) items.
            changes: how images change at random; None: not at all.
            draws: B, what decides it, from `Changes.draw`.

        Raises:
            DataError: an item cannot be read, or changed.
        """
        if changes is not None and changes.active and self.preprocessing is not None:
            assert draws is not None
            pre = self.preprocessing
            if changes.table.crop_scale is None:
                pixels = changes.mirror(self.batch(indices), draws)
                if not changes.transforms:
                    return pixels
                if self.dataset.arrays is not None:
                    return changes.transformed(pixels, draws)
                return np.concatenate(
                    self._map(
                        lambda i: changes.transformed(pixels[i : i + 1], draws[i : i + 1]),
                        range(len(pixels)),
                        "transform",
                    )
                )
            return np.stack(
                self._map(
                    lambda i: changes.changed(self._image(int(indices[i])), pre, draws[i]),
                    range(len(indices)),
                    "crop",
                )
            )
        if self.array is not None:
            return np.take(self.array, indices, axis=0)
        if self._kept is not None:
            missing = np.unique(indices[~self._made[indices]])
            self._map(self._keep, missing.tolist(), "decode")
            return np.take(self._kept, indices, axis=0)
        return np.stack(self._map(self._item, indices.tolist(), "decode"))

    def _image(self, index: int) -> Image:
        item = self.dataset[index]
        return from_array(item) if isinstance(item, np.ndarray) else item

    def _item(self, index: int) -> NDArray[Any]:
        if self.preprocessing is None:
            return np.asarray(self.dataset[index], dtype=np.float32)
        return self.preprocessing(self._image(index))

    def _keep(self, index: int) -> None:
        assert self._kept is not None
        self._kept[index] = self._item(index)
        self._made[index] = True

    def _map(self, function: Any, jobs: Sequence[Any], work: str) -> list[Any]:
        """Return what a function makes of each job: in threads, where an item of this work takes
        long enough.
        """
        if len(jobs) < 2 or self.dataset.arrays is not None:  # without decoding, threads only cost
            return [function(job) for job in jobs]
        done: list[Any] = []
        if work not in self._quick:
            spent = []
            for job in jobs[:_TRIED]:
                start = time.perf_counter()
                done.append(function(job))
                spent.append(time.perf_counter() - start)
            self._quick[work] = median(spent[1:]) < _WORTH  # the first one loads code
        rest = jobs[len(done) :]
        if self._quick[work]:
            return done + [function(job) for job in rest]
        # to hand over each image by itself would cost a twentieth of decoding a small one
        size = -(-len(rest) // (_PARTS * _decoders())) or 1
        parts = [rest[start : start + size] for start in range(0, len(rest), size)]
        for part in self._threads.map(lambda part: [function(job) for job in part], parts):
            done += part
        return done

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_decoders(), thread_name_prefix="decode")

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get the dataset, and neither threads nor kept pixels."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_threads", "_made")}
        return {**state, "_kept": None}


def _as_inputs(
    arrays: NDArray[Any] | None, preprocessing: Preprocessing | None
) -> NDArray[Any] | None:
    """Return the dataset's array as inputs, without a copy; None where items need work first."""
    if arrays is None:
        return None
    if preprocessing is None:
        return arrays if arrays.dtype == np.float32 else None
    height, width = preprocessing.size
    if arrays.shape[1:3] != (height, width) or preprocessing.resize not in (
        None,
        min(height, width),
    ):
        return None
    if arrays.ndim == 3 and preprocessing.channels == 1:
        return arrays[:, None]
    return None


def _decoders() -> int:
    """Return how many threads decode: each holds an image, so that more than eight would only cost
    memory.
    """
    return min(8, cores())
