"""Near-duplicates, clusters and tuning, on handwritten digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index import tuning
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.index.tuning import Tuned
from retrieval.serving.manifest import read_manifest, write_manifest
from retrieval.serving.store import structure
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.testing.bundles import make_bundle
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
    hits = index.duplicates(limit, progress=False)
    assert [group.ids for group in hits] == [
        (f"{n:04}", f"{n:04}-again", f"{n:04}-apart") for n in range(20)
    ]
    assert all(group.largest == pytest.approx(1e-3, rel=1e-3) for group in hits)
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


def test_clusters_hold_every_item_once(digits: tuple[Index, np.ndarray]) -> None:
    index, _ = digits
    hits = index.clusters(10, progress=False)
    assert sum(cluster.count for cluster in hits) == len(index)
    assert [cluster.count for cluster in hits] == sorted(
        (cluster.count for cluster in hits), reverse=True
    )
    main = sum(cluster.labels[0][1] for cluster in hits)
    assert main > 0.5 * len(index)  # a tenth, were they drawn at random
    assert hits == index.clusters(10, progress=False)
    with pytest.raises(DataError, match="cannot make 5,000 clusters"):
        index.clusters(5000, progress=False)


def test_tuning_takes_what_meets_both_limits(
    digits: tuple[Index, np.ndarray], monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    index, _ = digits
    monkeypatch.setattr(structure, "LEAST", 1000)
    tuned = index.tune(recall=0.9, progress=False)
    assert tuned.chosen is not None and tuned.chosen.recall >= 0.9
    assert tuned.chosen.milliseconds == min(
        entry.milliseconds for entry in tuned.trials if entry.recall >= 0.9
    )
    assert {entry.backend for entry in tuned.trials} == {
        "flat",
        "sq8",
        "hnsw",
        "ivf",
        "ivfpq",
        "rabitq",
    }
    hits = index.stats().details["structure"]
    assert hits == (None if tuned.chosen.backend == "flat" else tuned.chosen.backend)
    small = index.tune(recall=0.9, memory=1000, apply=False, progress=False)
    assert small.chosen is None
    shown = cli("index", "show", index.path).out
    assert f"over {tuned.count:,} vectors, for a recall of 0.9:" in shown
    assert shown.count("hnsw m=") == 10 and shown.count("\n* ") == 1
    kept = index.stats().details["tuned"]
    assert json.loads(cli("index", "show", index.path, "--json").out)["tuned"] == kept
    assert (
        Tuned.of(kept) == tuned
        and kept["trials"][kept["chosen"]]["backend"] == tuned.chosen.backend
    )
    copy = index.snapshot(index.path.with_name("copy"))
    with Index.open(copy, threads=1) as opened:
        assert opened.stats().details["tuned"] == kept
    for damage in (
        {},
        {**kept, "chosen": 1000},
        {**kept, "trials": [1]},
        [],
        {**kept, "memory": "much"},
    ):
        with pytest.raises(StoreError, match="Tune it again"):
            Tuned.of(damage)
    with pytest.raises(DataError, match="above 0 and at most 1"):
        index.tune(recall=0)


@pytest.mark.parametrize("merge", ["min", "score"])
def test_tuning_weighs_sub_spaces(
    merge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a structure of its own; what all of them propose is measured as searches measure it."""
    monkeypatch.setattr(structure, "LEAST", 1000)
    few = [
        ("flat", {}, [{}]),
        ("sq8", {}, [{}]),
        ("ivf", {"lists": 40}, [{"probes": 1}, {"probes": 40}]),
    ]
    monkeypatch.setattr(tuning, "_grid", lambda count, width: iter(few))
    monkeypatch.setattr(tuning, "_ROUNDS", 1)
    created = make_bundle(tmp_path / "b", subspaces=True)
    write_manifest(created, read_manifest(created).model_copy(update={"merge": merge}))
    bundle = Bundle.open(created, threads=1)
    features = np.random.default_rng(5).normal(size=(1500, 8)).astype(np.float32)
    vectors = bundle.encode(features).vector
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with Index.open(tmp_path / "i", threads=1) as index:
        index.upsert([Item(f"{n:04}", arrays={"vector": vectors[n]}) for n in range(len(vectors))])
        queries = features[:20] + np.float32(0.1)
        exact = index.search(queries, 10)
        tuned = index.tune(recall=0.99, progress=False)
        assert tuned.chosen is not None and tuned.trials[0].recall == 1
        assert min(entry.recall for entry in tuned.trials) < 0.99 <= tuned.chosen.recall
        index.store.restructure(Wanted("sq8"))
        index.store.compact()
        assert index.stats().details["structure"] == "sq8"
        ids = [
            ({hit.id for hit in entry}, {hit.id for hit in other})
            for entry, other in zip(exact, index.search(queries, 10), strict=True)
        ]
        share = np.mean([len(entry & other) / 10 for entry, other in ids])
        (trial,) = (entry for entry in tuned.trials if entry.backend == "sq8")
        assert share == pytest.approx(trial.recall, abs=0.02)


def test_there_is_nothing_to_tune_in_a_small_index(tmp_path: Path, plain_bundle: Path) -> None:
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with (
        Index.open(tmp_path / "i", threads=1) as index,
        pytest.raises(DataError, match="nothing to tune below"),
    ):
        index.tune(progress=False)
