"""Scikit-learn's digits as a dataset, and training batches of a dataset."""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from retrieval.data.datasets import ArrayDataset, Dataset
from retrieval.data.loading import TrainBatches
from retrieval.host.plugins import load_plugins
from retrieval.images.preprocessing import Preprocessing
from retrieval.recipe.tables import Augmentation, Sampler
from sklearn.datasets import load_digits

GREY8 = Preprocessing((8, 8), 1, (0.5,), (0.5,))


@cache
def digits_dataset() -> ArrayDataset:
    data = load_digits()
    return ArrayDataset((data.images * 15).astype(np.uint8), list(map(str, data.target)))


def batches(
    dataset: Dataset,
    sampler: Sampler,
    augmentation: Augmentation,
    *,
    preprocessing: Preprocessing | None = GREY8,
    seed: int = 5,
    indices: NDArray[np.int64] | None = None,
    workers: int = 0,
) -> TrainBatches:
    indices = np.arange(len(dataset)) if indices is None else indices
    transforms = augmentation.transforms and [
        load_plugins().build("augmentations", table) for table in augmentation.transforms
    ]
    return TrainBatches(
        dataset,
        indices,
        np.unique(np.array(dataset.labels)[indices], return_inverse=True)[1],
        preprocessing,
        sampler=sampler,
        augmentation=augmentation,
        transforms=transforms,
        seed=seed,
        workers=workers,
    )
