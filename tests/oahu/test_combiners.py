"""ABTL as a deep loss, both ways to search, and OAHU models from recipes to search results."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oahu_loops as loops
import pytest
import torch
from retrieval.bundle.bundle import Bundle
from retrieval.export.export_model import export_model
from retrieval.host.plugins import load_plugins
from retrieval.index.index import Index, create_index, open_index
from retrieval.model.model import Model
from retrieval.run.open import Run
from sklearn.datasets import load_digits

from retrieval_oahu import ABTL, OAHU, OASIS, HedgeScore, HedgeSum, Spaces, Warm

SMALL: dict[str, Any] = {"depth": 2, "hidden": 16, "embedding": 6, "seeds": 300, "closure": 300}
DIGITS = load_digits()
X, Y = DIGITS.data[:400].astype(np.float32), DIGITS.target[:400]
QUERIES = DIGITS.data[400:412].astype(np.float32)
LABELS = torch.tensor([0, 0, 0, 1, 1, 2])


def batch(width: int = 4) -> torch.Tensor:
    built = torch.randn(6, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return built.requires_grad_()


def triplets(labels: list[int]) -> list[tuple[int, int, int]]:
    rows = itertools.product(range(len(labels)), repeat=3)
    same = [(a, p, n) for a, p, n in rows if a != p and labels[a] == labels[p]]
    return [(a, p, n) for a, p, n in same if labels[a] != labels[n]]


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.9])
@pytest.mark.filterwarnings("ignore:tau is")
def test_abtl_and_its_gradient_by_loops(tau):
    def distances(rows: list[list[float]]) -> list[tuple[float, float]]:
        unit = [[v / sum(c * c for c in row) ** 0.5 for v in row] for row in rows]
        return [
            (loops.distance(unit[a], unit[p]), loops.distance(unit[a], unit[n]))
            for a, p, n in triplets(LABELS.tolist())
        ]

    x = batch()
    fixed = [loops.thresholds(*pair, tau) for pair in distances(x.tolist())]

    def mean(rows: list[list[float]]) -> float:
        values = [loops.local_loss(*d, *t) for d, t in zip(distances(rows), fixed, strict=True)]
        return sum(values) / len(values)

    value = ABTL(tau)(x, LABELS)
    value.backward()
    assert value.item() == pytest.approx(mean(x.tolist()), abs=1e-12)
    for row, column in itertools.product(range(6), range(4)):
        sides = []
        for sign in (1, -1):
            moved = x.tolist()
            moved[row][column] += sign * 1e-6
            sides.append(mean(moved))
        slope = (sides[0] - sides[1]) / 2e-6
        assert x.grad[row, column].item() == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("kind", [HedgeScore, HedgeSum])
def test_with_a_hedge_it_is_the_weighted_sum_and_updates_the_weights(kind):
    combiner = kind(embedding=2, depth=1, beta=0.5)
    combiner.get_buffer("alpha").copy_(torch.tensor([0.3, 0.7]))
    loss = ABTL(0.4, distance=combiner)
    unit = torch.nn.functional.normalize(batch().detach().view(6, 2, 2), dim=2)
    x = unit.flatten(1).requires_grad_()
    value = loss(x, LABELS)
    means = []
    for level in range(2):
        rows = x.detach()[:, 2 * level : 2 * level + 2].tolist()
        entry = []
        for a, p, n in triplets(LABELS.tolist()):
            d = loops.distance(rows[a], rows[p]), loops.distance(rows[a], rows[n])
            entry.append(loops.local_loss(*d, *loops.thresholds(*d, 0.4)))
        means.append(sum(entry) / len(entry))
    assert value.item() == pytest.approx(0.3 * means[0] + 0.7 * means[1], abs=1e-6)
    hedged = loops.hedge([0.3, 0.7], means, 0.5, 0.1, "exp")
    assert combiner.alpha.tolist() == pytest.approx(hedged, abs=1e-6)
    value.backward()
    assert x.grad.abs().sum() > 0
    before = combiner.alpha.clone()
    loss.eval()
    loss(x, LABELS)
    with torch.no_grad():
        loss.train()
        loss(x, LABELS)
    assert torch.equal(before, combiner.alpha)  # only training updates the weights
    other = kind(embedding=2, depth=1)
    other.load_state_dict(combiner.state_dict())
    if kind is HedgeScore:
        assert [s.weight for s in other.subspaces] == pytest.approx(before.tolist())


def test_a_similarity_and_nan_are_refused():
    from pytorch_metric_learning.distances import CosineSimilarity
    from retrieval.errors import DataError

    with pytest.raises(ValueError, match="needs a distance"):
        ABTL(distance=CosineSimilarity())
    with pytest.raises(ValueError, match="tau"):
        ABTL(2.0)
    with pytest.warns(UserWarning, match="2/3"):
        ABTL(1.5)
    with pytest.raises(DataError, match="NaN"):
        ABTL()(torch.full((6, 4), torch.nan), LABELS)


def learned(search: str, **options: Any) -> OAHU:
    return OAHU(**{**SMALL, "search": search, **options}).fit(X, Y)


def exported(learner: Any, folder: Path) -> Bundle:
    head, combiner = learner.to_model_parts()
    features = load_plugins().build("backbones", {"name": "core.features"}, {"features": 64})
    export_model(Model(features, head, combiner), X, folder, name="b")
    return Bundle.open(folder, threads=1)


def by_item(learner: OAHU, x: Any) -> Any:
    """Unit embeddings (N, L + 1, E)."""
    return learner.spaces(x).embeddings.transpose(1, 0, 2)


def indexed(bundle: Bundle, folder: Path) -> Index:
    keys = [f"{row:04}" for row in range(len(X))]
    np.savez(folder / "items.npz", features=X, labels=Y.astype(str), keys=keys)
    create_index(folder / "index", bundle, [folder / "items.npz"], backend="flat", progress=False)
    return open_index(folder / "index", threads=1)


@pytest.mark.parametrize("k", [1, 5, 17])
def test_search_results_are_those_of_eq_27(k, tmp_path):
    learner = learned("score")
    bundle = exported(learner, tmp_path / "bundle")
    assert bundle.manifest.merge == "score" and len(bundle.manifest.subspaces) == 3
    assert [s.weight for s in bundle.manifest.subspaces] == pytest.approx(learner.alpha_.tolist())
    with indexed(bundle, tmp_path) as index:
        references, queries = (by_item(learner, x).tolist() for x in (X, QUERIES))
        answers = index.search(bundle.encode(QUERIES), k)
        for hits, query in zip(answers, queries, strict=True):
            expected = loops.retrieve(query, references, learner.alpha_.tolist(), k)
            scores = [float(np.exp(-hit.distance)) for hit in hits]
            assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
            rows = {f"{row:04}" for row, _ in expected}
            assert len({hit.id for hit in hits} & rows) >= k - 1  # the last may be a tie in float32


def test_the_weighted_sum_is_exact_and_its_weights_change_without_a_rebuild(tmp_path):
    learner = learned("sum")
    bundle = exported(learner, tmp_path / "one")
    assert not bundle.manifest.subspaces and bundle.manifest.query_vectors

    with indexed(bundle, tmp_path) as index:
        items = np.array([index.vector(f"{row:04}") for row in range(len(X))])
        assert np.allclose(items, by_item(learner, X).reshape(len(X), -1), atol=1e-5)
        learner.alpha_ = np.array([0.7, 0.1, 0.2])  # as after further triplets
        other = exported(learner, tmp_path / "two")
        assert np.allclose(other.encode(X).vector, bundle.encode(X).vector, atol=1e-6)
        answers = index.search(replace(other.encode(QUERIES), bundle=""), 5)
        apart = (
            learner.spaces(QUERIES).embeddings[:, :, None] - learner.spaces(X).embeddings[:, None]
        )
        sums = np.einsum("l,lqne->qn", learner.alpha_, apart.astype(np.float64) ** 2)
        for hits, row in zip(answers, sums, strict=True):
            squares = [row[int(hit.id)] for hit in hits]
            assert squares == pytest.approx(np.sort(row)[:5].tolist(), abs=1e-4)
            # the distance is the root of the sum, with the weights of the query's bundle
            assert [hit.distance**2 for hit in hits] == pytest.approx(squares, abs=1e-5)
        for number, hits in enumerate(index.search(replace(other.encode(X[:20]), bundle=""), 1)):
            assert (int(hits[0].id), hits[0].distance) == (number, 0.0)


@pytest.mark.parametrize("search", ["score", "sum"])
def test_the_three_uses_work_from_a_bundle(search, tmp_path):
    learner = learned(search)
    bundle = exported(learner, tmp_path / "bundle")
    items, queries = (Spaces.of_bundle(bundle, x, 3) for x in (X, QUERIES))
    assert np.allclose(items.alpha, learner.alpha_, atol=1e-5)
    mine = learner.spaces(X)
    assert (queries.classify(items, Y, 5) == learner.classify(QUERIES, mine, Y, 5)).all()
    rows, scores = queries.retrieve(items, 5)
    assert np.allclose(scores, learner.retrieve(QUERIES, mine, 5)[1], atol=1e-4)
    assert (rows[:, 0] == learner.retrieve(QUERIES, mine, 5)[0][:, 0]).mean() > 0.9
    p = queries.similar(items[:12], 0.3)
    assert np.allclose(p, learner.similar(QUERIES, X[:12], 0.3), atol=1e-5)
    if search == "sum":
        with pytest.raises(ValueError, match="Set spaces to the number of equal spaces"):
            Spaces.of_bundle(bundle, X)


def test_training_goes_on_after_an_export(tmp_path):
    from retrieval_oahu import from_labels, in_chunks, with_closure

    learner = OAHU(**SMALL, search="score").prepare(X)
    chunks = in_chunks(with_closure(from_labels(Y)), X, 50)  # it never ends
    seen = []
    for number in range(3):
        learner.save(tmp_path / "live.safetensors")
        learner = OAHU.load(tmp_path / "live.safetensors")
        for _ in range(4):
            learner.partial_fit(next(chunks))
        bundle = exported(learner, tmp_path / f"bundle{number}")
        vectors = bundle.encode(QUERIES).vector
        assert np.allclose(vectors, by_item(learner, QUERIES).reshape(12, -1), atol=1e-4)
        served = [space.weight for space in bundle.manifest.subspaces]
        assert served == pytest.approx(learner.alpha_.tolist())
        seen.append(vectors)
    assert learner.n_triplets_ == 600 and np.abs(seen[0] - seen[2]).max() > 0.01


def test_search_with_oasis_and_warm(tmp_path):
    rng = np.random.default_rng(0)
    columns, rows = rng.lognormal(0, 1.5, X.shape[1]), rng.lognormal(0, 1.5, (len(X), 1))
    for name, learner, features in (
        ("oasis", OASIS(seeds=300, closure=0), X),
        ("map", Warm(seeds=2500, closure=0), X * columns),
        ("angle", Warm(components=20, seeds=1500, closure=0), X * rows),
        ("euclid", Warm(components=20, seeds=1500, closure=0), X),  # no expert is better on digits
    ):
        learner.fit(features, Y)
        if isinstance(learner, Warm):
            assert learner.left_ is (name != "euclid")
            assert np.allclose(np.linalg.norm(learner.transform(X), axis=1), 1) is (name == "angle")
        (tmp_path / name).mkdir()
        bundle = exported(learner, tmp_path / name / "bundle")
        with indexed(bundle, tmp_path / name) as index:
            answers = index.search(bundle.encode(QUERIES), 5)
        if isinstance(learner, OASIS):
            rank = -(learner.queries(QUERIES) @ learner.transform(X).T)
        else:
            rank = ((learner.transform(QUERIES)[:, None] - learner.transform(X)) ** 2).sum(2)
        for hits, row in zip(answers, rank, strict=True):
            best = np.sort(row)[:5].tolist()
            assert [row[int(hit.id)] for hit in hits] == pytest.approx(best, rel=1e-3)


RECIPE = """
[data]
name = "core.features"
file = "{file}"
[split]
by = "item"
test = 0.3
[backbone]
name = "core.features"
"""
LEARNER = """
[learner]
name = "oahu.oahu"
depth = 2
hidden = 16
embedding = 8
seeds = 400
closure = 400
search = "score"
"""
DEEP = """
[sampler]
classes = 5
items = 4
batches = 10
[combiner]
name = "oahu.{combiner}"
depth = 2
hidden = 16
embedding = 8
[loss]
name = "oahu.abtl"
[train]
epochs = 1
"""


@pytest.mark.parametrize("kind", ["learner", "hedge", "hedge_sum"])
def test_from_recipe_to_search_results(kind, cli, tmp_path):
    part = LEARNER if kind == "learner" else DEEP.format(combiner=kind)

    def run(*words: str | Path) -> str:
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
        return str(outcome.out)

    np.savez(tmp_path / "digits.npz", features=X / 16, labels=Y.astype(str))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(file=tmp_path / "digits.npz") + part)
    run("train", tmp_path / "recipe.toml", "--output", tmp_path / "run")
    model = Run.open(tmp_path / "run").model
    alpha = model.combiner.get_buffer("alpha")
    assert alpha.sum().item() == pytest.approx(1) and alpha.std() > 1e-5  # the weights have changed
    run("export", tmp_path / "run", "-o", tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "rescorer.onnx").exists()
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    if manifest["subspaces"]:
        assert [s["weight"] for s in manifest["subspaces"]] == pytest.approx(alpha.tolist())
    index, queries = tmp_path / "index", tmp_path / "queries.npz"
    np.savez(queries, features=X[:30] / 16)
    run("index", "create", index, tmp_path / "digits.npz", "--bundle", tmp_path / "bundle")
    answers = json.loads(run("search", index, queries, "-k", "3", "--json"))
    labels = np.array([[r["label"] for r in answer["results"]] for answer in answers])
    assert (labels[:, 0] == Y[:30].astype(str)).all()  # the nearest item is the query itself
    assert (labels == Y[:30, None].astype(str)).mean() > 0.6
