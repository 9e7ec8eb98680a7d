"""Changes to an item: its metadata take a merge patch, as appendix A of RFC 7396 shows."""

import pytest
from retrieval.store.contract import Item


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"a": "foo"}, None, {}),
    ],
)
def test_metadata_take_a_merge_patch(before, patch, after):
    item = Item("id", "label", before, keep="copy")
    assert item.changed({"metadata": patch}) == Item("id", "label", after, keep="copy")
    assert item.changed({"label": None}) == Item("id", None, before, keep="copy")
