"""Real items and small real models that the export tests share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.bundle.manifest import Manifest
from retrieval.errors import BundleError
from retrieval.export.export_model import export_model
from retrieval.images.preprocessing import Preprocessing, from_array
from retrieval.model.contracts import Backbone, Combiner, Subspace
from retrieval.model.model import Model, Normalise, build_head
from torch import Tensor, nn


class Net(Backbone):
    """Two convolutions; raw grey digits."""

    def __init__(self, channels: int = 1, size: int = 16) -> None:
        super().__init__()
        self.features = 96
        self.preprocessing = Preprocessing(
            (size, size), channels, mean=(0.3, 0.4, 0.5)[:channels], std=(0.2, 0.3, 0.25)[:channels]
        )
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Vectors(Backbone):
    """The identity on feature vectors."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x


class Sum(Combiner):
    """Sum of the Euclidean distances in K sub-spaces; no vectors have its order."""

    exact = False
    candidates = 40

    def __init__(self, parts: int = 3, width: int = 8) -> None:
        super().__init__()
        self.parts, self.width = parts, width
        self.subspaces = tuple(
            Subspace(f"part{k}", k * width, (k + 1) * width) for k in range(parts)
        )

    def build_head(self, features: int) -> nn.Module:
        return nn.Linear(features, self.parts * self.width)

    def split(self, codes: Tensor) -> Tensor:
        return nn.functional.normalize(codes.reshape(-1, self.parts, self.width), dim=-1)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        gap = self.split(query_emb)[:, None] - self.split(ref_emb)[None]
        return gap.square().sum(-1).clamp_min(1e-12).sqrt().sum(-1)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        gap = self.split(query_emb) - self.split(ref_emb)
        return gap.square().sum(-1).clamp_min(1e-12).sqrt().sum(-1)

    def index_vectors(self, codes: Tensor) -> Tensor:
        return self.split(codes).flatten(1)


class Inner(Combiner):
    """Inner product of weighted queries; one more column makes it a Euclidean distance."""

    def __init__(self, width: int = 8, radius: float = 50.0) -> None:
        super().__init__()
        self.width, self.radius = width, radius
        self.weights = nn.Parameter(torch.linspace(0.5, 2.0, width))

    def build_head(self, features: int) -> nn.Module:
        return nn.Linear(features, self.width)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return -(query_emb * self.weights) @ ref_emb.T

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return -(query_emb * self.weights * ref_emb).sum(-1)

    def index_vectors(self, codes: Tensor) -> Tensor:
        rest = (self.radius**2 - codes.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
        return torch.cat([codes, rest], dim=-1)

    def query_vectors(self, codes: Tensor) -> Tensor:
        weighted = codes * self.weights
        return torch.cat([weighted, torch.zeros_like(weighted[:, :1])], dim=-1)


@pytest.fixture(scope="package", autouse=True)
def older_exporter():
    """torch's older exporter, whose graphs are the same and take a thirtieth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrieval.export.agreement.EXPORTERS", ("torchscript",))
        yield


@pytest.fixture(scope="session")
def parts():
    """The classes above, which test modules cannot import."""
    return SimpleNamespace(Net=Net, Vectors=Vectors, Sum=Sum, Inner=Inner)


@pytest.fixture(scope="session")
def digits():
    """Real raw pixels (300, 1, 16, 16) and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:300] * (255 / 16)).astype(np.uint8)
    prepare = Preprocessing((16, 16), 1)
    return np.stack([prepare(from_array(image)) for image in images]), data.target[:300]


@pytest.fixture(scope="session")
def vectors():
    """Real feature vectors (300, 64) and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data[:300].astype(np.float32), data.target[:300]


@pytest.fixture(scope="session")
def photographs():
    """Real RGB patches (N, 3, size, size) of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images

    def cut(size: int, number: int) -> np.ndarray:
        rng = np.random.default_rng(size)
        found = []
        for index in range(number):
            image = images[index % 2]
            y, x = rng.integers(0, image.shape[0] - size), rng.integers(0, image.shape[1] - size)
            found.append(image[y : y + size, x : x + size].transpose(2, 0, 1))
        return np.ascontiguousarray(np.stack(found))

    return cut


@pytest.fixture
def exported(tmp_path):
    """Export a model into the folder `b`: `exported(model, items, variants=…)`."""

    def export(model: Model, items: np.ndarray, **options: Any) -> Manifest:
        return export_model(model, items, tmp_path / "b", **{"name": "b", **options})

    return export


@pytest.fixture
def refused(exported, tmp_path):
    """Check that export refuses a model with the sentence `says`, and leaves nothing behind."""

    def check(model: Model, items: np.ndarray, says: str, **options: Any) -> None:
        with pytest.raises(BundleError, match=says):
            exported(model, items, **options)
        assert not list(tmp_path.iterdir())

    return check


@pytest.fixture
def net():
    """A small convolutional model of digits in training mode, with random batch statistics."""
    torch.manual_seed(0)
    model = Model(Net(), build_head(96, 16))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model


@pytest.fixture
def linear():
    """One linear map, like the model of a learner."""
    torch.manual_seed(1)
    return Model(Vectors(), nn.Sequential(nn.Linear(64, 8), Normalise()))
