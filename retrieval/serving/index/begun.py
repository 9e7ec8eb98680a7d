"""Which indexes at addresses this user has begun to create here and not finished, in the user's data folder: the same command goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.host.files import write_bytes
from retrieval.serving.files.locks import hold
from retrieval.serving.store.address import Address

_BYTES = 1000


class Begun:
    """What is noted of one address. Where nothing can be, an interrupted creation is finished by adding.

    Args:
        address: of the index.
    """

    def __init__(self, address: Address) -> None:
        import platformdirs

        name = hashlib.sha256(str(address).encode()).hexdigest()[:32]
        folder = os.environ.get("RETRIEVAL_DATA") or platformdirs.user_data_dir("retrieval")
        self._path = Path(folder) / "begun" / name

    @property
    def identity(self) -> str | None:
        """What tells the index from every other; None where none was begun, or it is finished."""
        with suppress(OSError, UnicodeDecodeError), self._path.open("rb") as file:
            return file.read(_BYTES).decode() or None
        return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep out every other process of this machine that creates an index at this address.

        Raises:
            StoreError: there is one.
        """
        with ExitStack() as held:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                held.enter_context(hold(self._path, "creating this index", StoreError))
            yield

    def note(self, identity: str) -> None:
        """Note that an index is about to be made."""
        with suppress(OSError):
            write_bytes(self._path, identity.encode(), private=True)

    def forget(self) -> None:
        """Note that it is finished, or gone."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
