"""Near-duplicates, on handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from sklearn.datasets import load_digits


@pytest.fixture
def digits(tmp_path: Path, plain_bundle: Path) -> Iterator[tuple[Index, np.ndarray]]:
    """1,797 digits by the bundle's own vectors, the first twenty of them twice, and once more a
    little apart.
    """
    images, labels = load_digits(return_X_y=True)
    bundle = Bundle.open(plain_bundle, threads=1)
    pixels = (images.reshape(-1, 1, 8, 8) * 15.9).astype(np.uint8)
    vectors = bundle.encode(pixels).vector
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        index.upsert(
            [
                Item(f"{n:04}", str(labels[n]), arrays={"vector": vectors[n]})
                for n in range(len(vectors))
            ]
        )
        index.upsert(
            [
                Item(f"{n:04}-again", str(labels[n]), arrays={"vector": vectors[n]})
                for n in range(20)
            ]
        )
        apart = vectors[:20].copy()
        apart[:, 0] += 1e-3
        index.upsert(
            [Item(f"{n:04}-apart", str(labels[n]), arrays={"vector": apart[n]}) for n in range(20)]
        )
        yield index, vectors


def test_duplicates_are_all_found(digits: tuple[Index, np.ndarray]) -> None:
    index, vectors = digits
    limit = 0.002
    squared = ((vectors[:, None, :] - vectors[None, :20, :]) ** 2).sum(-1)
    assert (squared > limit**2).sum() == squared.size - 20  # no two different digits are that near
    found = index.duplicates(limit, progress=False)
    assert [group.ids for group in found] == [
        (f"{n:04}", f"{n:04}-again", f"{n:04}-apart") for n in range(20)
    ]
    assert all(group.largest == pytest.approx(1e-3, rel=1e-3) for group in found)
    exact = index.duplicates(0, progress=False)
    assert [group.ids for group in exact] == [(f"{n:04}", f"{n:04}-again") for n in range(20)]
    only = index.duplicates(limit, where="label = '3'", progress=False)
    assert len(only) == 2 and all(group.ids[0] in ("0003", "0013") for group in only)


def test_chains_join_and_many_equal_ones_are_one_group(digits: tuple[Index, np.ndarray]) -> None:
    index, vectors = digits
    chain = np.repeat(10 + vectors[:1], 60, axis=0)
    chain[:, 0] += np.arange(60) * 0.01
    index.upsert([Item(f"chain-{n:02}", arrays={"vector": chain[n]}) for n in range(60)])
    index.upsert([Item(f"equal-{n:02}", arrays={"vector": vectors[0] - 10}) for n in range(40)])
    groups = {group.ids[0]: group for group in index.duplicates(0.0101, progress=False)}
    assert len(groups["chain-00"].ids) == 60 and groups["chain-00"].largest == pytest.approx(
        0.01, rel=1e-3
    )
    assert len(groups["equal-00"].ids) == 40 and groups["equal-00"].largest == 0
