"""A graph that is not the model is refused with its cause, and leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
        return x[:2] if torch.jit.is_tracing() else x


class Branch(nn.Module):
    """Another formula when the batch holds one item."""

    def forward(self, x):
        return x * (2.0 if len(x) == 1 else 1.0)


class Lies(nn.Module):
    """Another number while it is being exported."""

    def forward(self, x):
        return x * (1.5 if torch.compiler.is_exporting() or torch.jit.is_tracing() else 1.0)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (StubbornDropout, r"with itself by [\d.e+]+ in 'vector' of item \d+: .*Dropout"),
        (BatchStatistics, "depends on the other items in the batch"),
        (Branch, "disagrees with itself .* depends on the other items in the batch"),
        (FixedBatch, r"cannot be exported.*rows of 'vector' for a batch of \d"),
        (Lies, r"disagree by 0\.\d+ .*tolerance is 0\.0001\. torch's exporter translates"),
    ],
)
def test_a_head_whose_graph_is_another(parts, vectors, refused, head, says):
    refused(Model(parts.Vectors(), head()), vectors[0][:40], says)


def test_a_difference_is_allowed_by_a_tolerance(parts, vectors, exported):
    loose = exported(Model(parts.Vectors(), Lies()), vectors[0][:40], tolerance=9.0)
    # 0.5 × the largest entry, over the mean length
    features = vectors[0][:40].astype(float)
    expected = 0.5 * features.max() / np.mean([np.sqrt((row**2).sum()) for row in features])
    assert loose.verified.largest_difference == pytest.approx(expected, rel=1e-5)
    assert loose.verified.tolerance == 9.0


def test_a_rescorer_that_disagrees(parts, vectors, refused):
    class Lying(parts.Sum):
        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb, ref_emb) + Lies()(torch.ones(()))

    combiner = Lying()
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    says = "The rescorer cannot be exported.*disagree by .* in the distance to item"
    refused(model, vectors[0][:40], says)


def test_items_that_do_not_fit(net, linear, digits, vectors, refused):
    pixels, features = digits[0], vectors[0]
    says = r"must be uint8 pixels \(N, 1, 16, 16\), not float32"
    refused(net, pixels.astype(np.float32), says)
    refused(net, pixels[:0], "there are none")
    refused(linear, features[0], "feature vectors")
    refused(linear, features[:, :10], "shape")
    refused(linear, np.where(features == 0, np.nan, features), "NaN")
    refused(linear, features, "3 labels for 300 items", labels=np.arange(3))
    refused(linear, features, "no variant 'int4'", variants=["int4"])
    refused(linear, features, "feature vectors and has no backbone to split off", split=True)


def test_a_model_that_gives_nan(parts, vectors, refused):
    head = nn.Linear(64, 4)
    with torch.no_grad():
        head.bias[1] = torch.nan
    says = "NaN or infinity in 'vector' for item 0"
    refused(Model(parts.Vectors(), head), vectors[0], says)


def test_a_graph_that_torch_cannot_write_is_not_printed(parts, digits, refused, capfd):
    class Uneven(parts.Net):
        def forward(self, x):  # 16 pixels make no 6 even cells
            return nn.functional.adaptive_avg_pool2d(x, 6).flatten(1)

    refused(Model(Uneven(), nn.Linear(36, 4)), digits[0][:9], "adaptive")
    assert capfd.readouterr().out == ""
    print("heard again", flush=True)
    assert capfd.readouterr().out == "heard again\n"
