from typing import Any

import pytest
import retrieval
from torch import Tensor, nn

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "core.digits"},
    "split": {"by": "item"},
    "sampler": {"classes": 8, "items": 4, "batches": 10},
    "backbone": {"name": "core.convnet", "size": 8, "width": 8, "depth": 2, "layers": 1},
    "head": {"embedding_size": 16},
    "loss": {"name": "pml.triplet_margin", "margin": 0.1},
    "train": {"epochs": 1},
}


class Net(nn.Module):
    """A torch module that knows nothing of `retrieval.plugin.Backbone`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.preprocessing = retrieval.plugin.Preprocessing((8, 8), 1)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of the small recipe, trained once."""
    return retrieval.train(SMALL, tmp_path_factory.mktemp("runs") / "small", progress=False)


@pytest.fixture(scope="session")
def bundle(trained, tmp_path_factory):
    """The exported bundle of `trained`."""
    return trained.export(tmp_path_factory.mktemp("bundles") / "bundle", progress=False)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Digits as PNG files, one folder per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("photos")
    digits = load_digits()
    for i, label in enumerate(digits.target[:60]):
        (folder / str(label)).mkdir(exist_ok=True)
        pixels = (digits.images[i] * 15).astype("uint8")
        Image.fromarray(pixels).save(folder / str(label) / f"{i}.png")
    return folder


@pytest.fixture
def index(bundle, photos, tmp_path):
    """An open index of the photos."""
    with retrieval.Index.create(tmp_path / "index", photos, model=bundle, progress=False) as opened:
        yield opened
