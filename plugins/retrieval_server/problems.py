"""Error responses in the form `application/problem+json` of RFC 9457."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from retrieval.errors import RetrievalError
from retrieval.store.contract import StoreUnavailable, TooSlow
from starlette.responses import Response

log = logging.getLogger("retrieval_server")

UNREACHABLE = (
    "The store of this index cannot be reached now. Nothing is known to be damaged: try again in a"
    " moment."
)
_TOO_SLOW = "This takes too long. Ask for fewer results, or use a simpler filter."
MEDIA_TYPE = "application/problem+json"


class RequestError(RetrievalError):
    """Raised to answer a request with an HTTP error status.

    Args:
        status: HTTP status, 4xx, 500 or 503.
        sentence: message to the person who sent the request.
        reason: label of the error in the metrics, from a small fixed set; by default the status.
        members: further members of the problem document.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        sentence: str,
        reason: str = "",
        members: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.members = dict(members or {})
        self.headers = dict(headers or {})


def busy(why: str, reason: str = "queue") -> RequestError:
    """Return the error of a busy server, with a reason such as "too many searches are waiting"."""
    return RequestError(503, f"The server is busy: {why}. Try again in a moment.", reason)


def no_item(where: str = "There") -> RequestError:
    """Return the error for an unknown id; `where` begins its sentence, such as "Query 2: there"."""
    return RequestError(404, f"{where} is no such item.")


def refuse_other_bundle(expected: str | None, served: str) -> None:
    """Raise a RequestError if a request expects another bundle than the one that is served."""
    if expected not in (None, served):
        raise RequestError(
            409,
            f"This index holds vectors of the bundle {served}, not of {expected}: vectors of"
            " different bundles cannot be compared. Encode with this index's bundle.",
        )


def problem_json(
    status: int, sentence: str, request_id: str, members: Mapping[str, Any] | None = None
) -> bytes:
    """Return a problem document with the sentence as `detail` and the request id as `instance`."""
    # RFC 9457: with this type, the title is the phrase of the status.
    head = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    return to_json({**head, "detail": sentence, "instance": request_id, **(members or {})})


def problem(scope: Any, error: RequestError) -> Response:
    """Return the response to a failed request; a 503 has a `Retry-After` header."""
    headers = {}
    if error.status == 503:
        headers = {"Retry-After": "1"}
    members = error.members
    # Clients of OpenAI show this member to their users, and no other.
    if scope["path"].endswith("/embeddings"):
        members = {**members, "message": str(error)}
    body = problem_json(error.status, str(error), scope["retrieval.request_id"], members)
    return Response(body, error.status, headers | error.headers, MEDIA_TYPE)


def report(error: BaseException) -> None:
    """Log an error with its causes and its place in the code, in one line."""
    # One line, because a request could otherwise fill the log with tracebacks.
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    causes = list[str]()
    where = ""
    if frames:
        where = f" ({frames[0].filename}:{frames[0].lineno})"
    cause: BaseException | None = error
    while cause is not None and len(causes) < 4:
        causes.append(f"{type(cause).__name__}: {str(cause)[:300]}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    log.error("%s%s", " – because of ".join(causes), where)


def store_failed(error: Exception, sentence: str) -> RequestError:
    """Log an error of an index's store or its files, and return the error for the client."""
    if isinstance(error, TooSlow):
        return RequestError(503, _TOO_SLOW, "deadline")
    report(error)
    if isinstance(error, StoreUnavailable):
        return RequestError(503, UNREACHABLE, "unreachable")
    return RequestError(503, sentence, "index")
