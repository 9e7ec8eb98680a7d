"""What was verified is what is used: files that change under an open bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import BundleError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.index import create_index


def rewritten(path: Path) -> None:
    """Other bytes in the same place, as `cp` over a file writes them."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(255 - byte for byte in content))


def test_an_open_bundle_runs_as_before(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    pixels = makers.digits()[0][:5, None]
    before = bundle.encode(pixels).vector
    assert bundle.changed() is None
    rewritten(path / "encoder.onnx")
    assert np.array_equal(bundle.encode(pixels).vector, before)
    assert "encoder.onnx" in bundle.changed()


def test_the_copy_in_an_index_is_the_bundle_that_made_it(makers, photos, tmp_path):
    """A bundle that is exchanged for another while an index is built from it."""
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    shutil.rmtree(path)
    makers.make_bundle(path, seed=3)
    with pytest.raises(BundleError, match="was changed while it was in use"):
        create_index(tmp_path / "i", bundle, [photos / "1"], progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
