"""Mistakes of somebody who works in Python: each is one sentence of this package, and says what to
do in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
from retrieval import DataError, PluginError, StoreError

from .conftest import SMALL, Net


@pytest.fixture(scope="module")
def bundle(trained: retrieval.Run, tmp_path_factory: pytest.TempPathFactory) -> retrieval.Bundle:
    return retrieval.export_run(
        trained, tmp_path_factory.mktemp("bundles") / "bundle", progress=False
    )


@pytest.fixture
def index(bundle: retrieval.Bundle, photos: Path, tmp_path: Path) -> Iterator[retrieval.Index]:
    with retrieval.build_index(bundle, photos, tmp_path / "index", progress=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("k", "said"),
    [
        (0, "k must be at least 1, not 0"),
        (2.5, "k must be a whole number, not '2.5'"),
        ("3", "k must be a whole number, not '3'"),
    ],
)
def test_k_is_a_whole_number(index: retrieval.Index, photos: Path, k: Any, said: str) -> None:
    query = next(photos.glob("*/*.png"))
    with pytest.raises(DataError, match=said):
        index.search(query, k=k)
    with pytest.raises(DataError, match="number of candidates must be a whole number"):
        index.search(query, candidates="all")  # type: ignore[call-overload]
    assert len(index.search(query, k=np.int64(2))) == 2  # type: ignore[call-overload]


def test_a_closed_index_says_so(index: retrieval.Index, photos: Path) -> None:
    query = next(photos.glob("*/*.png"))
    index.close()
    for use in (
        lambda: index.search(query),
        lambda: index.get("0"),
        lambda: index.vector("0"),
        lambda: retrieval.serve(index, port=0, wait=False),
        lambda: retrieval.plot.neighbours(index, query),
    ):
        with pytest.raises(
            StoreError, match=r"was closed. Open it again with retrieval\.open_index"
        ):
            use()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("port", [99999, -1, "8000"])
def test_a_port_that_is_none_is_refused(index: retrieval.Index, port: Any) -> None:
    with pytest.raises(StoreError, match=r"port is a whole number from 0, .* to 65535, not"):
        retrieval.serve(index, port=port, wait=False)


def test_a_side_that_a_run_does_not_have(trained: retrieval.Run) -> None:
    for measure in (retrieval.evaluate_run, retrieval.verify_run):
        with pytest.raises(DataError, match='"test" or "validation", not on \'tst\''):
            measure(trained, side="tst", progress=False)
    assert not list(trained.path.glob("*tst*"))


def test_one_name_stands_for_a_list_of_one(trained: retrieval.Run, tmp_path: Path) -> None:
    found = retrieval.evaluate_run(trained, metrics="recall_at_1", progress=False)
    assert list(found.figures["trained"]) == ["recall_at_1"]
    made = retrieval.export_run(trained, tmp_path / "bundle", variants="fp16", progress=False)
    assert list(made.manifest.variants) == ["fp16"]


def test_what_cannot_be_indexed_encoded_or_drawn(
    bundle: retrieval.Bundle, photos: Path, tmp_path: Path
) -> None:
    from PIL import Image

    query = next(photos.glob("*/*.png"))
    for sources, batch, said in (
        ([Image.new("L", (8, 8))], 32, "named by its path.* not an object of type Image"),
        (photos, 0, "batch must be at least 1, not 0"),
    ):
        with pytest.raises(DataError, match=said):
            retrieval.build_index(bundle, sources, tmp_path / "index", batch=batch, progress=False)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="images go to encode_images"):
        bundle.encode([query])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"retrieval\.open_index\(path\), queries"):
        retrieval.plot.neighbours(str(tmp_path), query)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backbone": Net}, r"The backbone is a class, Net; give an object of it: Net\(…\)"),
        (
            {"loss": "pml.triplet_margin"},
            r'as loss=\{"name": …\}, or give what retrieval\.create\("loss", …\) makes',
        ),
        ({"dataset": "photos"}, r'as data=\{"name": …\}'),
        ({"miner": {"name": "pml.multi_similarity"}}, "is text or a table, and must be an object"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        retrieval.train(SMALL, tmp_path / "run", progress=False, **given)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_is_answered_in_python(
    trained: retrieval.Run, index: retrieval.Index, bundle: retrieval.Bundle, photos: Path
) -> None:
    with pytest.raises(
        DataError, match=r'In Python: resume=True, overrides=\["train\.epochs=…"\]; replace=True'
    ):
        retrieval.train(SMALL, trained.path, progress=False)
    with pytest.raises(retrieval.BundleError, match="in Python replace=True"):
        retrieval.export_run(trained, bundle.path, progress=False)
    with pytest.raises(StoreError, match="in Python replace=True"):
        retrieval.build_index(bundle, photos, index.path, progress=False)
    with pytest.raises(StoreError, match=r"in Python retrieval\.build_index"):
        retrieval.open_index(bundle.path)


def test_a_misspelt_name_of_the_package_is_suggested() -> None:
    with pytest.raises(AttributeError) as missing:
        getattr(retrieval, "Recip")  # noqa: B009
    assert (
        missing.value.name == "Recip" and missing.value.obj is retrieval
    )  # what Python suggests from


def test_a_folder_that_is_not_there_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gone is not a run: there is no such folder\. Name a folder"
    ):
        retrieval.load_run(tmp_path / "gone")
    with pytest.raises(DataError, match="is not a run: it holds no recipe"):
        retrieval.load_run(tmp_path)
