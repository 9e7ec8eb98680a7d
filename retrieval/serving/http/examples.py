"""Examples of requests and answers, for the OpenAPI document; a test holds them to its schemas."""

from __future__ import annotations

from typing import Any

_BUNDLE = "b724972feb66d549419110565acdb26c8e17f49659d87dbc304738f4821db1db"
_HIT = {
    "id": "shoe/7",
    "key": "shoe/7",
    "label": "shoe",
    "distance": 0.3034,
    "metadata": {"price": 20},
    "image_url": "/v1/items/shoe%2F7/image",
    "thumbnail_url": "/v1/items/shoe%2F7/thumbnail",
}
_ITEM = {
    "id": "shoe/7",
    "key": "shoe/7",
    "label": "shoe",
    "metadata": {"price": 20},
    "bytes": 48213,
    "width": 800,
    "height": 600,
    "keep": "copy",
    "image_url": "/v1/items/shoe%2F7/image",
    "thumbnail_url": "/v1/items/shoe%2F7/thumbnail",
}
_ASKED = {"k": 5, "filter": {"label": "shoe", "price": {"<": 30}}, "fields": ["price"]}

EXAMPLES: dict[str, dict[str, Any]] = {
    "search": {
        "body": {"id": "shoe/7", **_ASKED},
        "query": {"k": 5, "filter": "label = 'shoe' and price < 30", "fields": "price"},
        "answer": {"results": [_HIT], "took_ms": 3.1},
    },
    "searchBatch": {
        "body": {"queries": [{"id": "shoe/7"}, {"id": "boot/1"}], **_ASKED},
        "answer": {"answers": [{"results": [_HIT]}, {"results": []}], "took_ms": 4.2},
    },
    "getIndex": {
        "answer": {
            "index": "photos",
            "name": "photos",
            "items": 1796,
            "bundle": _BUNDLE,
            "input": {"kind": "image", "shape": [3, 224, 224]},
            "vector": 128,
            "distance": "Euclidean",
            "rescores": False,
            "format": 2,
            "generation": 1,
            "generations": [{"number": 1, "state": "served", "bundle": _BUNDLE}],
            "bytes": 2_150_400,
            "segments": [
                {"file": "1-merged-0f.segment", "items": 1796, "deleted": 0, "structure": None},
            ],
            "fresh": 0,
            "structure": {"backend": "auto", "options": {}},
            "keep": "reference",
            "fields": ["price"],
            "role": "write",
            "limits": {"bytes": 20_000_000, "pixels": 25_000_000, "batch": 100, "batch_bytes": 64_000_000},
        },
    },
    "listItems": {
        "query": {"limit": 10, "filter": "price < 30"},
        "answer": {"items": [_ITEM], "cursor": None},
    },
    "addItems": {
        "body": {"items": [{"id": "shoe/7", "label": "shoe", "metadata": {"price": 20}}]},
        "query": {"Idempotency-Key": "8e03978e-40d5-43dd-bc93-6894a57f9324"},
        "answer": {"added": 0, "replaced": 1},
    },
    "getItem": {"answer": _ITEM},
    "putItem": {
        "body": {"label": "shoe", "metadata": {"price": 20}},
        "answer": {"id": "shoe/7", "replaced": True},
    },
    "deleteItem": {"answer": {"deleted": 1}},
    "deleteItems": {"body": {"filter": {"price": {">": 1000}}}, "answer": {"deleted": 12}},
    "snapshot": {"answer": {"snapshot": "photos-20260102T030405Z-9f86d081"}},
    "listIndexes": {"answer": {"indexes": ["photos", "shoes"]}},
}
EXAMPLES |= {
    f"{name}ByQuery": {**EXAMPLES[name], "query": {"id": "shoe/7"}}
    for name in ("getItem", "putItem", "deleteItem")
}
