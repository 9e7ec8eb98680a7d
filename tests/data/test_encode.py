"""`encode` gives a net on the CPU channels last, which changes nothing else."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.datasets import ArrayDataset
from retrieval.data.encode import encode
from retrieval.images.preprocessing import Preprocessing
from retrieval.model.model import Model
from torch import Tensor, nn

ITEMS = np.arange(10)


class Net(nn.Module):
    """Two convolutions; records whether the images have channels last."""

    def __init__(self, channels: int, flat: Any) -> None:
        super().__init__()
        self.preprocessing = Preprocessing((8, 8), channels, (0.5,) * channels, (0.5,) * channels)
        self.features = 4 * 64
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
        )
        self.flat = flat
        self.seen: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convolutions(images)
        self.seen.append(images.stride(1) == 1)
        features: Tensor = self.flat(maps)
        return features


def items(channels: int) -> ArrayDataset:
    pixels = np.random.default_rng(0).integers(0, 256, (len(ITEMS), 8, 8, channels), dtype=np.uint8)
    return ArrayDataset(pixels, ["a"] * len(ITEMS))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_cpu_gets_channels_last_and_the_same_codes(channels):
    torch.manual_seed(0)
    net = Net(channels, lambda maps: maps.flatten(1))
    model = Model(net, nn.Linear(net.features, 5)).train()
    codes = encode(model, items(channels), ITEMS, batch_size=4)
    assert net.seen == [True] * 3 and not model.channels_last and model.training
    pixels = (
        torch.from_numpy(items(channels).arrays).reshape(len(ITEMS), 8, 8, channels).movedim(3, 1)
    )
    with torch.inference_mode():
        plain = copy.deepcopy(model).eval()(pixels.contiguous())[1]
    torch.testing.assert_close(codes, plain, atol=1e-6, rtol=1e-5)


def test_a_net_that_views_its_maps_gets_channels_first():
    torch.manual_seed(0)
    net = Net(3, lambda maps: maps.view(len(maps), -1))  # fails with channels last
    model = Model(net, nn.Linear(net.features, 5))
    codes = encode(model, items(3), ITEMS, batch_size=4)
    assert net.seen == [True, False, False, False]
    net.flat = lambda maps: maps.flatten(1)
    torch.testing.assert_close(
        codes, encode(model, items(3), ITEMS, batch_size=4), atol=1e-6, rtol=1e-5
    )


def test_a_nets_own_fault_is_raised_unchanged():
    def broken(maps):
        raise RuntimeError("no such layer")

    net = Net(3, broken)
    model = Model(net, nn.Linear(net.features, 5))
    with pytest.raises(RuntimeError, match="no such layer"):
        encode(model, items(3), ITEMS)
    assert net.seen == [True, False] and not model.channels_last and model.training
