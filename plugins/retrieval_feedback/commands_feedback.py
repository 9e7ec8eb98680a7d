"""`retrieval feedback`: list, export and forget the feedback on searches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from retrieval.cli import say, say_json
from retrieval.cli.common import JSON, PATH, Duration, Group, command
from retrieval.errors import StoreError, quantity

if TYPE_CHECKING:
    from retrieval.feedback.feedback_record import FeedbackRecord, JudgedSearch

_PAGE = 1000
"""Number of searches that are read at a time."""


@click.group(cls=Group)
def feedback() -> None:
    """List, export and forget the searches and marks that a server has kept.

    INDEX is the folder of an index that was served with --feedback, or the file of --feedback-file.

    Example:  retrieval feedback forget photos.index --key shop --user ann
    """


_INDEX = click.argument("path", metavar="INDEX", type=PATH)
_KEY = click.option(
    "--key", metavar="NAME", help="Only this API key; '' for searches without a key."
)
_USER = click.option("--user", metavar="USER", help="Only this user of the key.")


@command("list", "retrieval feedback list photos.index", group=feedback)
@_INDEX
@JSON
def list_feedback(path: Path, as_json: bool) -> None:
    """Count the searches and marks, in all and of each key and user."""
    with _open_record(path) as record:
        counts = record.counts()
        voters: list[dict[str, Any]] = [
            {"voter": voter, "searches": searches, "marks": marks, "last": _utc(last)}
            for voter, searches, marks, last in record.voters()
        ]
    if as_json:
        say_json({**counts, "of": voters})
        return
    say(
        f"{counts['searches']:,} searches, {counts['judged']:,} of them with"
        f" {counts['marks']:,} marks by {counts['voters']:,} keys and users;"
        f" {counts['trials']:,} trials."
    )
    for entry in voters:
        say(
            f"{entry['voter'] or 'without a key'}  {_searches(entry['searches'])},"
            f" {quantity(entry['marks'], 'mark')}, last {entry['last']}"
        )


@command("export", "retrieval feedback export photos.index --output feedback.jsonl", group=feedback)
@_INDEX
@click.option(
    "--output", "-o", required=True, metavar="FILE", type=PATH, help="File of JSON lines to write."
)
@_KEY
@_USER
def export_feedback(path: Path, output: Path, key: str | None, user: str | None) -> None:
    """Write the searches that have marks, with the marks, one JSON object per line."""
    from retrieval.base.files import whole_file

    voter = _voter(key, user)
    count = 0
    with (
        _open_record(path) as record,
        whole_file(output, StoreError, private=True) as temporary,
        temporary.open("w", encoding="utf-8") as file,
    ):
        for entry in _judged_searches(record):
            marks = entry.marks
            if voter is not None and not _is_of(entry.search.voter, voter):
                marks = {name: by_item for name, by_item in marks.items() if _is_of(name, voter)}
            if marks:
                file.write(json.dumps(_as_json(entry, marks), ensure_ascii=False) + "\n")
                count += 1
    say(f"Wrote {_searches(count)} with marks to {output}.")


@command(
    "forget",
    "retrieval feedback forget photos.index --key shop",
    "retrieval feedback forget photos.index --older-than 30d",
    group=feedback,
)
@_INDEX
@_KEY
@_USER
@click.option("--item", metavar="ID", help="Marks on this item, and searches by it.")
@click.option(
    "--older-than", type=Duration(), metavar="TIME", help="Searches and marks older than this."
)
def forget_feedback(
    path: Path,
    key: str | None,
    user: str | None,
    item: str | None,
    older_than: timedelta | None,
) -> None:
    """Delete feedback for good: of a key or user, on an item, or older than a time.

    Nothing of it stays in the file. A metric that learned from it is taken back at the next
    'retrieval learn'.
    """
    before = None
    if older_than is not None:
        before = time.time() - older_than.total_seconds()
    with _open_record(path) as record:
        counts = record.forget(voter=_voter(key, user), item=item, before=before)
    say(f"Forgot {_searches(counts['searches'])} and {quantity(counts['marks'], 'mark')}.")
    if counts["tainted"]:
        say(
            f"{quantity(counts['tainted'], 'metric')} had learned from them: the next 'retrieval"
            " learn' takes back the one that is served or on trial."
        )


def _open_record(path: Path) -> FeedbackRecord:
    from retrieval.feedback.feedback_record import FEEDBACK_FILE, FeedbackRecord

    if path.is_dir():
        path = path / FEEDBACK_FILE
    return FeedbackRecord.open(path)


def _voter(key: str | None, user: str | None) -> str | None:
    """Return the voter that a key and a user name, or None without both."""
    if user is None:
        return key
    return f"{key or ''}/{user}"


def _is_of(name: str, voter: str) -> bool:
    """Return whether `name` is the voter `voter`, or a user of the key `voter`."""
    return name == voter or name.startswith(f"{voter}/")


def _judged_searches(record: FeedbackRecord) -> Iterator[JudgedSearch]:
    """Yield all searches with marks, page by page."""
    after = 0
    while page := record.judged(after=after, limit=_PAGE):
        yield from page
        after = page[-1].n


def _as_json(entry: JudgedSearch, marks: Any) -> dict[str, Any]:
    """Return a search with its marks as JSON."""
    from retrieval.feedback.feedback_record import CLICKED, DISLIKED, LIKED

    words = {LIKED: "liked", DISLIKED: "disliked", CLICKED: "clicked"}
    search = entry.search
    return {
        "search_id": search.id,
        "time": _utc(search.answered),
        "voter": search.voter,
        "base": search.base,
        "served": search.served,
        "query": None if search.query is None else search.query.tolist(),
        "item": search.item,
        "hits": search.hits,
        "challenger": search.challenger,
        "credits": search.credits,
        "marks": {
            voter: {item: words[mark] for item, mark in by_item.items()}
            for voter, by_item in marks.items()
        },
    }


def _searches(number: int) -> str:
    return quantity(number, "search", "searches")


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
