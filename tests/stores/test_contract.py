"""Every store of the package keeps the contract of stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from retrieval.serving.bundle import Bundle
from retrieval.serving.local.create import create_local
from retrieval.serving.local.store import LocalStore
from retrieval.serving.stores.contract import Store
from retrieval.serving.testing import StoreSuite


class TestLocal(StoreSuite):
    def create(self, place: Path, bundle: Bundle, widths: Mapping[str, int]) -> Store:
        create_local(place / "index", bundle, widths)
        return self.reopen(place)

    def reopen(self, place: Path) -> Store:
        return LocalStore(place / "index")
