"""The verbs of `retrieval index` on 60,000 vectors; every threshold is the product's own."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import parquet
from retrieval import Index
from retrieval.serving.store.testing.small_bundles import make_bundle

pytestmark = pytest.mark.scale

COUNT = 60_000
WIDTH = 64
FEATURES = 16


@dataclass(frozen=True)
class Scene:
    """A bundle and a table of items whose vectors are integers, so that distances are exact."""

    folder: Path
    bundle: Path
    features: NDArray[np.float32]
    vectors: NDArray[np.float64]

    @property
    def table(self) -> Path:
        """Path of the Parquet table of all items."""
        return self.folder / "items.parquet"

    def nearest(self, query: int, count: int, keep: NDArray[np.bool_] | None = None) -> list[int]:
        """Return the numbers of the exact nearest items, in the order of distance and id."""
        squared = np.square(self.vectors - self.vectors[query]).sum(axis=1)
        if keep is not None:
            squared[~keep] = np.inf
        return np.lexsort((np.arange(len(squared)), squared))[:count].tolist()


def id_of(number: int) -> str:
    return f"{number:06}"


def write_table(path: Path, features: NDArray[np.float32], first: int = 0) -> Path:
    """Write items with consecutive numbers from `first` on to a Parquet table."""
    numbers = range(first, first + len(features))
    columns = {
        "key": [id_of(number) for number in numbers],
        "label": [f"class {number % 100}" for number in numbers],
        "number": list(numbers),
        "features": list(features),
    }
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    bundle = make_bundle(folder / "bundle", features=FEATURES, width=WIDTH)
    random = np.random.default_rng(0)
    features = random.integers(-50, 51, (COUNT, FEATURES)).astype(np.float32)
    # The matrix that `make_bundle` draws
    matrix = np.random.default_rng(0).integers(-9, 10, (FEATURES, WIDTH))
    scene = Scene(folder, bundle, features, features.astype(np.float64) @ matrix)
    write_table(scene.table, features)
    return scene


@pytest.fixture(scope="module")
def flat(scene):
    """The index that `create` makes with its defaults."""
    path = scene.folder / "flat.index"
    with Index.create(path, scene.table, model=scene.bundle) as index:
        assert index.summary is not None
        assert (index.summary.backend, index.summary.recall_at_10) == ("flat", None)
    return path


def test_create_uses_exact_search_with_a_companion(scene, flat, cli):
    with Index.open(flat) as index:
        assert len(index) == COUNT
        numbers = [0, 12_345, COUNT - 1]
        answers = index.search(scene.features[numbers], k=20)
        for number, hits in zip(numbers, answers, strict=True):
            assert [hit.id for hit in hits] == list(map(id_of, scene.nearest(number, 20)))
    shown = json.loads(cli("index", "show", flat, "--json").out)
    assert (shown["items"], shown["structure"], shown["covered"]) == (COUNT, "companion", COUNT)
