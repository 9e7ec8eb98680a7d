"""12,000 small pictures from training to duplicates; every threshold is the product's own."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval import Index, check_data, evaluate
from retrieval.data import features
from retrieval.data.loading import RawInputs
from retrieval.index import near_pairs, write_embeddings
from retrieval.index.write_embeddings import embed_sources
from retrieval.training.train import train

from retrieval_lab.report import measured, write

pytestmark = pytest.mark.scale

COUNT = 12_000
CLASSES = 100
SIZE = 24
BLURRED = 1_450
"""Pictures of one class that are nearly the same: over a million pairs of them."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "photos"
    random = np.random.default_rng(0)
    for number in range(CLASSES):
        (folder / f"c{number:03}").mkdir(parents=True)
        small = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        whole = np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(int)
        for item in range(COUNT // CLASSES):
            coarse = random.integers(-60, 61, (6, 6, 3)).repeat(4, axis=0).repeat(4, axis=1)
            pixels = whole + coarse + random.integers(-9, 10, whole.shape)
            picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            picture.save(folder / f"c{number:03}" / f"{item:03}.bmp")
    return folder


@pytest.fixture(scope="module")
def run(photos):
    """A frozen net with random weights; half the items of each class are measured."""
    table = {
        "name": "pictures",
        "data": {"name": "core.image_folder", "folder": str(photos)},
        "split": {"by": "item", "test": 0.5, "validation": 0.0},
        "sampler": {"classes": 16, "items": 4, "batches": 4},
        "backbone": {
            "name": "core.convnet",
            "size": SIZE,
            "channels": 3,
            "width": 8,
            "depth": 2,
            "frozen": True,
        },
        "head": {"embedding_size": 16},
        "loss": {"name": "pml.contrastive"},
        "train": {"epochs": 1, "device": "cpu"},
    }
    return train(table, output=photos.parent / "run", progress=False)


@pytest.fixture(scope="module")
def bundle(run):
    return run.export(run.path.parent / "bundle").path


@pytest.fixture(scope="module")
def test_items(run):
    """Numbers of the items that are measured, in the order of `Run.encode`."""
    return run.splits.query


@pytest.fixture(scope="module")
def vectors(run):
    """The vectors of the measured items, by features that a graph has computed."""
    assert COUNT * 3 * SIZE * SIZE > features.LEAST
    return np.asarray(run.encode("test", progress=False), np.float64)


def test_vectors_equal_those_of_torch_alone(run, test_items, vectors):
    chosen = np.arange(0, len(test_items), len(test_items) // (3 * features._MAX_IMAGES))
    inputs = RawInputs(run.dataset, run.model.preprocessing).batch(test_items[chosen])
    run.model.eval()
    with torch.inference_mode():
        expected = run.model(torch.from_numpy(inputs))[1].double().numpy()
    np.testing.assert_allclose(vectors[chosen], expected, atol=1e-5)


def test_a_run_and_its_report_give_the_metrics_of_its_vectors(run, test_items, vectors, tmp_path):
    labels = run.splits.labels[test_items]
    lengths = np.square(vectors).sum(axis=1)
    squared = lengths[::60, None] + lengths - 2 * vectors[::60] @ vectors.T
    squared[np.arange(len(squared)), np.arange(len(vectors))[::60]] = np.inf
    nearest = labels[squared.argmin(axis=1)] == labels[::60]
    whole = evaluate(vectors, labels, metrics=["recall_at_1", "map_at_r"])
    assert (whole.per_query["recall_at_1"][::60] == nearest).mean() > 0.99  # rounding may order two
    values = run.evaluate(progress=False).metrics["trained"]
    assert values["recall_at_1"] == pytest.approx(whole.values["recall_at_1"], abs=2e-3)
    assert values["map_at_r"] == pytest.approx(whole.values["map_at_r"], abs=1e-3)
    sample = 900
    assert COUNT // CLASSES // 2 > measured.PER_CLASS
    assert sample > write.THUMBNAILS
    page = write.report(run, tmp_path / "report.html", sample=sample, progress=False)
    text = page.read_text(encoding="utf-8")
    assert len(set(re.findall(r"data:image/png[^\"]+", text))) == write.THUMBNAILS
    result = measured.measure(run, sample)
    assert result.intervals["recall_at_1"][0] == pytest.approx(values["recall_at_1"], abs=1e-9)
    assert len(result.pairs.items) == sample
    classes = -(-sample // measured.PER_CLASS)
    assert f"{sample} of {COUNT // 2:,} test items, of {classes} classes" in text


def test_data_check_finds_leaks_and_stops_at_too_many_pairs(photos, tmp_path):
    clean = check_data(photos, progress=False)
    assert len(clean.subjects) == COUNT > near_pairs._ROWS
    assert clean.clean
    assert clean.complete
    random = np.random.default_rng(4)
    base = random.integers(0, 256, (SIZE, SIZE, 3))
    (tmp_path / "many").mkdir()
    for number in range(BLURRED):
        pixels = np.clip(base + random.integers(-1, 2, base.shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "many" / f"{number}.bmp")
    assert BLURRED * (BLURRED - 1) // 2 > near_pairs.MAX_PAIRS
    assert BLURRED * near_pairs._ROWS // 2 > near_pairs._ENTRIES
    many = check_data(tmp_path, progress=False)
    assert not many.complete
    assert len(many.near) > near_pairs.MAX_PAIRS


def blocks(table):
    """Yield the number of a row, and squared distances of 1,000 rows from it on to all others."""
    squares = np.square(table).sum(axis=1)
    for start in range(0, len(table), 1000):
        part = slice(start, start + 1000)
        squared = squares[part, None] + squares - 2 * table[part] @ table.T
        rows = np.arange(len(squared))
        squared[rows, rows + start] = np.inf
        yield start, squared


def test_pictures_are_embedded_in_parts_and_duplicates_are_those_of_all_pairs(
    photos, run, test_items, vectors, bundle, tmp_path
):
    embedded = tmp_path / "vectors"
    embed_sources(bundle, photos, embedded, progress=False)
    assert len([*embedded.glob("*.parquet")]) == -(-COUNT // write_embeddings._SMALLEST_PART)
    with Index.create(tmp_path / "index", embedded, model=bundle, progress=False) as index:
        items = index.store.scan(limit=COUNT)
        assert len(items) == COUNT
        rows = index.store.get([item.id for item in items], arrays=True)
        ids = sorted(rows)
        table = np.array([rows[id].vector for id in ids], np.float64)
        measured_ids = [run.dataset.keys[item] for item in test_items]
        np.testing.assert_allclose([rows[id].vector for id in measured_ids], vectors, atol=1e-5)
        _, squared = next(blocks(table))
        within = float(np.sqrt(np.sort(squared.min(axis=1))[25]))
        near = [
            (row + start, other)
            for start, squared in blocks(table)
            for row, other in [np.nonzero(squared <= (within + 1e-6) ** 2)]
        ]
        first, second = map(np.concatenate, zip(*near, strict=True))
        exact = np.linalg.norm(table[first] - table[second], axis=1) <= within
        near = {row: [] for row in range(COUNT)}
        for row, other in zip(first[exact].tolist(), second[exact].tolist(), strict=True):
            if row != other:
                near[row].append(other)
        free = set(range(COUNT))
        expected = set()
        for row in sorted(range(COUNT), key=lambda row: (-len(near[row]), row)):
            group = [row, *(other for other in near[row] if other in free)]
            if row in free and len(group) > 1:
                free -= set(group)
                expected.add(tuple(ids[member] for member in group))
        groups = index.duplicates(within, progress=False)
    assert {duplicates.ids for duplicates in groups} == expected
    assert len(expected) > 50
