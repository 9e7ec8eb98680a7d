"""Queries of a search: images, features and vectors, alone and in lists."""

import threading

import numpy as np
import pytest
from PIL import Image
from retrieval.bundle import bundle as bundle_module
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError
from retrieval.index.index import create_index, open_index


@pytest.fixture
def index(index_path):
    with open_index(index_path, threads=1) as opened:
        yield opened


@pytest.fixture
def paths(photos):
    return sorted(photos.rglob("*.png"))[:5]


@pytest.fixture
def of_features(makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", features=12)
    rows = np.random.default_rng(0).normal(size=(30, 12)).astype(np.float32)
    np.savez(tmp_path / "x.npz", features=rows)
    create_index(tmp_path / "i", bundle, [tmp_path / "x.npz"], progress=False)
    with open_index(tmp_path / "i", threads=1) as opened:
        yield opened, rows


def forms(path):
    """Return an image in every form that a search accepts."""
    with Image.open(path) as image:
        return [path, str(path), path.read_bytes(), image.copy(), np.asarray(image)]


def test_every_form_of_an_image_gives_the_same_hits_and_a_list_may_mix_forms(index, paths):
    for path in paths:
        expected = index.search(index.bundle.encode_image(path), 4)[0]
        for query in forms(path):
            assert index.search(query, 4) == expected
        assert expected[0].path == path
    mixed = [forms(path)[form] for form, path in enumerate(paths)]
    assert [hits[0].path for hits in index.search(mixed, 3)] == paths
    assert index.search(paths[:1], 3) == [index.search(paths[0], 3)]


def test_one_vector_gives_one_list_and_an_array_a_list_of_lists(index):
    ids = [item.id for item in index.scan(limit=3)]
    vectors = np.stack([index.vector(id) for id in ids])
    alone = index.search(vectors[1], 5)
    assert alone[0].id == ids[1]
    assert index.search(vectors[1].tolist(), 5) == alone
    for several in (vectors, list(vectors), vectors.tolist(), tuple(vectors)):
        assert [hits[0].id for hits in index.search(several, 5)] == ids
        assert index.search(several, 5)[1] == alone
    assert index.search([]) == []


def test_features_are_encoded_if_the_bundle_takes_features(of_features):
    index, rows = of_features
    assert index.search(rows[7], 3)[0].id == "x/7"
    assert [hits[0].id for hits in index.search(rows[4:7], 3)] == ["x/4", "x/5", "x/6"]
    assert [hits[0].id for hits in index.search([rows[4].tolist(), rows[9]], 3)] == ["x/4", "x/9"]
    vector = index.vector("x/7")[None]
    assert index.search(Encoded(vector, vector), 3)[0] == index.search(rows[7], 3)
    with pytest.raises(DataError, match="has 12 features, not 16"):
        index.search(index.vector("x/7"))
    with pytest.raises(DataError, match="takes vectors of 12 features, not images"):
        index.search("query.png")


def test_an_unusable_item_of_a_list_is_named(index, paths, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    vector = index.vector("1/0001.png")
    for queries, says in (
        ([paths[0], vector], r"queries\[1\] is a vector, but queries\[0\] is an image"),
        ([vector, paths[0]], r"queries\[1\] is an image, but queries\[0\] is a vector"),
        ([paths[0], None], r"queries\[1\]: a query is an image's path, .* not None"),
        ([paths[0], tmp_path / "bad.png"], r"queries\[1\]: .*bad\.png is not an image"),
        ([paths[0], tmp_path / "none.png"], r"queries\[1\]: .*none\.png cannot be read"),
        ([vector, vector[:5]], r"queries\[1\]: a vector for this index has 16 numbers"),
        ([vector, vector * np.nan], r"queries\[1\]: a vector must hold finite"),
        (None, "not None"),
        ({"a": 1}, "type dict"),
        (np.zeros((2, 3, 4, 5), np.uint8), r"queries\[0\]: Pixels must be uint8"),
        (np.zeros((8, 8, 7), np.int64), r"queries\[0\]: a vector for this index has 16"),
    ):
        with pytest.raises(DataError, match=says):
            index.search(queries)


def test_many_images_get_the_vectors_of_single_images(index, photos):
    paths, bundle, steps = sorted(photos.rglob("*.png"))[:70], index.bundle, []
    alone = np.concatenate([bundle.encode_image(path).vector for path in paths])
    vectors = bundle.encode_images(paths, batch_size=16, progress=lambda *step: steps.append(step))
    assert vectors.dtype == np.float32 and vectors.shape == (70, 16)
    np.testing.assert_allclose(vectors, alone, atol=1e-6)
    assert steps == [("encoding", done, 70) for done in (16, 32, 48, 64, 70)]
    assert bundle.encode_images([], progress=False).shape == (0, 16)
    single = bundle.encode_images(str(paths[0]), progress=False)
    np.testing.assert_allclose(single, alone[:1], atol=1e-6)


def test_a_bad_image_among_many_is_named(index, paths, tmp_path, of_features):
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match=r"images\[5\]: .*bad\.png"):
        index.bundle.encode_images([*paths, tmp_path / "bad.png"], progress=False)
    with pytest.raises(DataError, match=r"images\[1\]: an image is a path.* type int"):
        index.bundle.encode_images([paths[0], 3], progress=False)
    with pytest.raises(DataError, match="batch_size must be at least 1"):
        index.bundle.encode_images(paths, batch_size=0, progress=False)
    with pytest.raises(DataError, match="not images"):
        of_features[0].bundle.encode_images(paths, progress=False)


def test_few_images_are_in_memory_at_a_time(bundle_path, paths, monkeypatch):
    """Decoding is at most two batches ahead of the batch that is being stacked."""
    bundle = Bundle.open(bundle_path, threads=1)
    lock, decoded, used, most = threading.Lock(), 0, 0, 0
    decode, graph = bundle_module.decode, type(bundle._sessions.encoder)
    run = graph.__call__

    def counted(data):
        nonlocal decoded, most
        with lock:
            decoded += 1
            most = max(most, decoded - used)
        return decode(data)

    def encoder(self, names, feeds):
        nonlocal used
        with lock:
            used += len(feeds["input"])
        return run(self, names, feeds)

    monkeypatch.setattr(bundle_module, "decode", counted)
    monkeypatch.setattr(graph, "__call__", encoder)
    vectors = bundle.encode_images([paths[0]] * 200, batch_size=4, progress=False)
    assert len(vectors) == used == decoded == 200
    assert most <= 3 * 4
