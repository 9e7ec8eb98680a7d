"""Every store of the package keeps the contract of stores."""

from __future__ import annotations

from pathlib import Path

from retrieval.serving.store.address import Address
from retrieval.serving.store.contract import StorePlace
from retrieval.serving.store.local import LocalPlace
from retrieval.serving.store.testing import StoreSuite


class TestLocal(StoreSuite):
    def store_at(self, place: Path) -> StorePlace:
        return LocalPlace(Address.parse(f"shelf://{place}/index"))
