"""Local metrics that see a view each: what depends on what, and that weights then leave spoilt
views out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from retrieval.errors import RetrievalError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.plugins import load_plugins
from retrieval.training.trainer import train

VIEWS, WIDTH = 4, 8
GIVEN = {"features": VIEWS * WIDTH, "embedding_size": 12}


def built(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return load_plugins().build("combiners", {"name": name, "metrics": VIEWS, **options}, GIVEN)


@pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])
def test_a_metric_sees_its_view_alone(name):
    combiner = built(name, views=True)
    head = combiner.build_head(VIEWS * WIDTH)
    x = torch.randn(5, VIEWS * WIDTH)
    before = combiner.index_vectors(head(x)).unflatten(1, (VIEWS, -1))
    assert torch.allclose(before.norm(dim=-1), torch.ones(5, VIEWS))
    for k in range(VIEWS):
        other = x.clone()
        other[:, k * WIDTH : (k + 1) * WIDTH] += 1.0
        after = combiner.index_vectors(head(other)).unflatten(1, (VIEWS, -1))
        changed = [not torch.equal(before[:, j], after[:, j]) for j in range(VIEWS)]
        assert changed == [j == k for j in range(VIEWS)]


def test_each_view_has_a_map_of_its_own_and_the_distance_is_their_mean():
    combiner = built("daml.uniform", views=True)
    head = combiner.build_head(VIEWS * WIDTH).double()
    x, y = torch.randn(2, 6, VIEWS * WIDTH, dtype=torch.float64).unbind()
    with torch.no_grad():
        actual = combiner.compute_mat(head(x).double(), head(y).double())
    for i in range(6):
        for j in range(6):
            total = 0.0
            for k, left in enumerate(head[0].maps):
                span = slice(k * WIDTH, (k + 1) * WIDTH)
                a, b = (left.weight.detach() @ v[span] + left.bias.detach() for v in (x[i], y[j]))
                total += float((a / a.norm() - b / b.norm()).norm()) / VIEWS
            assert float(actual[i, j]) == pytest.approx(total, abs=1e-6)


def test_the_discriminator_sees_all_views():
    combiner = built("daml.discriminator", views=True, start=1.0)
    head = combiner.build_head(VIEWS * WIDTH)
    x = torch.randn(3, VIEWS * WIDTH)
    for k in range(VIEWS):
        other = x.clone()
        other[:, k * WIDTH : (k + 1) * WIDTH] += 1.0
        before, after = (combiner.weights(head(v), head(v)) for v in (x, other))
        assert (before - after).abs().amax() > 1e-3


@pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])
def test_features_that_are_not_so_many_views_are_refused(name):
    table = {"name": name, "metrics": 4, "views": True}
    combiner = load_plugins().build("combiners", table, {"features": 30, "embedding_size": 12})
    says = "30 features are not 4 views of equal width side by side"
    with pytest.raises(RetrievalError, match=says):
        combiner.build_head(30)


# --- what it is for


def spoilt_views(rng: np.random.Generator) -> tuple[NDArray[np.float32], list[str]]:
    """60 classes of 12 items in four views; up to three views of an item show something else, and
    look like it.
    """
    centres = rng.normal(size=(60, VIEWS, WIDTH))
    labels = np.repeat(np.arange(60), 12)
    x = centres[labels] + 0.5 * rng.normal(size=(len(labels), VIEWS, WIDTH))
    for item in x:
        bad = rng.choice(VIEWS, rng.integers(0, VIEWS), replace=False)
        item[bad] = 1.2 * rng.normal(size=(len(bad), WIDTH))
        item[bad, 0] += 4.0
    return x.reshape(len(x), -1).astype(np.float32), [str(label) for label in labels]


def test_learned_weights_leave_spoilt_views_out_and_even_ones_cannot(make, tmp_path):
    x, y = spoilt_views(np.random.default_rng(0))
    np.savez(tmp_path / "views.npz", features=x, labels=y)
    actual = {}
    for name in ("daml.uniform", "daml.discriminator"):
        combiner: dict[str, Any] = {"name": name, "metrics": VIEWS, "views": True}
        if name == "daml.discriminator":
            combiner |= {"hidden": 16, "mu": 0.0}
        recipe = make(
            data={"name": "core.features", "file": str(tmp_path / "views.npz")},
            split={"by": "class", "test": [*map(str, range(40, 60))], "validation": 0.0},
            sampler={"classes": 16, "items": 4, "batches": 50},
            head={"embedding_size": 32},
            combiner=combiner,
            generator=None,
            loss={"name": "daml.triplet", "margin": 0.5},
            miner={"name": "daml.semi_hard", "pick": "hardest"},
            optimizer={"lr": 0.003},
            evaluate={"metrics": ["recall_at_1"]},
        )
        run = train(tmp_path / name, recipe)
        actual[name] = evaluate(run).metrics["trained"]["recall_at_1"]
        if name == "daml.discriminator":
            _check_weights(run, x[480:], spoilt=x[480:].reshape(-1, VIEWS, WIDTH)[:, :, 0] > 2.5)
    assert actual["daml.discriminator"] > actual["daml.uniform"] + 0.1, actual


def _check_weights(run: Any, x: NDArray[np.float32], spoilt: NDArray[np.bool_]) -> None:
    """A view that is spoilt in either item weighs less than half of one that is not, on average."""
    with torch.no_grad():
        codes = run.model(torch.from_numpy(x))[1]
        weights = run.model.combiner.weights(codes, codes).numpy()
    either = spoilt[:, None] | spoilt[None]
    mixed = either.any(-1) & ~either.all(-1)
    assert weights[mixed][either[mixed]].mean() < 0.5 * weights[mixed][~either[mixed]].mean()
