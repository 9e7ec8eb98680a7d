"""Clients of a search server's `/v1` API: `Client`, and `AsyncClient` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval_server.client.bodies import NewItem as NewItem
    from retrieval_server.client.clients import AsyncClient as AsyncClient, Client as Client
    from retrieval_server.client.push import PushReport as PushReport
    from retrieval_server.client.sending import Retries as Retries
    from retrieval_server.responses import (
        AddAnswer as AddAnswer,
        BatchAnswer as BatchAnswer,
        EncodeAnswer as EncodeAnswer,
        Hit as Hit,
        IdentifyAnswer as IdentifyAnswer,
        IndexAnswer as IndexAnswer,
        ItemAnswer as ItemAnswer,
        PutAnswer as PutAnswer,
        SearchAnswer as SearchAnswer,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
