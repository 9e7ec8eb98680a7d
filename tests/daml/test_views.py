"""Local metrics that see one view each, and weights that leave damaged views out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from retrieval.errors import RetrievalError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.plugins import load_plugins
from retrieval.training.trainer import train_run

VIEWS, WIDTH = 4, 8


def test_each_view_has_its_own_map_and_the_distance_is_their_mean():
    table = {"name": "daml.uniform", "metrics": VIEWS, "views": True}
    sizes = {"features": VIEWS * WIDTH, "embedding_size": 12}
    torch.manual_seed(0)
    combiner = load_plugins().build("combiners", table, sizes)
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


@pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])
def test_features_that_do_not_divide_into_views_are_refused(name):
    table = {"name": name, "metrics": 4, "views": True}
    combiner = load_plugins().build("combiners", table, {"features": 30, "embedding_size": 12})
    says = "30 features are not 4 views of equal width side by side"
    with pytest.raises(RetrievalError, match=says):
        combiner.build_head(30)


def damaged_views(rng: np.random.Generator) -> tuple[NDArray[np.float32], list[str]]:
    """60 classes of 12 items with four views; up to three views of an item look damaged."""
    centres = rng.normal(size=(60, VIEWS, WIDTH))
    labels = np.repeat(np.arange(60), 12)
    x = centres[labels] + 0.5 * rng.normal(size=(len(labels), VIEWS, WIDTH))
    for item in x:
        bad = rng.choice(VIEWS, rng.integers(0, VIEWS), replace=False)
        item[bad] = 1.2 * rng.normal(size=(len(bad), WIDTH))
        item[bad, 0] += 4.0
    return x.reshape(len(x), -1).astype(np.float32), [str(label) for label in labels]


def test_learned_weights_leave_damaged_views_out_and_even_ones_cannot(make, tmp_path):
    x, y = damaged_views(np.random.default_rng(0))
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
        run = train_run(tmp_path / name, recipe)
        actual[name] = evaluate(run).metrics["trained"]["recall_at_1"]
        if name == "daml.discriminator":
            _check_weights(run, x[480:], damaged=x[480:].reshape(-1, VIEWS, WIDTH)[:, :, 0] > 2.5)
    assert actual["daml.discriminator"] > actual["daml.uniform"] + 0.1, actual


def _check_weights(run: Any, x: NDArray[np.float32], damaged: NDArray[np.bool_]) -> None:
    """Check that views damaged in either item have less than half the mean weight of sound ones."""
    with torch.no_grad():
        codes = run.model(torch.from_numpy(x))[1]
        weights = run.model.combiner.weights(codes, codes).numpy()
    either = damaged[:, None] | damaged[None]
    mixed = either.any(-1) & ~either.all(-1)
    assert weights[mixed][either[mixed]].mean() < 0.5 * weights[mixed][~either[mixed]].mean()
