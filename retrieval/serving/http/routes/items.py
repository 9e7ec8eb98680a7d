"""One item, by its id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from retrieval.serving.http.body import JSON_BYTES, Body
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.forms import Form
from retrieval.serving.http.models import ItemBody, loads, truth
from retrieval.serving.http.routes.ids import id_of
from retrieval.serving.http.sending import answer, as_json
from retrieval.serving.http.site import Served, Site, prefix_of
from retrieval.serving.http.waiting import arrived, client_of, in_time
from retrieval.serving.http.writing import New
from retrieval.serving.index.index import Index
from retrieval.serving.store.contract import Item
from retrieval.serving.store.items import check_id

_TYPES = 'Send multipart/form-data with a field "image", or application/json with {"vector": [...]} or {"label": "shoe"}.'
_FORM = ("label", "metadata", "keep")
_NONE = "There is no such item."


class Items:
    """Single items of a site's indexes.

    Args:
        site: whose.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.settings

    async def get(self, request: Request) -> Response:
        """Give an item, and its vector when asked for it."""
        served, prefix = self._site.of(request), prefix_of(request)
        id, wanted = id_of(request, "vector"), truth(request.query_params.get("vector", "false"))
        if not isinstance(wanted, bool):
            raise RequestError(400, '"vector" must be true or false.')

        def work(index: Index) -> bytes:
            return as_json(_whole(served, index, id, prefix, vector=wanted))

        reading = served.searcher.read(work, client_of(request))
        return answer(await in_time(request, reading, self._settings.deadline))

    async def put(self, request: Request) -> Response:
        """Add an item, or put it in the place of the one that has its id."""
        served, client = self._site.of(request, "write"), client_of(request)
        id, budget = usable_id(id_of(request)), self._site.budget
        body = Body(request.headers, {"form": self._settings.max_bytes, "json": JSON_BYTES}, _TYPES)

        def read() -> New:
            content = body.content()
            if body.kind == "json":
                said = ItemBody.read(content)
                return New(id, said.label, dict(said.metadata), vector=said.vector)
            return _of_form(id, Form(body.content_type, content, _FORM, self._settings.max_bytes))

        def finish(added: int, replaced: int) -> bytes:
            return as_json({"id": id, "replaced": bool(replaced)})

        async def work() -> bytes:
            new = await served.searcher.machinery.searches.run(lambda job: read(), client)
            return await served.writing.put([new], finish, client)

        with budget.upload() as upload:
            await body.read(
                request.receive, budget, upload, self._settings.body_seconds, there=arrived(request)
            )
            return answer(await in_time(request, work(), self._settings.deadline))

    async def delete(self, request: Request) -> Response:
        """Delete an item."""
        served, id = self._site.of(request, "write"), id_of(request)
        deleting = served.writing.delete(client_of(request), [id])
        if not await in_time(request, deleting, self._settings.deadline):
            raise RequestError(404, _NONE)
        return answer({"deleted": 1})


def usable_id(id: str) -> str:
    """Return an id that an item may have.

    Raises:
        RequestError: 400, none may have it.
    """
    if fault := check_id(id):
        raise RequestError(400, f"The item {fault}.")
    return id


def item_json(served: Served, item: Item, prefix: str, fields: list[str] | None = None) -> dict[str, Any]:
    """Return an item for a client.

    Args:
        served: its index.
        item: the item.
        prefix: of addresses.
        fields: of the metadata; None for all.
    """
    metadata: Mapping[str, Any] = item.metadata
    if fields is not None:
        metadata = {name: item.metadata[name] for name in fields if name in item.metadata}
    here = f"{prefix}/items/{quote(item.id, safe='')}"
    shown = served.searcher.gallery.offers(item.path, item.keep)
    return {
        "id": item.id,
        "key": item.id,
        "label": item.label,
        "metadata": dict(metadata),
        "bytes": item.bytes,
        "width": item.width,
        "height": item.height,
        "keep": item.keep,
        "image_url": f"{here}/image" if shown else None,
        "thumbnail_url": f"{here}/thumbnail" if shown else None,
    }


def _whole(served: Served, index: Index, id: str, prefix: str, *, vector: bool) -> dict[str, Any]:
    """Return an item and, when asked for, its vector; for a thread.

    Raises:
        RequestError: 404, there is none.
    """
    item = index.get([id], arrays=vector).get(id)
    if item is None:
        raise RequestError(404, _NONE)
    numbers = item.arrays.get("vector")
    own = {"vector": None if numbers is None else numbers.tolist()} if vector else {}
    return item_json(served, item, prefix) | own


def _of_form(id: str, form: Form) -> New:
    """Return what an item is to be, from a form with its image.

    Raises:
        RequestError: 400, a field is not what it should be.
    """
    metadata = loads(form.text("metadata") or "{}", '"metadata" must be a JSON object.')
    if not isinstance(metadata, dict):
        raise RequestError(400, '"metadata" must be a JSON object.')
    keep = form.text("keep")
    if keep not in (None, "copy", "thumbnail", "nothing"):
        raise RequestError(400, '"keep" must be copy, thumbnail or nothing.')
    return New(id, form.text("label"), metadata, form.pictures()[0], None, keep)  # type: ignore[arg-type]
