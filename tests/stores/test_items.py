"""What every store takes and refuses of items, beside the cases of `retrieval.plugin.testing`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.serving.store.contract import Item
from retrieval.serving.store.items import checked

ARRAYS = {"vector": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    "attributes",
    [
        {"label": "x" * 100_000},
        {"metadata": {"a": "\\u0000"}},
        {"metadata": {"a": 2**70}},
        {"metadata": {"a": {"b": [None, True, 0.5]}}},
        {"stamp": "s"},
        {"width": 0, "height": 2**63 - 1},
    ],
    ids=lambda attributes: str(attributes)[:40],
)
def test_odd_items_are_taken(attributes: dict[str, Any]) -> None:
    assert len(checked([Item("a", **{"arrays": ARRAYS, **attributes})], {"vector": 2})) == 1


def test_halves_of_a_surrogate_pair_in_two_texts_make_no_text() -> None:
    with pytest.raises(DataError, match="half of a surrogate pair"):
        checked([Item("\ud83d", arrays=ARRAYS), Item("\ude00", arrays=ARRAYS)], {"vector": 2})
