"""Reducers, regularisers, distances and miners: values against plain loops, and the sentences for
what cannot work.
"""

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
    """Return a loss's own losses before reduction, with their indices."""
    built = make("losses", loss, reducer="pml.per_anchor", **values)
    actual = built.compute_loss(X, Y, None, X, Y)["loss"]
    indices = actual["indices"]
    return actual["losses"].flatten().tolist(), [indices] if torch.is_tensor(indices) else list(
        indices
    )


ONE_PART = [
    "multi_similarity",
    "sup_con",
    "angular",
    "lifted_structure",
    "triplet_margin",
    "nt_xent",
]


class TestReducers:
    @pytest.mark.parametrize("loss", ONE_PART)
    def test_class_weighted(self, loss):
        values, indices = parts(loss)
        expected = sum(v * WEIGHTS[Y[i]] for v, i in zip(values, indices[0], strict=True)) / len(
            values
        )
        reducer = {"name": "pml.class_weighted", "weights": WEIGHTS}
        assert make("losses", loss, reducer=reducer)(X, Y).item() == pytest.approx(
            expected, rel=1e-5
        )

    @pytest.mark.parametrize("loss", ["angular", "lifted_structure", "triplet_margin", "nt_xent"])
    def test_per_anchor(self, loss):
        values, indices = parts(loss)
        by_anchor: dict[int, list[float]] = {i: [] for i in range(12)}
        for value, anchor in zip(values, indices[0].tolist(), strict=True):
            by_anchor[anchor].append(value)
        expected = sum(sum(v) / len(v) if v else 0 for v in by_anchor.values()) / 12
        built = make("losses", loss, reducer="pml.per_anchor")
        assert built(X, Y).item() == pytest.approx(expected, rel=1e-5)
        assert built(X, Y, None, torch.randn(30, 6), torch.arange(30) % 4).isfinite()

    @pytest.mark.parametrize("loss", ONE_PART)
    def test_plain_ones(self, loss):
        values, _ = parts(loss)
        middle = sorted(values)[len(values) // 2]
        kept = [v for v in values if v > middle]
        expected: dict[Any, float] = {
            "pml.mean": sum(values) / len(values),
            "pml.sum": sum(values),
            "pml.avg_non_zero": sum(values) / max(1, sum(v > 0 for v in values)),
        }
        for reducer, number in expected.items():
            assert make("losses", loss, reducer=reducer)(X, Y).item() == pytest.approx(
                number, rel=1e-4
            )
        threshold = {"name": "pml.threshold", "low": middle}
        number = sum(kept) / len(kept) if kept else 0
        assert make("losses", loss, reducer=threshold)(X, Y).item() == pytest.approx(
            number, rel=1e-4
        )

    def test_multiple(self):
        reducer = {
            "name": "pml.multiple",
            "names": ["pos_loss"],
            "reducers": ["pml.sum"],
            "default_reducer": "pml.mean",
        }
        actual = make("losses", "contrastive").compute_loss(X, Y, None, X, Y)
        expected = actual["pos_loss"]["losses"].sum() + actual["neg_loss"]["losses"].mean()
        assert make("losses", "contrastive", reducer=reducer)(X, Y).item() == pytest.approx(
            expected.item()
        )

    def test_sentences(self):
        with pytest.raises(ValueError, match=r"pml\.divisor needs a loss that defines"):
            make("losses", "contrastive", reducer="pml.divisor")(X, Y)
        with pytest.raises(RecipeError, match="3 weights, but 4 training classes"):
            make("reducers", "class_weighted", weights=WEIGHTS[:3])
        with pytest.raises(RecipeError, match="as many different names"):
            make("reducers", "multiple", names=["a", "a"], reducers=["pml.sum", "pml.mean"])
        with pytest.raises(RecipeError, match="At least one of low or high"):
            make("reducers", "threshold")


class TestRegularisers:
    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("lp", lambda r: math.sqrt(sum(v * v for v in r))),
            ("zero_mean", lambda r: abs(sum(r))),
        ],
    )
    def test_on_embeddings(self, name, wanted):
        plain = make("losses", "contrastive")(X, Y).item()
        built = make(
            "losses", "contrastive", embedding_regularizer=f"pml.{name}", embedding_reg_weight=0.5
        )
        penalty = 0.5 * sum(wanted(row) for row in X.tolist()) / 12
        assert built(X, Y).item() == pytest.approx(plain + penalty, rel=1e-5)

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
        built = make("regularizers", "sparse_centers", centers_per_class=2)
        rows = torch.nn.functional.normalize(
            torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        )
        expected = (
            sum(math.sqrt(2 - 2 * float(rows[2 * c] @ rows[2 * c + 1])) for c in range(4)) / 8
        )
        assert built(rows).item() == pytest.approx(expected, rel=1e-5)
        loss = make(
            "losses",
            "soft_triple",
            centers_per_class=2,
            weight_regularizer={"name": "pml.sparse_centers", "centers_per_class": 2},
        )
        assert loss(X, Y).isfinite()

    def test_sentences(self):
        for kind, name in (
            ("regularizers", "regular_face"),
            ("losses", "soft_triple"),
            ("losses", "manifold"),
        ):
            with pytest.raises(RecipeError, match=r"needs a similarity.*LpDistance is a distance"):
                make(kind, name, distance="pml.lp")


def test_proxies_begin_as_named():
    loss = make("losses", "proxy_anchor", weight_init_func="orthogonal")
    torch.testing.assert_close(loss.proxies @ loss.proxies.t(), torch.eye(4))


class TestDistances:
    def test_values(self):
        a, b = [x / x.norm() for x in X[:2]]
        expected = {
            "cosine_similarity": float(a @ b),
            "dot_product_similarity": float(a @ b),
            "lp": float((a - b).norm()),
            "snr": float((a - b).var() / a.var()),
        }
        for name in PLUGINS.factories("distances"):
            if name.startswith("pml."):
                built = make("distances", name.removeprefix("pml."))
                assert built(X)[0, 1].item() == pytest.approx(
                    expected[name.removeprefix("pml.")], rel=1e-5
                )


class TestMiners:
    def test_angular_measures_unit_vectors(self):
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
    ("kind", "table", "problem"),
    [
        ("losses", {"name": "pml.nt_xent", "temperature": 0}, "temperature"),
        ("losses", {"name": "pml.pnp", "variant": "X"}, "variant"),
        ("losses", {"name": "pml.triplet_margin", "triplets_per_anchor": 0}, "triplets_per_anchor"),
        (
            "losses",
            {"name": "pml.contrastive", "reducer": {"name": "pml.meen"}},
            "Did you mean 'pml.mean'",
        ),
        ("losses", {"name": "pml.ranked_list"}, "margin"),
        ("losses", {"name": "pml.circle", "distance": "pml.lp"}, "no such parameter"),
        ("miners", {"name": "pml.hdc", "filter_percentage": 1.5}, "filter_percentage"),
        (
            "regularizers",
            {"name": "pml.sparse_centers", "centers_per_class": 1},
            "centers_per_class",
        ),
        ("losses", {"name": "pml.cross_batch_memory"}, "loss: is required"),
    ],
)
def test_values_out_of_range(kind, table, problem):
    assert kind in KINDS
    problems = PLUGINS.check(kind, table, f"[{KINDS[kind]}]")
    assert len([p for p in problems if problem in p]) == 1, problems
