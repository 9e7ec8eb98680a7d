"""Metrics block by block, of arrays and of files, are those of `evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from array_rows import ArrayRows
from retrieval.errors import DataError
from retrieval.evaluation import pairwise as module
from retrieval.evaluation.evaluation import evaluate
from retrieval.evaluation.pairwise import evaluate_vectors, pairwise

METRICS = ("recall_at_1", "recall_at_4", "r_precision", "map_at_r")


def clusters(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 12 classes of unequal size, with duplicates and a class of one item."""
    rng = np.random.default_rng(seed)
    labels = np.minimum(rng.geometric(0.2, count), 11)
    codes = rng.normal(size=(12, 8))[labels] + rng.normal(size=(count, 8))
    codes[count // 2 : count // 2 + 20] = codes[:20]  # equal distances, of unlike labels too
    labels[-1] = 99
    return codes.astype(np.float32), labels


@pytest.fixture(params=[17, 100, None])
def block(request, monkeypatch):
    """Number of queries and of items per block; a thread searches for seven queries at a time."""
    monkeypatch.setattr(module.Neighbors, "block", lambda self, k: 7)
    if request.param is not None:
        monkeypatch.setattr(module, "_QUERIES", request.param)
        monkeypatch.setattr(module, "_GALLERY_BYTES", 64 * request.param)


def test_metrics_equal_those_of_evaluate_for_any_block_size(block):
    codes, labels = clusters(500)
    assert pairwise(ArrayRows(codes), labels, metrics=METRICS) == evaluate(
        codes, labels, metrics=METRICS
    )
    options = {"gallery_labels": labels[90:], "metrics": METRICS}
    result = pairwise(ArrayRows(codes[:90]), labels[:90], ArrayRows(codes[90:]), **options)
    assert result == evaluate(codes[:90], labels[:90], gallery=codes[90:], **options)


def test_a_folder_of_embeddings_is_evaluated_from_its_files(makers, cli, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

    makers.write_digits(tmp_path / "photos", 150)
    bundle = makers.make_bundle(tmp_path / "bundle")
    (tmp_path / "photos" / "0" / "bad.png").write_bytes(b"no")
    options = EmbeddingOptions(batch_size=8)
    embed_sources(bundle, tmp_path / "photos", tmp_path / "v", options, progress=False)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "v").glob("*.parquet"))]
    codes = np.concatenate([np.array(one["vector"].to_pylist(), np.float32) for one in tables])
    labels = [label for one in tables for label in one["label"].to_pylist()]
    wanted = evaluate(codes, labels)
    assert evaluate_vectors(tmp_path / "v", progress=False) == wanted
    shown = cli("evaluate", tmp_path / "v", "--metric", "recall_at_1")
    assert shown.code == 0
    assert f"{wanted.values['recall_at_1']:.4f}" in shown.out
    assert "150 queries" in shown.out
    assert "Leave --clusters out" in cli("evaluate", tmp_path / "v", "--clusters").err

    embed_sources(bundle, tmp_path / "photos" / "1", tmp_path / "q", options, progress=False)
    found = evaluate_vectors(tmp_path / "q", gallery=tmp_path / "v", progress=False)
    assert found.gallery == 150 and found.values["recall_at_1"] == 1.0  # each finds itself
    embed_sources(bundle, tmp_path / "photos" / "2", tmp_path / "r", options, progress=False)
    unanswered = cli("evaluate", tmp_path / "q", "--gallery", tmp_path / "r", "--json")
    assert unanswered.code == 2 and "can be a query, so there is no score" in unanswered.err
    other = makers.make_bundle(tmp_path / "other", seed=9)
    embed_sources(other, tmp_path / "photos" / "1", tmp_path / "w", options, progress=False)
    with pytest.raises(DataError, match="vectors of two bundles"):
        evaluate_vectors(tmp_path / "w", gallery=tmp_path / "v", progress=False)


WIDE, PART = 2048, 4096


def written(folder: Path, codes: Callable[[int], np.ndarray], parts: int, size: int) -> None:
    """Write a folder of vectors as `retrieval embed` does."""
    from retrieval.index.read_embeddings import EmbeddingPlan
    from retrieval.index.sources import PLAN, Batch, Source, SourceColumns
    from retrieval.index.write_embeddings import write_part

    folder.mkdir()
    sizes = parts * size, size, 1, {"vector": WIDE}, [1, 1]
    plan = EmbeddingPlan("0" * 64, None, "", *sizes, complete=True, bad=0)
    for number in range(parts):
        items = SourceColumns.of(
            [Source(str(row), str(row % 7), None, row=row) for row in plan.rows(number)]
        )
        embedded = items.items("reference", [""] * len(items), {"vector": codes(number)})
        write_part(folder, plan, number, items, [Batch(embedded, {}, len(items))])
    (folder / PLAN).write_text(plan.text())


BOUNDED = """
import os, resource, sys
from pathlib import Path
from retrieval.evaluation.pairwise import evaluate_vectors

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one worker
for gallery in sys.argv[2:]:
    before = peak()
    result = evaluate_vectors(sys.argv[1], gallery=gallery, metrics=["recall_at_1"], progress=False)
    print(result.values["recall_at_1"], result.gallery, peak() - before)
"""


def test_a_worker_holds_a_block_and_not_the_gallery(tmp_path, process):
    """The small gallery is searched first, so that the peak grows by the large one's blocks."""
    pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    rng = np.random.default_rng(0)
    same = rng.normal(size=(PART, WIDE)).astype(np.float32)
    written(tmp_path / "q", lambda number: same[:14], 1, 14)
    written(tmp_path / "small", lambda number: same, 1, PART)
    written(tmp_path / "large", lambda number: same + np.float32(number), 8, PART)
    folders = [tmp_path / name for name in ("q", "small", "large")]
    done = process("-c", BOUNDED, *folders, seconds=300, OMP_NUM_THREADS="1")
    recall, gallery, added = done.out.splitlines()[-1].split()
    assert float(recall) == 1.0 and int(gallery) == 8 * PART
    assert int(added) < 4 * WIDE * PART * 8 / 4
