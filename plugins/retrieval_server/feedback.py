"""Feedback of one index: noting searches, taking marks, and interleaving a challenger's hits."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from retrieval.base.arrays import Floats32
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import RetrievalError, StoreError
from retrieval.feedback.feedback_record import (
    CLICKED,
    DISLIKED,
    LIKED,
    MAX_HITS,
    FeedbackRecord,
    NoRoom,
    Search,
    Trial,
)
from retrieval.feedback.interleaving import load_head, team_draft
from retrieval.index.index import Index
from retrieval.index.queries_and_hits import Hit, Hits
from retrieval.store.contract import BASE, VECTOR, StoreUnavailable, Superseded

from retrieval_server.problems import RequestError, report, store_failed
from retrieval_server.request_bodies import ItemId, JsonBody, List, Query, User
from retrieval_server.settings import Settings

MAX_EXPLORED = 100
"""Largest k of a search that is explored."""
_NO_ROOM = (
    "The marks cannot be stored: the disk is full, or there are as many marks as the server keeps."
    " Nothing was stored. Its operator can make room; searches go on."
)
_NOT_KEPT = "The marks cannot be stored at the moment. The server's log says why."
_SEARCH_SECONDS = 1.0
"""Time that a mark waits for its search, which another process may be about to write."""
_WRITE_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_EXPIRE_SECONDS = 600.0
_WAITING_SEARCHES = 10_000
_CANDIDATES = 100
"""Least number of the incumbent's nearest items that a challenger ranks."""


MarkedIds = Annotated[
    List[ItemId], Field(max_length=1000, description="a list of at most 1,000 ids of hits")
]


class FeedbackBody(JsonBody):
    """Marks on the hits of a search."""

    search_id: Annotated[
        str,
        Field(pattern="^[A-Za-z0-9_-]{22}$", description="the search_id of an answer"),
    ]
    liked: MarkedIds = Field(default_factory=list)
    disliked: MarkedIds = Field(default_factory=list)
    clicked: MarkedIds = Field(default_factory=list)
    user: User = None

    def marks(self) -> dict[str, int]:
        """Return the mark of each item; raise a RequestError 400 if they contradict each other."""
        if both := set(self.liked) & set(self.disliked):
            raise RequestError(400, f"{min(both)[:80]!a} is both liked and disliked.")
        marks = dict.fromkeys(self.clicked, CLICKED)
        marks |= dict.fromkeys(self.disliked, DISLIKED) | dict.fromkeys(self.liked, LIKED)
        if not marks:
            raise RequestError(400, 'Nothing is marked: send "liked", "disliked" or "clicked".')
        if len(marks) > MAX_HITS:
            raise RequestError(400, f"At most {MAX_HITS:,} items may be marked at once.")
        return marks


class NotedHits(Hits):
    """Hits of a search that is noted, so that they can be marked.

    Attributes:
        search_id: id of the search.
        credits: credit of each hit for the challenger; () if the hits are not interleaved.
    """

    search_id = ""
    credits: tuple[float, ...] = ()


class Challenger(NamedTuple):
    """The challenger of an open trial, and the function of its head."""

    trial: Trial
    head: Callable[[Floats32], Floats32]


