"""12,000 pictures are indexed, embedded, migrated and pushed; every threshold is the product's."""

import json

import numpy as np
import pytest
from PIL import Image
from retrieval import Index
from retrieval.serving.bundle import Bundle

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

    parts = [pictures / str(label) for label in range(3)]
    embedded = run("embed", bundles[0], *parts, "-o", tmp_path / "v")
    copied = run("index", "create", tmp_path / "j", tmp_path / "v", "--bundle", bundles[0])
    assert embedded["parts"] == -(-copied["count"] // 256)
    with Index.open(index) as one, Index.open(tmp_path / "j") as other:
        one.rollback(progress=False)
        some = ids[:3600:400]
        assert np.abs(one.vector(some[0]) - other.vector("0/" + some[0].split("/")[1])).max() < 1e-5
