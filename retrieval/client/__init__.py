"""Clients of a search server's `/v1` API: `Client`, and `AsyncClient` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.client.answers import (
        AddAnswer as AddAnswer,
        BatchAnswer as BatchAnswer,
        Hit as Hit,
        IndexAnswer as IndexAnswer,
        ItemAnswer as ItemAnswer,
        PutAnswer as PutAnswer,
        SearchAnswer as SearchAnswer,
    )
    from retrieval.client.bodies import NewItem as NewItem
    from retrieval.client.clients import AsyncClient as AsyncClient, Client as Client
    from retrieval.client.push import PushReport as PushReport
    from retrieval.client.sending import Retries as Retries

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval.client.answers": [
            "AddAnswer",
            "BatchAnswer",
            "Hit",
            "IndexAnswer",
            "ItemAnswer",
            "PutAnswer",
            "SearchAnswer",
        ],
        "retrieval.client.clients": ["AsyncClient", "Client"],
        "retrieval.client.push": ["PushReport"],
        "retrieval.client.bodies": ["NewItem"],
        "retrieval.client.sending": ["Retries"],
    },
)
