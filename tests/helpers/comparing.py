"""Comparisons of small recipes over digits of 8 × 8 pixels."""

from pathlib import Path
from typing import Any

from retrieval.training.comparison.compare import compare

PLUGIN = '''
"""Digits of 8 × 8 pixels."""
import numpy as np
from retrieval.plugin import hookimpl
from retrieval.data.datasets import ArrayDataset


def digits(scrambled: bool = False):
    """Load 20 of each digit; the pixels of 6 to 9 are noise if `scrambled`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = np.concatenate([np.flatnonzero(data.target == k)[:20] for k in range(10)])
    images = (data.images[rows] * 15.9).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    if scrambled:
        images = np.where(data.target[rows, None, None] >= 6, noise, images)
    return ArrayDataset(images, [str(label) for label in data.target[rows]])


retrieval_datasets = hookimpl(lambda: {"digits": digits})
'''
RECIPE: dict[str, Any] = {
    "plugins": ["mine.py"],
    "data": {"name": "mine.digits"},
    "split": {"by": "class", "test": 0.4},
    "sampler": {"classes": 3, "items": 4, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 8, "width": 8, "depth": 1},
    "head": {"embedding_size": 8},
    "optimizer": {"lr": 0.003},
    "train": {"epochs": 1, "device": "cpu"},
    "search": {"optimizer": {"lr": {"low": 1e-4, "high": 1e-2, "log": True}}},
}
LOSSES = {
    "triplet": {"name": "pml.triplet_margin", "margin": 0.1},
    "proxy": {"name": "pml.proxy_anchor"},
}


def go(paths: list[Path], output: Path, **options: Any) -> Any:
    """Run a comparison with two seeds, two trials and two folds, unless `options` differ."""
    small = {"seeds": 2, "search": 2, "folds": 2, "pretrained": "none", "progress": False}
    return compare(paths, output, **{**small, **options})
