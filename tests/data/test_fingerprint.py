"""What the cache of features knows a backbone by: whatever could change a feature."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.features import fingerprint
from retrieval.plugin import Backbone
from torch import Tensor, nn


class Scaled(Backbone):
    """A net whose `repr` and weights say nothing of its other values."""

    def __init__(self, factor: Any = 2, buffer: float = 0.0) -> None:
        super().__init__()
        self.features = 3
        self.layer = nn.Linear(3, 3)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.layer.factor = factor
        self.register_buffer("shift", torch.tensor(buffer), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (1, 2),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (np.zeros(2), np.ones(2)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        ([np.zeros(2)], [np.ones(2)]),
        ({"a": 1, "b": [2]}, {"a": [1], "b": 2}),
        ({"a", "b"}, {"a", "c"}),
        (object(), lambda: None),
    ],
)
@pytest.mark.parametrize("name", ["_private", "public"])
def test_what_a_module_keeps_counts(name, one, another):
    backbones = [Scaled(), Scaled(), Scaled()]
    for backbone, value in zip(backbones, [one, copy.copy(one), another], strict=True):
        backbone.layer.__dict__[name] = value
    first, same, other = map(fingerprint, backbones)
    assert first == same != other


def test_a_buffer_and_a_weight_count_but_neither_mode_hook_nor_order_of_a_set():
    shifted, moved, hooked, ordered = Scaled(buffer=1.0), Scaled(), Scaled().eval(), Scaled()
    with torch.no_grad():
        moved.layer.weight[0, 0] += 1e-6
    assert len({fingerprint(backbone) for backbone in (Scaled(), shifted, moved)}) == 3
    hooked.layer.register_forward_hook(lambda *_: None)
    words = [f"word {number}" for number in range(50)]
    hooked.__dict__["names"] = set(words)
    words.reverse()
    ordered.__dict__["names"] = set(words)
    assert fingerprint(hooked) == fingerprint(ordered)
