"""Items of a store of vectors of 16 numbers."""

from collections.abc import Iterable

import numpy as np
from retrieval.serving.store.contract import Item

VECTORS = np.random.default_rng(0).normal(size=(9000, 16)).astype(np.float32)


def items(numbers: Iterable[int]) -> list[Item]:
    """Return items `id N`, whose label and price follow from their number."""
    return [
        Item(f"id{n}", str(n % 10), {"price": n}, arrays={"vector": VECTORS[n]}) for n in numbers
    ]
