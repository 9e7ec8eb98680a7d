"""What is searched for, from a request's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.filters import Filter
from retrieval.serving.http.body import LARGE, Body
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.forms import Form, quick_parts
from retrieval.serving.http.models import (
    BatchBody,
    GivenBody,
    Options,
    SearchBody,
    options_of,
    where_of,
)

OPTIONS = ("k", "filter", "candidates", "fields", "explain")


class Given(NamedTuple):
    """One thing that is searched for: an encoded image's bytes, a vector, or the id of an item, whose neighbours are wanted."""

    image: bytes | None = None
    vector: NDArray[np.float64] | None = None
    id: str | None = None


class Query(NamedTuple):
    """What is searched for, how many answers are wanted, and among which items.

    Attributes:
        given: one, or several.
        k: answers to each.
        where: which items.
        candidates: for the rescorer.
        fields: names of the metadata that the answer gives; None for all.
        explain: whether the answer says what was done.
    """

    given: tuple[Given, ...]
    k: int = 10
    where: Filter | None = None
    candidates: int | None = None
    fields: tuple[str, ...] | None = None
    explain: bool = False


def read_quickly(body: Body, parameters: Mapping[str, str], largest: int) -> Query | None:
    """Return what `read_search` does; None where that takes longer than handing it to a thread."""
    if body.large:
        return None
    if body.kind != "form":
        return read_search(body, parameters, largest)
    content = body.content()
    parts = quick_parts(body.content_type, content)
    if parts is None or sum(len(said) for _, is_file, said in parts if not is_file) > LARGE:
        body.put_back(content)
        return None
    return _of_form(Form(body.content_type, content, OPTIONS, largest, parts=parts))


def read_search(body: Body, parameters: Mapping[str, str], largest: int) -> Query:
    """Return the one search that a body holds; for a thread.

    Args:
        body: read.
        parameters: of the address, which an image that is the whole body has in the place of a form's fields.
        largest: bytes of an image.

    Raises:
        RequestError: 400, it is not what it should be.
    """
    content = body.content()
    if body.kind == "image":
        return _query((Given(image=content),), options_of({name: parameters.get(name) for name in OPTIONS}))
    if body.kind == "form":
        return _of_form(Form(body.content_type, content, OPTIONS, largest))
    asked = SearchBody.read(content)
    return _query((_given(asked, SearchBody.shape),), asked)


def read_batch(body: Body, most: int, largest: int) -> Query:
    """Return the searches that a body holds; for a thread.

    Raises:
        RequestError: 400, it is not what it should be, or they are too many.
    """
    content = body.content()
    if body.kind == "form":
        return _of_form(Form(body.content_type, content, OPTIONS, largest, most))
    asked = BatchBody.read(content)
    if len(asked.queries) > most:
        raise RequestError(400, f"The request has {len(asked.queries):,} queries; {most:,} are the most.")
    return _query(tuple(_given(one, GivenBody.shape) for one in asked.queries), asked)


def _of_form(form: Form) -> Query:
    given = tuple(Given(image=image) for image in form.pictures())
    return _query(given, options_of({name: form.text(name) for name in OPTIONS}))


def _given(one: SearchBody | GivenBody, shape: str) -> Given:
    if (one.vector is None) == (one.id is None):
        raise RequestError(400, shape)
    if one.id is not None:
        return Given(id=str(one.id))
    return Given(vector=np.array(one.vector, np.float64))


def _query(given: tuple[Given, ...], said: Options) -> Query:
    names = None if said.fields is None else tuple(said.fields)
    return Query(given, said.k, where_of(said.filter), said.candidates, names, said.explain)
