"""Every store of the package keeps the contract of stores."""

from __future__ import annotations

from pathlib import Path

from retrieval.serving.local.place import LocalPlace
from retrieval.serving.stores.address import Address
from retrieval.serving.stores.place import StorePlace
from retrieval.serving.testing import StoreSuite


class TestLocal(StoreSuite):
    def at(self, place: Path) -> StorePlace:
        return LocalPlace(Address.parse(f"shelf://{place}/index"))
