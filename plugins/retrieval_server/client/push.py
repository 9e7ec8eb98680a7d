"""Upload a folder's images to a server in batches, except those that the server already has."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from retrieval.base.photo_files import IMAGE_EXTENSIONS, files_below, leads_nowhere, own_name
from retrieval.errors import DataError, ServerError, at_least_one

from retrieval_server.client.bodies import NewItem, file_bytes

if TYPE_CHECKING:
    from retrieval_server.client.clients import AsyncClient

_BATCH_BYTES = 8_000_000
"""Maximum size of a batch of more than one image."""
_ADDRESS_CHARACTERS = 8_000
"""Maximum length of a batch's ids together, URL-encoded."""
_ITEM_STATUSES = {400, 413, 422}
"""Statuses by which the server refuses a request because of an item in it."""


@dataclass(frozen=True)
class PushReport:
    """Result of a push.

    Attributes:
        added: number of images that became new items.
        replaced: number of images that replaced an item with other content.
        unchanged: number of images that the server already had with the same content.
        left_out: number of files without the extension of an image format.
        bad: path, relative to the folder, and error of each file that could not be added.
    """

    added: int
    replaced: int
    unchanged: int
    left_out: int
    bad: tuple[tuple[str, str], ...]


def walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file below a folder, and whether it counts as an image.

    A broken link counts as an image, because it may have led to an image or a folder of images.

    Raises:
        DataError: `folder` is not a folder, or a folder below it cannot be read.
    """
    for path in files_below(folder):
        yield path, path.suffix.lower() in IMAGE_EXTENSIONS or leads_nowhere(path)


class Push:
    """One push of a folder: its remaining batches and its results so far."""

    def __init__(
        self,
        client: AsyncClient,
        folder: Path,
        batch_size: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._client = client
        self._folder = folder
        self._progress = progress
        self._batch_size = at_least_one("batch_size", batch_size)
        self._batches_lock = asyncio.Lock()
        self._added = self._replaced = self._unchanged = 0
        self._bad: list[tuple[str, str]] = []

    async def run(self, connections: int) -> PushReport:
        """Push the folder with `connections` concurrent requests; see `AsyncClient.push`."""
        connections = at_least_one("connections", connections)
        # A folder that does not exist is reported before the first request.
        next(walk(self._folder), None)
        index = await self._client.index()
        if index.input.kind != "image":
            raise DataError("This index takes features, not images.")
        kinds = await asyncio.to_thread(lambda: Counter(image for _, image in walk(self._folder)))
        self._total = kinds[True]
        self._limits = index.limits
        self._batches = self._batched()
        if not self._total:
            extensions = ", ".join(sorted(IMAGE_EXTENSIONS))
            raise DataError(f"{self._folder} holds no image: no file ends in {extensions}.")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(self._work())
        except ExceptionGroup as faults:
            # In Python 3.11.2, `except*` raises another group.
            for fault in faults.exceptions:
                if isinstance(fault, ServerError | DataError):
                    raise fault from None
            raise
        bad = tuple(sorted(self._bad))
        return PushReport(self._added, self._replaced, self._unchanged, kinds[False], bad)

    def _batched(self) -> Iterator[dict[str, Path]]:
        """Yield the folder's images in batches, each as paths by id."""
        files: dict[str, Path] = {}
        size = address = 0
        most_bytes = min(self._limits.batch_bytes, _BATCH_BYTES)
        for path in (path for path, image in walk(self._folder) if image):
            id = path.relative_to(self._folder).as_posix()
            try:
                length = len(quote(id, safe=""))
                weight = path.stat().st_size
            except UnicodeEncodeError:
                self._bad.append((id, "Its name is not valid UTF-8."))
                continue
            except OSError as fault:
                why = f"It cannot be read: {fault.strerror}."
                if leads_nowhere(path):
                    why = "It is a link that leads nowhere."
                self._bad.append((id, why))
                continue
            full = size + weight > most_bytes or address + length > _ADDRESS_CHARACTERS
            if files and (full or len(files) >= min(self._batch_size, self._limits.batch)):
                yield files
                files = {}
                size = 0
                address = 0
            files[id] = path
            size += weight
            address += length
        if files:
            yield files

    async def _work(self) -> None:
        while True:
            # A generator cannot be advanced by two threads at once.
            async with self._batches_lock:
                files = await asyncio.to_thread(next, self._batches, None)
            if files is None:
                return
            # The ids of a batch stand in the address; `_ADDRESS_CHARACTERS` bounds their length.
            stored = self._client.items({"id": {"in": [*files]}}, fields=[], page=len(files))
            hashes = {item.id: item.sha256 async for item in stored}
            items, unchanged = await asyncio.to_thread(self._read, files, hashes)
            self._unchanged += unchanged
            if items:
                await self._send(items)
            if self._progress is not None:
                done = self._added + self._replaced + self._unchanged + len(self._bad)
                self._progress(done, self._total)

    def _read(
        self, files: Mapping[str, Path], hashes: Mapping[str, str | None]
    ) -> tuple[list[NewItem], int]:
        """Return the new and changed items, and the number of unchanged ones; runs in a thread."""
        items = []
        unchanged = 0
        largest = min(self._limits.bytes, self._limits.batch_bytes)
        for id, path in files.items():
            try:
                content = file_bytes(path, largest)
            except DataError as fault:
                self._bad.append((id, str(fault)))
                continue
            if hashes.get(id) == hashlib.sha256(content).hexdigest():
                unchanged += 1
            else:
                # `retrieval index add` gives an image the same id and label.
                first, slash, _ = id.partition("/")
                label = first if slash else own_name(self._folder)
                items.append(NewItem(id, content, None, label))
        return items, unchanged

    async def _send(self, items: Sequence[NewItem]) -> None:
        """Send items; if the server refuses them, send their halves, down to single bad items."""
        try:
            answer = await self._client.add(items)
        except ServerError as fault:
            if fault.status not in _ITEM_STATUSES:
                raise
            if len(items) == 1:
                self._bad.append((items[0].id, fault.detail or str(fault)))
                return
            for half in (items[: len(items) // 2], items[len(items) // 2 :]):
                await self._send(half)
        else:
            self._added += answer.added
            self._replaced += answer.replaced
