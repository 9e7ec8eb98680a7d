"""A graph that is not the model: refused, with the difference, the place and the cause, and nothing
left behind.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from retrieval.errors import BundleError
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


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (
            StubbornDropout,
            r"disagrees with itself by [\d.e+]+ in 'vector' of item \d+: .*dropout",
        ),
        (BatchStatistics, "disagrees with itself .* which others are in the batch"),
        (Branch, "disagrees with itself .* which others are in the batch"),
        (FixedBatch, r"cannot be exported.*rows of 'vector' for a batch of \d"),
    ],
)
def test_a_head_that_no_graph_can_match(head, sentence, export, parts, vectors, tmp_path):
    with pytest.raises(BundleError, match=sentence):
        export(Model(parts.Vectors(), head()), vectors[0][:40])
    assert not list(tmp_path.iterdir())


def test_any_other_difference_is_named_with_the_tolerance(export, parts, vectors):
    model, items = Model(parts.Vectors(), Lies()), vectors[0][:40]
    with pytest.raises(
        BundleError,
        match=r"disagree by 0\.\d+ .*tolerance is 0\.0001\. torch's exporter translates",
    ):
        export(model, items)
    loose = export(model, items, tolerance=9.0)
    # 0.5 × the largest entry, over the mean length
    features = items.astype(float)
    expected = 0.5 * features.max() / np.mean([np.sqrt((row**2).sum()) for row in features])
    assert loose.verified.largest_difference == pytest.approx(expected, rel=1e-5)
    assert loose.verified.tolerance == 9.0


def test_a_rescorer_that_disagrees(export, parts, vectors, tmp_path):
    class Lying(parts.Sum):
        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb, ref_emb) + Lies()(torch.ones(()))

    combiner = Lying()
    sentence = r"The rescorer cannot be exported.*disagree by .* in the distance to item"
    with pytest.raises(BundleError, match=sentence):
        export(Model(parts.Vectors(), combiner.build_head(64), combiner), vectors[0][:40])
    assert not list(tmp_path.iterdir())


def test_items_that_do_not_fit(export, net, linear, digits, vectors, tmp_path):
    pixels, features = digits[0], vectors[0]
    for model, items, options, sentence in (
        (net, pixels.astype(np.float32), {}, r"must be uint8 pixels \(N, 1, 16, 16\), not float32"),
        (net, pixels[:0], {}, "there are none"),
        (linear, features[0], {}, "feature vectors"),
        (linear, features[:, :10], {}, "shape"),
        (linear, np.where(features == 0, np.nan, features), {}, "NaN"),
        (linear, features, {"labels": np.arange(3)}, "3 labels for 300 items"),
        (linear, features, {"variants": ["int4"]}, "no variant 'int4'"),
    ):
        with pytest.raises(BundleError, match=sentence):
            export(model, items, **options)
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_nan(export, parts, vectors):
    head = nn.Linear(64, 4)
    with torch.no_grad():
        head.bias[1] = torch.nan
    with pytest.raises(BundleError, match="NaN or infinity in 'vector' for item 0"):
        export(Model(parts.Vectors(), head), vectors[0])


def test_a_graph_that_torch_cannot_write_is_not_printed(export, parts, digits, tmp_path, capfd):
    """The older exporter prints all of its graph when it fails, from C++: `sys.stdout` never sees
    it.
    """

    class Uneven(parts.Net):
        def forward(self, x):  # 16 pixels make no 6 even cells
            return nn.functional.adaptive_avg_pool2d(x, 6).flatten(1)

    with pytest.raises(BundleError, match="adaptive"):
        export(Model(Uneven(), nn.Linear(36, 4)), digits[0][:9])
    assert capfd.readouterr().out == ""
    print("heard again", flush=True)
    assert capfd.readouterr().out == "heard again\n"
    assert not list(tmp_path.iterdir())