class Feedback:
    """Feedback on the searches of one index.

    A thread writes searches in batches, looks for an open trial, and deletes what has expired.

    Args:
        path: file of the feedback; it is created if it is missing.
        settings: settings of the server.

    Raises:
        StoreError: the file cannot be used.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._record = FeedbackRecord.open(path, create=True)
        self._settings = settings
        self._waiting: list[Search] = []
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)
        self._challengers: list[Challenger] = []
        self._broken: set[int] = set()
        self._reported = -60.0
        self._coin = secrets.SystemRandom()

    def start(self) -> None:
        """Start the thread."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        """Write the waiting searches and close the file."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self._attempt(self.write)
        self._record.close()

    # Searches

    def noted(
        self,
        bundle: Bundle,
        query: Query,
        queries: Any,
        answers: Sequence[Sequence[Hit]],
        challenger: Challenger | None = None,
    ) -> list[NotedHits]:
        """Return the answers of a request with the ids under which the searches are noted.

        Args:
            bundle: bundle that answered.
            query: the request.
            queries: its queries as the index took them; None if their vectors stand for examples
                too, from which nothing can be learned.
            answers: the hits of each query.
            challenger: whose hits are interleaved.
        """
        adapter = bundle.manifest.adapter
        base = bundle.sha256 if adapter is None else adapter.base
        assert query.voter is not None
        vectors = None if queries is None else base_vectors(bundle, queries)
        now = time.time()
        noted = []
        for row, answer in enumerate(answers):
            hits = NotedHits(answer)
            hits.facets = getattr(answer, "facets", hits.facets)
            hits.search_id = _new_id(now)
            hits.credits = getattr(answer, "credits", ())
            item = None
            if queries is not None:
                item = query.inputs[row].id
            search = Search(
                id=hits.search_id,
                answered=now,
                voter=query.voter,
                base=base,
                served=bundle.sha256,
                query=vectors[row] if vectors is not None and item is None else None,
                item=item,
                hits=tuple(hit.id for hit in answer),
                challenger=challenger.trial.challenger if challenger is not None else "",
                credits=hits.credits,
            )
            # Without room, the search cannot be marked; it is answered all the same.
            if len(self._waiting) < _WAITING_SEARCHES:
                self._waiting.append(search)
            noted.append(hits)
        return noted

    def write(self) -> None:
        """Write the searches that wait.

        Raises:
            StoreError: they cannot be written. If others only hold the lock, they wait on.
        """
        with self._writing:
            searches = self._waiting[:]
            if not searches:
                return
            try:
                self._record.note_searches(searches)
            except StoreUnavailable:
                raise
            except StoreError:
                del self._waiting[: len(searches)]
                raise
            del self._waiting[: len(searches)]

    # Marks

    async def wait_for(self, search_id: str, run: Callable[..., Awaitable[bool]]) -> None:
        """Wait until a search is in the file; another process may be about to write it.

        Args:
            search_id: id of the search.
            run: calls a function in a thread.

        Raises:
            RequestError: 404 if there is no such search after a second.
            StoreError: the file cannot be used.
        """

        def knows() -> bool:
            self.write()
            return self._record.knows(search_id)

        end = time.monotonic() + _SEARCH_SECONDS
        while not await run(knows):
            if time.monotonic() > end:
                raise RequestError(
                    404,
                    "This search is not known: it has expired, was forgotten, or was answered by"
                    " another server.",
                )
            await asyncio.sleep(_SEARCH_SECONDS / 10)

    def add(self, search_id: str, voter: str, marks: Mapping[str, int]) -> int:
        """Write marks; see `FeedbackRecord.add`."""
        return self._record.add(search_id, voter, marks)

    # Exploring

    def challenger_for(self, bundle: Bundle, query: Query) -> Challenger | None:
        """Return the challenger if a request is to be explored, as a coin decides.

        Only one plain search is explored, perhaps with a filter, of at most `MAX_EXPLORED` hits. If
        two trials are open, `Trial.share` divides such searches among them.
        """
        if not self._challengers:
            return None
        options = query.options
        if len(query.inputs) != 1 or options.k > MAX_EXPLORED or options.candidates is not None:
            return None
        if self._coin.random() >= self._settings.explore:
            return None
        for challenger in self._challengers:
            trial = challenger.trial
            if trial.incumbent == bundle.sha256 and self._coin.random() < trial.share:
                return challenger
        return None

    def explored(
        self, index: Index, challenger: Challenger, queries: Any, query: Query
    ) -> list[Hit] | None:
        """Return the hits of a search, interleaved with those of a challenger.

        The challenger ranks the incumbent's nearest items. Distances stay the incumbent's. Returns
        None if the challenger cannot rank them, such as for a vector whose base vector is unknown.
        """
        bundle = index.bundle
        vectors = base_vectors(bundle, queries)
        if vectors is None:
            return None
        k = query.options.k
        query_id = query.inputs[0].id
        depth = max(_CANDIDATES, 10 * k)
        depth += query_id is not None
        nearest = index.search(queries, depth, text=query.texts, filter=query.filter)[0]
        hits = {hit.id: hit for hit in nearest if hit.id != query_id}
        items = index.get(hits, arrays=True)
        # The arrays may belong to the new bundle.
        if index.follow() is not bundle:
            raise Superseded("Another bundle is served.")
        name = VECTOR if bundle.manifest.adapter is None else BASE
        ids = [id for id in hits if id in items and name in items[id].arrays]
        rows = np.stack([vectors[0], *(items[id].arrays[name] for id in ids)])
        try:
            learned = challenger.head(rows)
        except Exception as error:  # ONNX Runtime's errors share no public base class
            report(error)
            self._broken.add(challenger.trial.n)
            self._challengers = []
            return None
        distances = ((learned[1:] - learned[0]).astype(np.float64) ** 2).sum(axis=1)
        ranking = [ids[row] for row in np.argsort(distances, kind="stable").tolist()]
        coin = self._coin
        chosen, credits = team_draft(list(hits), ranking, k, lambda: coin.random() < 0.5)
        answer = NotedHits(hits[id] for id in chosen)
        answer.credits = credits
        return answer

    # The thread

    def _run(self) -> None:
        looked = expired = time.monotonic() - _EXPIRE_SECONDS
        while not self._stop.wait(_WRITE_SECONDS):
            self._attempt(self.write)
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self._look()
            if now - expired >= _EXPIRE_SECONDS:
                expired = now
                self._attempt(self._expire)

    def _look(self) -> None:
        """Take up the trials that are open now."""

        def look() -> None:
            heads = {challenger.trial.n: challenger.head for challenger in self._challengers}
            challengers = []
            for trial in self._record.open_trials():
                if not trial.explore or trial.tainted or trial.n in self._broken:
                    continue
                # If the head cannot be loaded, it is not tried again.
                self._broken.add(trial.n)
                head = heads.get(trial.n) or load_head(trial.head)
                self._broken.remove(trial.n)
                challengers.append(Challenger(trial, head))
            self._challengers = challengers

        if self._settings.explore:
            self._attempt(look)

    def _expire(self) -> None:
        self._record.expire(self._settings.keep_searches, self._settings.keep_marks)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Run a function; log an error, once a minute at most."""
        try:
            work()
        except RetrievalError as error:
            now = time.monotonic()
            if now - self._reported >= 60:
                self._reported = now
                report(error)


def not_kept(error: StoreError) -> RequestError:
    """Log why marks cannot be stored, and return the error for the client."""
    if not isinstance(error, NoRoom):
        return store_failed(error, _NOT_KEPT)
    report(error)
    return RequestError(503, _NO_ROOM, "disk")


def base_vectors(bundle: Bundle, queries: Any) -> Floats32 | None:
    """Return the vectors (Q, P) of queries before the bundle's adapter, or None if unknown."""
    if isinstance(queries, Encoded):
        return queries.query if bundle.manifest.adapter is None else queries.base
    if bundle.manifest.adapter is not None:
        return None
    return np.atleast_2d(np.asarray(queries, np.float32))


def _new_id(now: float) -> str:
    """Return an id of 22 characters with 80 random bits, which nobody can guess.

    It begins with the time: the record's index of ids then grows at one end. With ids in random
    order, writing a search takes half as much time again.
    """
    moment = int(1000 * now).to_bytes(6, "big")
    return urlsafe_b64encode(moment + os.urandom(10))[:22].decode()


def voter_of(key: str, user: str | None) -> str:
    """Return the voter of a request: the name of its key and, after "/", its user."""
    if user is None:
        return key
    return f"{key}/{user}"
