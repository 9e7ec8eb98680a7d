"""`MtebEncoder` in `mteb.evaluate` itself, on tasks in memory, and MTEB's numbers by loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import retrieval
from makers import change_manifest, digits, make_bundle
from retrieval.bundle.distances import bundle_distances
from retrieval.errors import BundleError, DataError
from retrieval.results import Bundle

# warnings of MTEB and of what it imports
pytestmark = pytest.mark.filterwarnings("ignore:::(?!retrieval)")

COUNT = 200


@pytest.fixture(autouse=True)
def mteb() -> Any:
    """The module; imported late, because it takes seconds."""
    return pytest.importorskip("mteb", reason="MTEB is not installed: pip install mteb")


def average_precision(matches: Any, relevant: int) -> float:
    hits = np.flatnonzero(matches)
    return sum((n + 1) / (rank + 1) for n, rank in enumerate(hits)) / relevant


def first_matches(similarity: Any, labels: Any, drop: str, ties: int = 1) -> Any:
    """Return whether the first hit of each query (N,) matches, one query after another.

    Args:
        similarity: (N, N), of which larger is nearer.
        labels: (N,).
        drop: "first" drops the first hit, whatever it is; "own" drops the query's own picture.
        ties: 1 if the first of equally similar pictures comes first, −1 if the last does.
    """
    matches = []
    for query, row in enumerate(np.asarray(similarity, float)):
        order = sorted(range(len(row)), key=lambda j: (-row[j], ties * j))
        if drop == "first":
            order = order[1:]
        else:
            order.remove(query)
        matches.append(order[0] != query and labels[order[0]] == labels[query])
    return np.array(matches)


KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "vectors of any length": {"normalized": False},
    "rescorer": {"rescorer": True},
    "sub-spaces": {"subspaces": True},
    "queries of their own, inner product": {"query_vectors": True, "inner": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_mteb_ranks_by_the_distances_of_the_bundle(kind, tmp_path):
    from mteb_protocol import image_task, scores
    from retrieval_mteb import MtebEncoder

    bundle = Bundle.open(make_bundle(tmp_path / "bundle", **KINDS[kind]))
    images, labels = (values[:COUNT] for values in digits())
    measured = scores(MtebEncoder(bundle.path), image_task(images, labels, by_id=True))
    out = bundle.encode_each(list(images), progress=False)
    first, precisions = [], []
    for row, query in enumerate(out.query):
        code = None if out.code is None else out.code[row]
        if "inner" in KINDS[kind]:
            # this bundle's queries are longer than 1, so that distances of large products tie at 0
            distances = -(out.vector.astype(float) @ query)
        else:
            distances = bundle_distances(bundle, query, code, out.vector, out.code, COUNT)
        order = np.argsort(distances, kind="stable")
        matches = (labels == labels[row])[order[order != row]]
        first.append(matches[0])
        precisions.append(average_precision(matches, int(matches.sum())))
    assert measured["hit_rate_at_1"] == pytest.approx(np.mean(first), abs=6e-6)
    assert measured["map_at_1000"] == pytest.approx(np.mean(precisions), abs=6e-6)


def test_a_run_has_our_recall_and_its_bundle_as_revision(mteb, tmp_path):
    from mteb_protocol import image_task, pictures_of, recipe, scores
    from retrieval_mteb import MtebEncoder

    table = recipe("digits") | {"data": {"name": "core.digits"}, "train": {"epochs": 1}}
    table["sampler"] = {"classes": 5, "items": 8, "batches": 2}
    run = retrieval.train(table, tmp_path / "run", progress=False)
    images, labels = pictures_of("digits")
    images, labels = images[labels >= "5"], labels[labels >= "5"]
    encoder = MtebEncoder(run)
    ours = retrieval.evaluate(run.encode("test", progress=False), run.labels("test")).values
    for by_id in (False, True):  # each picture is its own nearest: both are the same
        measured = scores(encoder, image_task(images, labels, by_id))
        assert measured["hit_rate_at_1"] == pytest.approx(ours["recall_at_1"], abs=6e-6)
        assert measured["main_score"] == measured["hit_rate_at_1"]
        # MTEB's recall is the share of the relevant pictures that are found
        assert measured["recall_at_1"] < 0.01
    assert encoder.mteb_model_meta.revision == encoder.bundle.sha256
    assert encoder.mteb_model_meta.name == "retrieval/run"
    assert isinstance(encoder, mteb.EncoderProtocol)
    pairs = encoder.similarity_pairwise(np.eye(64)[:3], np.eye(64)[1:4])
    assert pairs.tolist() == pytest.approx([-(2**0.5)] * 3)


def test_the_first_hit_is_dropped_whatever_it_is():
    from mteb_protocol import image_task, pixel_encoder, scores

    images, labels = (values[:COUNT] for values in digits())
    pixels = images.reshape(COUNT, -1).astype(float)
    matches = {}
    for drop, by_id in (("first", False), ("own", True)):
        matches[drop] = first_matches(pixels @ pixels.T, labels, drop)
        measured = scores(pixel_encoder(), image_task(images, labels, by_id))
        assert measured["hit_rate_at_1"] == pytest.approx(matches[drop].mean(), abs=6e-6)
    # a query whose own picture is not the first hit is judged wrongly in either direction
    assert (matches["own"] & ~matches["first"]).any()
    assert (matches["first"] & ~matches["own"]).any()
    recall = retrieval.evaluate(pixels, labels, distance=lambda a, b: -(a @ b.T)).values
    assert recall["recall_at_1"] == pytest.approx(matches["own"].mean())


def test_ties_are_ordered_by_the_last_id_and_ours_by_the_first_row(tmp_path):
    from mteb_protocol import image_task, scores, sign_encoder

    images, labels = (values[:COUNT] for values in digits())
    encoder = sign_encoder(make_bundle(tmp_path / "bundle"))
    signs = encoder.encode([{"image": list(images)}]).astype(float)
    measured = scores(encoder, image_task(images, labels, by_id=True))
    last, first = (first_matches(signs @ signs.T, labels, "own", ties) for ties in (-1, 1))
    assert measured["hit_rate_at_1"] == pytest.approx(last.mean(), abs=6e-6)
    ours = retrieval.evaluate(signs, labels, metrics=["recall_at_1"]).values
    assert ours["recall_at_1"] == pytest.approx(first.mean())
    assert last.mean() != first.mean()


def test_the_task_on_cub_searches_all_classes_and_drops_the_first_hit(mteb):
    task = mteb.get_task("CUB200I2IRetrieval")
    statistics = task.metadata.descriptive_stats["test"]
    # the test half of 200 classes; the papers search all 5,924 pictures of the last 100
    assert statistics["num_queries"] == statistics["num_documents"] == 5794
    assert task.skip_first_result and not task.ignore_identical_ids
    # a class has 11 to 30 pictures in the test half, so that a query itself is not relevant
    relevant = statistics["relevant_docs_statistics"]
    assert relevant["min_relevant_docs_per_query"] == 10
    assert relevant["max_relevant_docs_per_query"] == 29


def test_a_classification_task_runs(tmp_path):
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.classification import AbsTaskClassification
    from PIL import Image

    from mteb import TaskMetadata
    from mteb_protocol import scores
    from retrieval_mteb import MtebEncoder

    class Digits(AbsTaskClassification):
        input_column_name = "image"
        label_column_name = "label"
        metadata = TaskMetadata(
            name="DigitsInMemory",
            description="Handwritten digits.",
            dataset={"path": "none", "revision": "none"},
            type="ImageClassification",
            category="i2c",
            modalities=["image"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
        )

    images, labels = digits()
    task = Digits()
    sides = {"train": slice(0, 900), "test": slice(900, None)}
    task.dataset = DatasetDict(
        {
            side: Dataset.from_dict(
                {"image": [Image.fromarray(x) for x in images[rows]], "label": labels[rows]}
            )
            for side, rows in sides.items()
        }
    )
    task.data_loaded = True
    measured = scores(MtebEncoder(make_bundle(tmp_path / "bundle")), task)
    # 16 random projections; guessing gives .1
    assert 0.6 < measured["accuracy"] < 0.95


def test_mteb_refuses_a_task_on_texts(mteb, tmp_path):
    from retrieval_mteb import MtebEncoder

    encoder = MtebEncoder(make_bundle(tmp_path / "bundle"))
    with pytest.raises(ValueError, match=r"retrieval/digits supports \['image'\]"):
        mteb.evaluate(encoder, mteb.get_task("Flickr30kI2TRetrieval"), cache=None)


def test_bundles_that_mteb_cannot_use_are_refused(tmp_path):
    from retrieval_mteb import MtebEncoder

    make_bundle(tmp_path / "features", kind="features")
    with pytest.raises(DataError, match="takes vectors of 64 features, and MTEB has images"):
        MtebEncoder(tmp_path / "features")
    make_bundle(tmp_path / "score", subspaces=True)
    change_manifest(tmp_path / "score", lambda content: content.update(merge="score"))
    with pytest.raises(BundleError, match="merges sub-spaces by score"):
        MtebEncoder(tmp_path / "score")
    with pytest.raises(DataError, match="neither a run, nor a bundle"):
        MtebEncoder(tmp_path / "nothing")
