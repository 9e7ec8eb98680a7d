"""The strided stem of `core.convnet`: what it computes, the same net where there is none, seeds,
export, and what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.export.export_model import export_model
from retrieval.host.plugins import create
from retrieval.model.model import Model, build_head
from retrieval.serving.bundle import Bundle
from sklearn.datasets import load_sample_images

from retrieval_core.convnet import ConvNet


def seeded(**values: Any) -> ConvNet:
    torch.manual_seed(0)
    net: ConvNet = create("backbone", "core.convnet", **values)
    return net


def patches(size: int, channels: int, number: int = 20) -> torch.Tensor:
    """Patches of a photograph, uint8 (number, channels, size, size)."""
    photo = load_sample_images().images[0].transpose(2, 0, 1)[:channels]
    cuts = [photo[:, 9 * i : 9 * i + size, :size] for i in range(number)]
    return torch.from_numpy(np.stack(cuts))


@pytest.mark.parametrize(("stem", "kernel"), [(2, 3), (4, 7)])
def test_the_first_convolution_strides_and_sees_every_pixel(stem, kernel):
    layer = seeded(width=2, stem=stem).stages[0].double()
    size = 10
    x = torch.randn(1, 1, size, size, dtype=torch.double, requires_grad=True)
    out = layer(x)
    side = -(-size // stem)
    assert out.shape == (1, 2, side, side)
    half = kernel // 2
    padded = np.pad(x.detach().numpy()[0, 0], half)
    weight = layer.weight.detach().numpy()[:, 0]
    for row in range(side):
        for column in range(side):
            y, z = row * stem, column * stem
            expected = (padded[y : y + kernel, z : z + kernel] * weight).sum((1, 2))
            actual = out[0, :, row, column].detach().numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-10)
    out.sum().backward()
    assert x.grad is not None and bool((x.grad != 0).all())


@pytest.mark.parametrize(("stem", "size", "channels"), [(2, 33, 3), (4, 65, 1)])
def test_a_bundle_gives_what_torch_gives(stem, size, channels, tmp_path):
    net = seeded(width=4, size=size, channels=channels, stem=stem)
    assert net.preprocessing is not None and net.preprocessing.shape == (channels, size, size)
    model = Model(net, build_head(net.features, 8))
    images = patches(size, channels)
    with torch.inference_mode():
        model(images)  # batch statistics
    manifest = export_model(model, images.numpy(), tmp_path / "b", name="b")
    assert manifest.verified.largest_difference <= 1e-4
    actual = Bundle.open(tmp_path / "b", threads=1).encode(images[:5].numpy()).vector
    with torch.inference_mode():
        expected = model.eval()(images[:5])[1].numpy()
        apart = model(images[:5].to(memory_format=torch.channels_last))[1].numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_allclose(apart, expected, atol=1e-5)


def test_wrong_options_are_told_at_once():
    with pytest.raises(RecipeError) as error:
        create("backbone", "core.convnet", stem=3, width=0, size="64")
    sentences = ["stem: should be 1 or 2 or 4, not 3", "width: should be an integer (≥ 1), not 0"]
    for sentence in (*sentences, 'size: should be an integer (≥ 1), not "64"'):
        assert sentence in str(error.value)


def test_the_smallest_image_that_a_stem_takes():
    net = seeded(size=13, stem=4, depth=3, width=2).eval()
    assert net(torch.zeros(1, 1, 13, 13)).shape == (1, 8)
    says = "size 12 cannot be halved 2 times after a stem of 4. Make depth or stem smaller, or size"
    with pytest.raises(RecipeError, match=says):
        create("backbone", "core.convnet", size=12, stem=4, depth=3)
