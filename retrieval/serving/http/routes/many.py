"""Many items: added together, listed page by page, deleted by what they are."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, filter_to_json
from retrieval.serving.http.body import JSON_BYTES, Body
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.forms import Form
from retrieval.serving.http.models import (
    MOST_FIELDS,
    DeleteBody,
    ItemsBody,
    dumps,
    filter_of_text,
    loads,
    names_of_text,
    where_of,
    whole,
)
from retrieval.serving.http.routes.items import item_json, usable_id
from retrieval.serving.http.sending import answer, as_json
from retrieval.serving.http.site import Served, Site, parameters_of, prefix_of
from retrieval.serving.http.waiting import arrived, client_of, in_time
from retrieval.serving.http.writing import New, Once
from retrieval.serving.index.index import Index

PAGE, MAX_PAGE = 100, 1000
LONGEST_KEY = 255
_CURSOR = 8192  # characters: an id of 1,000 four times over
_ADD = 'Send multipart/form-data with files in the field "image" and their JSON in the field "items", or application/json with {"items": [...]}.'
_DELETE = "Send application/json."
_NO_CURSOR = "The cursor is not one that this server gave for this list. Begin again without one."


class Many:
    """Many items of a site's indexes.

    Args:
        site: whose.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.settings

    async def add(self, request: Request) -> Response:
        """Add items, or put them in the place of others: all of them, or none."""
        served, client, budget = self._site.of(request, "write"), client_of(request), self._site.budget
        parameters_of(request)
        key, limit = _key_of(request), self._settings.batch_bytes
        body = Body(request.headers, {"form": limit, "json": limit}, _ADD)

        def finish(added: int, replaced: int) -> bytes:
            return as_json({"added": added, "replaced": replaced})

        with budget.upload() as upload:
            await body.read(
                request.receive, budget, upload, self._settings.body_seconds, there=arrived(request)
            )

            async def work() -> bytes:
                items, once = await served.searcher.machinery.searches.run(
                    lambda job: self._items(body, key), client
                )
                return await served.writing.put(
                    items, finish, client, once, lambda size: budget.take(upload, size)
                )

            return answer(await in_time(request, work(), self._settings.deadline))

    def _items(self, body: Body, key: str | None) -> tuple[list[New], Once | None]:
        """Return the items that a body holds, and the key of the request; for a thread.

        Raises:
            RequestError: 400, it is not what it should be.
        """
        most, content = self._settings.batch, body.content()
        if body.kind == "json":
            said, parts = ItemsBody.read(content).items, [content]
            items = [New(one.id, one.label, dict(one.metadata), vector=one.vector) for one in said]
        else:
            form = Form(body.content_type, content, ("items",), self._settings.max_bytes, most)
            listed = form.get("items") or b"[]"
            parts = [listed, *form.pictures()]
            named = ItemsBody.of({"items": loads(listed, 'The field "items" is not JSON.')}).items
            if len(named) != len(form.images) or any(one.vector is not None for one in named):
                raise RequestError(
                    400,
                    f'The field "items" must list what each of the {len(form.images)} images is, in their order, without vectors.',
                )
            items = [
                New(one.id, one.label, dict(one.metadata), image)
                for one, image in zip(named, form.images, strict=True)
            ]
        if len(items) > most:
            raise RequestError(400, f"The request has {len(items):,} items; {most:,} are the most.")
        if len({usable_id(one.id) for one in items}) < len(items):
            raise RequestError(400, "The request names an id twice.")
        return items, None if key is None else Once.of(key, parts)

    async def list(self, request: Request) -> Response:
        """Give a page of items, in the order of their ids."""
        served, prefix = self._site.of(request), prefix_of(request)
        said = parameters_of(request, "cursor", "limit", "filter", "fields")
        limit = whole(said.get("limit", str(PAGE)))
        if not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
            raise RequestError(400, f'"limit" must be a whole number from 1 to {MAX_PAGE}.')
        where, fields = where_of(filter_of_text(said.get("filter"))), _fields(said.get("fields"))
        after = _after(said.get("cursor"), where)

        def work(index: Index) -> bytes:
            return as_json(_page(served, index, prefix, where, after, limit, fields))

        reading = served.searcher.read(work, client_of(request))
        return answer(await in_time(request, reading, self._settings.deadline))

    async def delete(self, request: Request) -> Response:
        """Delete items by id, all that match a filter, or all."""
        served, budget = self._site.of(request, "write"), self._site.budget
        parameters_of(request)
        body = Body(request.headers, {"json": JSON_BYTES}, _DELETE)
        with budget.upload() as upload:
            await body.read(
                request.receive, budget, upload, self._settings.body_seconds, there=arrived(request)
            )
            said = DeleteBody.read(body.content())
            if sum(one is not None for one in (said.ids, said.filter, said.all)) != 1:
                raise RequestError(400, DeleteBody.shape)
            deleting = served.writing.delete(
                client_of(request), said.ids or (), where_of(said.filter), every=said.all is True
            )
            return answer({"deleted": await in_time(request, deleting, self._settings.deadline)})


def _key_of(request: Request) -> str | None:
    """Return the request's Idempotency-Key.

    Raises:
        RequestError: 400, it is too long, or there are two.
    """
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    if len(keys) > 1 or not 1 <= len(keys[0]) <= LONGEST_KEY or not keys[0].isprintable():
        raise RequestError(
            400, f"An Idempotency-Key has 1 to {LONGEST_KEY} printable characters, and a request has one."
        )
    return keys[0]


def _fields(text: str | None) -> list[str] | None:
    names = names_of_text(text)
    if names is not None and (len(names) > MOST_FIELDS or not all(isinstance(one, str) for one in names)):
        raise RequestError(400, f'"fields" must be a list of at most {MOST_FIELDS} names.')
    return names


def _page(
    served: Served,
    index: Index,
    prefix: str,
    where: Filter | None,
    after: str | None,
    limit: int,
    fields: list[str] | None,
) -> dict[str, Any]:
    """Return a page and the cursor of the next one; for a thread.

    Raises:
        DataError: the filter names what no item has.
    """
    found = index.scan(where, after=after, limit=limit + 1)
    items = [item_json(served, item, prefix, fields) for item in found]
    more = len(items) > limit
    return {"items": items[:limit], "cursor": _cursor(items[limit - 1]["id"], where) if more else None}


def _cursor(after: str, where: Filter | None) -> str:
    return base64.urlsafe_b64encode(dumps([after, _of(where)]).encode()).decode()


def _after(cursor: str | None, where: Filter | None) -> str | None:
    """Return the id behind which a page begins.

    Raises:
        RequestError: 400, the cursor is another list's, or none at all.
    """
    if cursor is None:
        return None
    try:
        if len(cursor) > _CURSOR:
            raise ValueError
        said = strict_loads(base64.b64decode(cursor.encode("ascii"), b"-_", validate=True))
    except (ValueError, binascii.Error):
        raise RequestError(400, _NO_CURSOR) from None
    if not (isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[1] == _of(where)):
        raise RequestError(400, _NO_CURSOR)
    return said[0]


def _of(where: Filter | None) -> str:
    """Return what tells the list of one filter from that of another."""
    text = "" if where is None else dumps(filter_to_json(where))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
