"""12,000 pictures are indexed, added again and migrated; every threshold is the product's own."""

import json

import numpy as np
import pytest
from PIL import Image
from retrieval import Index
from retrieval.bundle.bundle import Bundle

pytestmark = pytest.mark.scale

COUNT = 12_000


def test_pictures(pictures, makers, tmp_path, cli):
    def run(*words):
        outcome = cli(*words, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    bundles = [makers.make_bundle(tmp_path / f"bundle-{seed}", seed=seed) for seed in (0, 1)]
    paths = sorted(pictures.rglob("*.png"))
    ids = [path.relative_to(pictures).as_posix() for path in paths]

    def check(index, bundle):
        """Compare stored vectors with those of another encoding, and hits with NumPy."""
        some = paths[::3000]
        pixels = np.stack([np.asarray(Image.open(path))[None] for path in some])
        expected = Bundle.open(bundle, threads=1).encode(pixels).vector
        with Index.open(index, threads=1) as opened:
            assert len(opened) == COUNT
            items = opened.get(ids, arrays=True)
            vectors = np.stack([items[id].vector for id in ids]).astype(float)
            assert np.abs(vectors[::3000] - expected).max() < 1e-5
            for path, query in zip(some, expected.astype(float), strict=True):
                distances = np.linalg.norm(vectors - query, axis=1)
                nearest = [hit.distance for hit in opened.search(path, k=50)]
                assert np.allclose(nearest, np.sort(distances)[:50], atol=1e-5)

    index = tmp_path / "i"
    created = run("index", "create", index, pictures, "--bundle", bundles[0], "--keep", "copy")
    assert created["count"] == COUNT
    check(index, bundles[0])
    again = run("index", "add", index, pictures)
    assert (again["unchanged"], again["added"], again["changed"]) == (COUNT, 0, 0)
    migrated = run("index", "migrate", index, bundles[1])
    assert migrated["embedded"] == COUNT
    check(index, bundles[1])
    run("index", "rollback", index)
    check(index, bundles[0])
