"""`retrieval plugins new`: a third-party package that works as it is written."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from pathlib import Path

from retrieval.errors import PluginError
from retrieval.plugins import installed

FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "retrieval-{name}"
version = "0.1.0"
description = "A plugin for retrieval: a loss"
requires-python = ">=3.11"
dependencies = ["embedding-retrieval"]

[project.entry-points.retrieval]
{name} = "retrieval_{name}"
""",
    "retrieval_{name}/__init__.py": '''\
"""A plugin for retrieval. Its hooks import what they return, so that loading it costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrieval import hookimpl


@hookimpl
def retrieval_losses() -> Mapping[str, Callable[..., Any]]:
    """Offer the loss as `{name}.margin`."""
    from retrieval_{name}.loss import MarginLoss

    return {{"margin": MarginLoss}}
''',
    "retrieval_{name}/loss.py": '''\
"""A loss over all pairs of a batch."""

from __future__ import annotations

import torch
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from pytorch_metric_learning.utils import loss_and_miner_utils as utils
from retrieval import TripletIndices
from torch import Tensor, nn


class MarginLoss(nn.Module):
    """Pull pairs of a class within `near`, push the others beyond `far`: hinge of the distance, mean over pairs.

    Args:
        near: distance up to which a positive pair costs nothing.
        far: distance from which a negative pair costs nothing.
        distance: the recipe's combiner, when it has one; otherwise the Euclidean distance of unit vectors.
    """

    def __init__(self, near: float = 0.2, far: float = 0.9, distance: BaseDistance | None = None) -> None:
        super().__init__()
        if not 0 <= near < far:
            raise ValueError("near and far must be 0 <= near < far")
        self.near, self.far = near, far
        self.distance = distance or LpDistance()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: TripletIndices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the mean hinge over the miner's pairs, or over all pairs."""
        reference = embeddings if ref_emb is None else ref_emb
        a1, p, a2, n = utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        distances = self.distance(embeddings, reference)
        costs = torch.cat([(distances[a1, p] - self.near).relu(), (self.far - distances[a2, n]).relu()])
        return costs.mean() if len(costs) else embeddings.sum() * 0.0
''',
    "recipe.toml": """\
name = "{name}"

[data]
name = "core.digits"

[split]
by = "class"

[sampler]
classes = 4
items = 16

[backbone]
name = "core.convnet"
size = 28

[head]
embedding_size = 32

[loss]
name = "{name}.margin"
near = 0.2
far = 0.9

[train]
epochs = 3
""",
    "tests/test_{name}.py": '''\
"""The loss against plain loops."""

import torch
from retrieval_{name}.loss import MarginLoss


def test_loss_is_the_mean_hinge_over_all_pairs() -> None:
    x = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    costs = []
    for i in range(6):
        for j in range(6):
            distance = float((x[i] - x[j]).norm())
            if i != j:
                costs.append(max(0.0, distance - 0.2 if labels[i] == labels[j] else 0.9 - distance))
    torch.testing.assert_close(MarginLoss()(x, labels), torch.tensor(sum(costs) / len(costs)))
''',
    "README.md": """\
# retrieval-{name}

A plugin for `retrieval`: the loss `{name}.margin`.

    pip install -e .
    retrieval plugins show {name}.margin
    retrieval train recipe.toml
    pytest
""",
}


def write_package(name: str, output: Path | None = None) -> Path:
    """Write the package, whole or not at all.

    Args:
        name: the plugin's name, a Python identifier in lower case.
        output: the folder; by default `retrieval-NAME` here.

    Returns:
        The folder.

    Raises:
        PluginError: the name does not serve or is taken, or the folder exists or cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"'{name}' cannot be a plugin's name: use a Python identifier in lower case, such as acme."
        )
    if name in installed():
        raise PluginError(
            f"A plugin '{name}' is installed already ({installed()[name]}). Choose another name."
        )
    folder = output or Path(f"retrieval-{name}")
    if folder.exists() or folder.is_symlink():
        raise PluginError(f"{folder} exists already. Remove it, or choose another with --output.")
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        temporary.chmod(0o755)  # mkdtemp's is private
        for path, text in FILES.items():
            file = temporary / path.format(name=name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(name=name), encoding="utf-8")
        temporary.rename(folder)
    except OSError as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise PluginError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder
