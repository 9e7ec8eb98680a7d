"""Reducers, regularisers, distances and miners against plain loops, and their error messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.host.factory import KINDS
from retrieval.host.plugins import load_plugins
from torch import Tensor

PLUGINS = load_plugins()
GIVEN = {"embedding_size": 6, "classes": 4}
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(4).repeat_interleave(3)
WEIGHTS = [1.0, 10.0, 100.0, 1000.0]


def make(kind: str, name: str, /, **values: Any) -> Any:
    return PLUGINS.build(kind, {"name": f"pml.{name}", **values}, GIVEN)


def parts(loss: str, **values: Any) -> tuple[list[float], list[Tensor]]:
    """Return a loss's values before reduction, with their indices."""
    built = make("losses", loss, reducer="pml.per_anchor", **values)
    actual = built.compute_loss(X, Y, None, X, Y)["loss"]
    indices = actual["indices"]
    return actual["losses"].flatten().tolist(), [indices] if torch.is_tensor(indices) else list(
        indices
    )


PAIRWISE = ["angular", "lifted_structure", "triplet_margin", "nt_xent"]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


class TestReducers:
    @pytest.mark.parametrize("loss", [*PAIRWISE, "multi_similarity", "sup_con"])
    def test_by_loops(self, loss):
        values, indices = parts(loss)
        anchors = indices[0].tolist()
        middle = sorted(values)[len(values) // 2]
        weighted = [v * WEIGHTS[Y[i]] for v, i in zip(values, anchors, strict=True)]
        cases: list[tuple[Any, float]] = [
            ("pml.mean", mean(values)),
            ("pml.sum", sum(values)),
            ("pml.avg_non_zero", mean([v for v in values if v > 0])),
            ({"name": "pml.threshold", "low": middle}, mean([v for v in values if v > middle])),
            ({"name": "pml.class_weighted", "weights": WEIGHTS}, mean(weighted)),
        ]
        if loss in PAIRWISE:
            own = [
                [v for v, a in zip(values, anchors, strict=True) if a == anchor]
                for anchor in range(12)
            ]
            cases.append(("pml.per_anchor", mean([mean(of_anchor) for of_anchor in own])))
        for reducer, expected in cases:
            value = make("losses", loss, reducer=reducer)(X, Y).item()
            assert value == pytest.approx(expected, rel=1e-5), reducer
        built = make("losses", loss, reducer="pml.per_anchor")
        assert built(X, Y, None, torch.randn(30, 6), torch.arange(30) % 4).isfinite()

    def test_multiple(self):
        reducer = {"name": "pml.multiple", "names": ["pos_loss"], "reducers": ["pml.sum"]}
        reducer["default_reducer"] = "pml.mean"
        # This reducer needs the loss of each pair; for others the negatives' losses are added up.
        listed = make("losses", "contrastive", reducer="pml.per_anchor")
        actual = listed.compute_loss(X, Y, None, X, Y)
        expected = actual["pos_loss"]["losses"].sum() + actual["neg_loss"]["losses"].mean()
        value = make("losses", "contrastive", reducer=reducer)(X, Y).item()
        assert value == pytest.approx(expected.item())

    def test_errors(self):
        with pytest.raises(ValueError, match=r"defines no divisor for pml\.divisor"):
            make("losses", "contrastive", reducer="pml.divisor")(X, Y)
        with pytest.raises(RecipeError, match="3 weights, but 4 training classes"):
            make("reducers", "class_weighted", weights=WEIGHTS[:3])
        with pytest.raises(RecipeError, match="as many different names"):
            make("reducers", "multiple", names=["a", "a"], reducers=["pml.sum", "pml.mean"])
        with pytest.raises(RecipeError, match="At least one of low or high"):
            make("reducers", "threshold")


class TestRegularisers:
    @pytest.mark.parametrize("name", ["lp", "zero_mean"])
    def test_on_embeddings(self, name):
        penalties = [math.hypot(*row) if name == "lp" else abs(sum(row)) for row in X.tolist()]
        parameters = {"embedding_regularizer": f"pml.{name}", "embedding_reg_weight": 0.5}
        expected = make("losses", "contrastive")(X, Y).item() + 0.5 * mean(penalties)
        value = make("losses", "contrastive", **parameters)(X, Y).item()
        assert value == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(
        "loss", ["arc_face", "normalized_softmax", "proxy_anchor", "proxy_nca", "soft_triple"]
    )
    @pytest.mark.parametrize("name", ["center_invariant", "regular_face", "lp", "zero_mean"])
    def test_on_weights(self, loss, name):
        built = make("losses", loss, weight_regularizer=f"pml.{name}", weight_reg_weight=0.5)
        (weights,) = built.parameters()
        rows = weights if weights.shape[1] == 6 else weights.t()
        plain = make("losses", loss)
        plain.load_state_dict(built.state_dict())
        penalty = 0.5 * make("regularizers", name)(rows)
        assert built(X, Y).item() == pytest.approx((plain(X, Y) + penalty).item(), rel=1e-5)

    def test_sparse_centers(self):
        table = {"name": "pml.sparse_centers", "centers_per_class": 2}
        generator = torch.Generator().manual_seed(1)
        rows = torch.nn.functional.normalize(torch.randn(8, 6, generator=generator))
        pairs = [float(rows[2 * c] @ rows[2 * c + 1]) for c in range(4)]
        expected = sum(math.sqrt(2 - 2 * cosine) for cosine in pairs) / 8
        built = make("regularizers", "sparse_centers", centers_per_class=2)
        assert built(rows).item() == pytest.approx(expected, rel=1e-5)
        loss = make("losses", "soft_triple", centers_per_class=2, weight_regularizer=table)
        assert loss(X, Y).isfinite()

    def test_errors(self):
        wanting = {"regular_face": "regularizers", "soft_triple": "losses", "manifold": "losses"}
        for name, kind in wanting.items():
            with pytest.raises(RecipeError, match=r"needs a similarity.*LpDistance is a distance"):
                make(kind, name, distance="pml.lp")
        with pytest.raises(RecipeError, match=r"needs a distance.*CosineSimilarity is a simil"):
            make("losses", "ranked_list", margin=0.4, Tn=10, distance="pml.cosine_similarity")


MEASURING = [
    name
    for name, factory in PLUGINS.factories("losses").items()
    if {"distance"} == {p.name for p in factory.parameters} & {"distance", "classes"}
]


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("distance", ["lp", "cosine_similarity", "dot_product_similarity"])
def test_a_loss_knows_a_similarity_from_a_distance(name, distance):
    generator = torch.Generator().manual_seed(0)
    centres, noise = torch.randn(4, 16, generator=generator), torch.randn(16, 16)
    labels = torch.arange(16) % 4
    table = {"name": name, "distance": f"pml.{distance}"}
    table |= {"margin": 0.4, "Tn": 5.0} if name == "pml.ranked_list" else {}
    wrong_kinds = {"pml.ranked_list": True, "oahu.abtl": True, "pml.manifold": False}
    if wrong_kinds.get(name) is (distance != "lp"):
        with pytest.raises(RecipeError, match="similarity"):
            PLUGINS.build("losses", table, known={"embedding_size": 16})
        return
    loss = PLUGINS.build("losses", table, known={"embedding_size": 16})
    near = centres[labels] + 0.3 * noise
    mixed = centres[torch.arange(16) // 4] + 0.3 * noise  # each cluster has items of each class
    assert float(loss(near, labels)) < float(loss(mixed, labels))


def test_distances():
    a, b = [x / x.norm() for x in X[:2]]
    expected = {"pml.lp": float((a - b).norm()), "pml.snr": float((a - b).var() / a.var())}
    expected |= dict.fromkeys(("pml.cosine_similarity", "pml.dot_product_similarity"), float(a @ b))
    names = {name for name in PLUGINS.factories("distances") if name.startswith("pml.")}
    values = {name: PLUGINS.build("distances", name)(X)[0, 1].item() for name in names}
    assert values == pytest.approx(expected, rel=1e-5)


class TestMiners:
    def test_angular_by_loops_over_unit_vectors(self):
        lengths = torch.linspace(0.2, 5, 12).unsqueeze(1)
        unit = torch.nn.functional.normalize(X).tolist()
        expected = set()
        for a in range(12):
            for p in range(12):
                for n in range(12):
                    if a != p and Y[a] == Y[p] != Y[n]:
                        centre = [(u + v) / 2 for u, v in zip(unit[a], unit[p], strict=True)]
                        angle = math.atan(
                            math.dist(unit[a], unit[p]) / (2 * math.dist(unit[n], centre))
                        )
                        if angle > math.radians(35):
                            expected.add((a, p, n))
        actual = make("miners", "angular", angle=35.0)(X * lengths, Y)
        assert set(zip(*(index.tolist() for index in actual), strict=True)) == expected
        assert 0 < len(expected) < 12 * 2 * 9

    def test_packaged_triplets(self):
        miner = make("miners", "embeddings_already_packaged_as_triplets")
        assert [index.tolist() for index in miner(X[:6], Y[:6])] == [[0, 3], [1, 4], [2, 5]]
        with pytest.raises(ValueError, match="multiple of three items, not 4"):
            miner(X[:4], Y[:4])

    def test_semihard_on_both_sides_is_refused(self):
        with pytest.raises(RecipeError, match="cannot both be"):
            make("miners", "batch_easy_hard", pos_strategy="semihard")


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("losses", {"name": "pml.nt_xent", "temperature": 0}, "temperature"),
        ("losses", {"name": "pml.pnp", "variant": "X"}, "variant"),
        ("losses", {"name": "pml.triplet_margin", "triplets_per_anchor": 0}, "triplets_per_anchor"),
        ("losses", {"name": "pml.contrastive", "reducer": "pml.meen"}, "Did you mean 'pml.mean'"),
        ("losses", {"name": "pml.ranked_list"}, "margin"),
        ("losses", {"name": "pml.circle", "distance": "pml.lp"}, "no such parameter"),
        ("miners", {"name": "pml.hdc", "filter_percentage": 1.5}, "filter_percentage"),
        ("regularizers", {"name": "pml.sparse_centers", "centers_per_class": 1}, "centers_per"),
        ("losses", {"name": "pml.cross_batch_memory"}, "loss: is required"),
    ],
)
def test_values_out_of_range(kind, values, problem):
    problems = PLUGINS.check(kind, values, f"[{KINDS[kind]}]")
    assert len([p for p in problems if problem in p]) == 1, problems
