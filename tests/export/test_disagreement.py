"""A graph that is not the model: refused, with the difference, the place and the cause, and nothing
left behind.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from retrieval.errors import BundleError
from retrieval.export.export_model import export_model
from retrieval.model.model import Model
from torch import nn


class StubbornDropout(nn.Module):
    """Dropout that ignores evaluation mode."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class BatchStatistics(nn.Module):
    """Centres on the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class FixedBatch(nn.Module):
    """Takes the example's batch size for a constant, as `view(2, …)` code does under tracing."""

    def forward(self, x):
        return (
            x.reshape(int(x.shape[0]), -1)[: x.shape[0]]
            if not torch.jit.is_tracing()
            else x[:2].repeat(1, 1)
        )


class Branch(nn.Module):
    """Another formula when the batch holds one item."""

    def forward(self, x):
        return x * (2.0 if len(x) == 1 else 1.0)


class Lies(nn.Module):
    """Another number while it is being exported."""

    def forward(self, x):
        return x * (1.5 if torch.compiler.is_exporting() or torch.jit.is_tracing() else 1.0)


def test_random_layers(parts, vectors, tmp_path):
    with pytest.raises(
        BundleError, match=r"disagrees with itself by [\d.e+]+ in 'vector' of item \d+: .*dropout"
    ):
        export_model(
            Model(parts.Vectors(), StubbornDropout()), vectors[0][:40], tmp_path / "b", name="b"
        )
    assert not list(tmp_path.iterdir())


def test_statistics_of_the_batch(parts, vectors, tmp_path):
    with pytest.raises(BundleError, match="which others are in the batch"):
        export_model(
            Model(parts.Vectors(), BatchStatistics()), vectors[0][:40], tmp_path / "b", name="b"
        )
    assert not list(tmp_path.iterdir())


def test_a_batch_size_folded_into_the_graph(parts, vectors, tmp_path):
    with pytest.raises(
        BundleError, match=r"cannot be exported.*rows of 'vector' for a batch of \d"
    ):
        export_model(
            Model(parts.Vectors(), FixedBatch()), vectors[0][:40], tmp_path / "b", name="b"
        )
    assert not list(tmp_path.iterdir())


def test_any_other_difference_is_named_with_the_tolerance(parts, vectors, tmp_path):
    with pytest.raises(
        BundleError,
        match=r"disagree by 0\.\d+ .*tolerance is 0\.0001\. torch's exporter translates",
    ):
        export_model(Model(parts.Vectors(), Lies()), vectors[0][:40], tmp_path / "b", name="b")
    loose = export_model(
        Model(parts.Vectors(), Lies()), vectors[0][:40], tmp_path / "b", name="b", tolerance=9.0
    )
    # 0.5 × the largest entry, over the mean length
    features = vectors[0][:40].astype(float)
    expected = 0.5 * features.max() / np.mean([np.sqrt((row**2).sum()) for row in features])
    assert loose.verified.largest_difference == pytest.approx(expected, rel=1e-5)
    assert loose.verified.tolerance == 9.0


def test_a_rescorer_that_disagrees(parts, vectors, tmp_path):
    class Lying(parts.Sum):
        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb, ref_emb) + Lies()(torch.ones(()))

    combiner = Lying()
    with pytest.raises(
        BundleError,
        match=r"The rescorer cannot be exported.*disagree by .* in the distance to item",
    ):
        export_model(
            Model(parts.Vectors(), combiner.build_head(64), combiner),
            vectors[0][:40],
            tmp_path / "b",
            name="b",
        )
    assert not list(tmp_path.iterdir())


def test_items_that_do_not_fit(net, linear, digits, vectors, tmp_path):
    target = tmp_path / "b"
    with pytest.raises(BundleError, match=r"must be uint8 pixels \(N, 1, 16, 16\), not float32"):
        export_model(net, digits[0].astype(np.float32), target, name="b")
    with pytest.raises(BundleError, match="there are none"):
        export_model(net, digits[0][:0], target, name="b")
    with pytest.raises(BundleError, match="feature vectors"):
        export_model(linear, vectors[0][0], target, name="b")
    with pytest.raises(BundleError, match="shape"):
        export_model(linear, vectors[0][:, :10], target, name="b")
    with pytest.raises(BundleError, match="NaN"):
        export_model(linear, np.where(vectors[0] == 0, np.nan, vectors[0]), target, name="b")
    with pytest.raises(BundleError, match="3 labels for 300 items"):
        export_model(linear, vectors[0], target, name="b", labels=np.arange(3))
    with pytest.raises(BundleError, match="no variant 'int4'"):
        export_model(linear, vectors[0], target, name="b", variants=["int4"])
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_nan(parts, vectors, tmp_path):
    head = nn.Linear(64, 4)
    with torch.no_grad():
        head.bias[1] = torch.nan
    with pytest.raises(BundleError, match="NaN or infinity in 'vector' for item 0"):
        export_model(Model(parts.Vectors(), head), vectors[0], tmp_path / "b", name="b")


def test_a_graph_that_torch_cannot_write_is_not_printed(parts, digits, tmp_path, capfd):
    class Uneven(parts.Net):
        def forward(self, x):
            return nn.functional.adaptive_avg_pool2d(x, 6).flatten(
                1
            )  # 16 pixels make no 6 even cells

    with pytest.raises(BundleError, match="adaptive"):
        export_model(Model(Uneven(), nn.Linear(36, 4)), digits[0][:9], tmp_path / "b", name="b")
    assert capfd.readouterr().out == ""
    print("heard again", flush=True)
    assert capfd.readouterr().out == "heard again\n"
    assert not list(tmp_path.iterdir())


def test_another_formula_for_one_item_alone(parts, vectors, tmp_path):
    with pytest.raises(
        BundleError, match=r"disagrees with itself .* which others are in the batch"
    ):
        export_model(Model(parts.Vectors(), Branch()), vectors[0][:40], tmp_path / "b", name="b")
