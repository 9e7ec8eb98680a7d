"""A new index folder, empty, that appears whole."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import apsw

from retrieval.errors import StoreError
from retrieval.host.files import whole_folder
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.generation_table import BUNDLES, add_generation, keep_bundle
from retrieval.serving.local.home import INDEX
from retrieval.serving.local.piece import SEGMENTS
from retrieval.serving.local.record import Record, reason
from retrieval.serving.local.structures import Wanted
from retrieval.serving.stores.contract import Keep

FORMAT = 2


def create_local(
    folder: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    *,
    structure: Wanted | None = None,
    keep: Keep = "reference",
    replace: bool = False,
    identity: str | None = None,
) -> None:
    """Write an empty index.

    Args:
        folder: must not exist, or is an index that gives way (`replace`); its parent must.
        bundle: of the first generation; a copy goes into the index.
        widths: numbers of each array of an item, by name.
        structure: which structure its segments are to have.
        keep: what it keeps of originals, unless an item says otherwise.
        replace: see `folder`.
        identity: its id; a new one by default.

    Raises:
        StoreError: there is something already, or the disk refuses.
    """
    taken = StoreError(
        f"{folder} exists already. Choose another name, or add to it with 'retrieval index add'."
    )
    said = structure or Wanted()
    try:
        with whole_folder(folder, replace=replace, taken=taken) as fresh:
            (fresh / SEGMENTS).mkdir()
            (fresh / BUNDLES).mkdir()
            keep_bundle(bundle, fresh)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            named = {
                "retrieval": "index",
                "format": FORMAT,
                "id": identity or str(uuid.uuid4()),
                "created": now,
            }
            text = json.dumps(named, indent=2) + "\n"
            (fresh / INDEX).write_bytes(text.encode())
            Record.create(fresh)
            record = Record(fresh)
            with record.writing() as connection:
                for key, value in {
                    "index": hashlib.sha256(text.encode()).hexdigest(),
                    "seq": 0,
                    "epoch": 0,
                    "structure": json.dumps({"backend": said.backend, "options": dict(said.options or {})}),
                    "keep": keep,
                }.items():
                    connection.execute("insert into state values (?, ?)", (key, value))
                add_generation(connection, bundle, widths, "served")
            record.checkpoint()
            record.close()
    except (OSError, apsw.Error, StoreError) as fault:
        cause = fault.__cause__ if isinstance(fault, StoreError) else fault
        if not isinstance(cause, OSError | apsw.Error):
            raise
        raise StoreError(f"The index {folder} cannot be written: {reason(cause)}") from cause
