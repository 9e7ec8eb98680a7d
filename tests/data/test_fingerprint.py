"""The fingerprint of a backbone changes with whatever could change a feature."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.features import fingerprint
from retrieval.plugin import Backbone
from torch import Tensor, nn


class Scaled(Backbone):
    """A net with values that neither its `repr` nor its weights show."""

    def __init__(self, buffer: float = 0.0) -> None:
        super().__init__()
        self.features = 3
        self.layer = nn.Linear(3, 3)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("shift", torch.tensor(buffer), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layer(x)
        return features


@pytest.mark.parametrize(
    ("value", "other_value"),
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
def test_a_modules_attributes_count(value, other_value):
    def with_value(value: Any) -> str:
        backbone = Scaled()
        backbone.layer.__dict__["_private"] = value
        return fingerprint(backbone)

    assert with_value(value) == with_value(copy.copy(value)) != with_value(other_value)


def test_buffers_and_weights_count_but_neither_mode_nor_hooks_nor_the_order_of_a_set():
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
