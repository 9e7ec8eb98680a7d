"""What every store refuses of items, whether they are looked at together or one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.serving.store import items as rules
from retrieval.serving.store.contract import Item

ODD: list[dict[str, Any]] = [
    {"label": "a\0b"}, {"label": "\ud800"}, {"label": 7}, {"label": ""}, {"label": "x" * 100_000}, {"label": "x" * 1_000_001}, {"label": "\udc00"},
    {"metadata": {"a": "\\u0000"}}, {"metadata": {"a": "\0"}}, {"metadata": {"\0": 1}}, {"metadata": {"a": float("nan")}}, {"metadata": {1: 2}},
    {"metadata": {"a": "\ud800"}}, {"metadata": [1]}, {"metadata": {"a": 2**70}}, {"metadata": {"a": "x" * 1_000_001}}, {"metadata": {"a": {"b": [None, True, 0.5]}}},
    {"path": Path("/a")}, {"path": "/a"}, {"stamp": "s"}, {"stamp": "\0"}, {"keep": "all"}, {"keep": "copy"}, {"original": b"x"}, {"original": "x"},
    {"bytes": 3}, {"bytes": -1}, {"width": 0}, {"height": 2**63}, {"id": ""}, {"id": 7}, {"id": "x" * 1001}, {"id": "b"}, {"id": "\ud800"}, {"id": "\0"}, {"id": None},
    {"arrays": {}}, {"arrays": {"vector": np.ones(3, np.float32)}}, {"arrays": {"vector": np.full(2, np.inf)}}, {"arrays": {"vector": [1.0, 2.0]}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:40])
def test_items_looked_at_together_are_what_each_is_alone(
    odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def items() -> list[Item]:
        good = {"label": "l", "metadata": {"n": 1, "t": "é"}, "arrays": {"vector": np.zeros(2, np.float32)}}
        return [
            Item(**({"id": "a"} | good)),
            Item(**({"id": "b"} | good)),
            Item(**({"id": "c"} | good | odd)),
        ]

    def outcome() -> Any:
        try:
            return rules.checked(items(), {"vector": 2})
        except DataError as fault:
            return str(fault)

    together = outcome()
    monkeypatch.setattr(rules, "_plain", lambda items, widths: None)
    assert together == outcome()


def test_halves_of_a_surrogate_pair_in_two_texts_make_no_text() -> None:
    arrays = {"vector": np.zeros(2, np.float32)}
    with pytest.raises(DataError, match="half of a surrogate pair"):
        rules.checked([Item("\ud83d", arrays=arrays), Item("\ude00", arrays=arrays)], {"vector": 2})
