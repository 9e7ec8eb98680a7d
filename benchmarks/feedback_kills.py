"""Kill a server that takes feedback, again and again, and compare its file with what was
acknowledged.

    # writes results/raw/feedback_kills.json and results/feedback_kills.md
    python benchmarks/feedback_kills.py --count 200 --seed 0

Four clients search scikit-learn's digits over HTTP and mark hits of their searches, each one after
the other; some marks change earlier ones. SIGKILL ends the server at a random moment. Then the file
is compared with what the clients know: every acknowledged mark must be there, with the value that
was acknowledged last, once; a request without an answer may have stored all of its marks or none.
The next server gets the requests without an answer again, and must count only what is new.

Only the process dies. The system lives, and keeps everything that it was given to write.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval.cli.app import main as run_command
from retrieval.feedback.record import DISLIKED, FEEDBACK_FILE, LIKED, FeedbackRecord

import living_model as living
from bench import machine, one_thread, page
from scaled_bundle import make_bundle, make_index

CLIENTS = 4
SHOWN = 10
Key = tuple[str, str, str]
"""Id of a search, voter and item."""
WORDS = {"liked": LIKED, "disliked": DISLIKED}


@dataclass
class Voter:
    """What one client knows of its marks.

    Attributes:
        marks: acknowledged marks.
        doubtful: the last request, if it has no answer.
        acknowledged: number of acknowledged requests.
        lost: number of searches without marks that a killed server had not written.
    """

    name: str
    chance: random.Random
    marks: dict[Key, int] = field(default_factory=dict)
    doubtful: dict[str, Any] | None = None
    acknowledged: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    searches: list[tuple[str, list[str]]] = field(default_factory=list)

    def changed(self, body: dict[str, Any]) -> dict[Key, int]:
        """Return the marks of a request."""
        return {
            (body["search_id"], f"/{self.name}", item): mark
            for word, mark in WORDS.items()
            for item in body[word]
        }

    def work(self, port: int, vectors: Any) -> None:
        """Search and mark until the server is gone."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            if self.doubtful is not None:
                self._mark(connection, self.doubtful)
            while True:
                if not self.searches or self.chance.random() < 0.7:
                    vector = vectors[self.chance.randrange(len(vectors))].tolist()
                    found = ask(connection, "search", {"vector": vector, "k": SHOWN})
                    hits = [hit["id"] for hit in found["results"]]
                    self.searches.append((found["search_id"], hits))
                search_id, hits = self.chance.choice(self.searches[-5:])
                marked = self.chance.sample(hits, self.chance.randint(1, 5))
                cut = self.chance.randint(0, len(marked))
                body = {"search_id": search_id, "liked": marked[:cut], "disliked": marked[cut:]}
                self._mark(connection, body | {"user": self.name})
        except (OSError, http.client.HTTPException):
            connection.close()

    def _mark(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
        self.doubtful = body
        answer = ask(connection, "feedback", body)
        if answer is None:
            # The server was killed before it had written this search.
            if any(search == body["search_id"] for search, _, _ in self.marks):
                self.wrong.append(f"the search of {body} is lost, which had marks")
            self.searches = [entry for entry in self.searches if entry[0] != body["search_id"]]
            self.doubtful = None
            self.lost += 1
            return
        counted = answer["counted"]
        new = {key: mark for key, mark in self.changed(body).items() if self.marks.get(key) != mark}
        if counted != len(new):
            self.wrong.append(f"{body} counted {counted}, not {len(new)}")
        self.marks |= new
        self.doubtful = None
        self.acknowledged += 1

    def settle(self, kept: dict[Key, int]) -> str:
        """Compare the client's marks with the file's; return what became of the last request."""
        own = {key: mark for key, mark in kept.items() if key[1] == f"/{self.name}"}
        if self.doubtful is None:
            if own != self.marks:
                self.wrong.append(f"{self.name}: {difference(own, self.marks)}")
            self.marks = own
            return "no request ran"
        after = self.marks | self.changed(self.doubtful)
        if own not in (self.marks, after):
            self.wrong.append(f"{self.name}: {difference(own, self.marks)}")
        outcome = "same either way"
        if after != self.marks:
            outcome = "there" if own == after else "not there"
        self.marks = own
        return outcome


def difference(kept: dict[Key, int], known: dict[Key, int]) -> str:
    """Return a few of the marks that differ."""
    return str(sorted(set(kept.items()) ^ set(known.items()))[:3])


def ask(connection: http.client.HTTPConnection, route: str, body: dict[str, Any]) -> Any:
    """Return the answer to a request, or None if it names an unknown search.

    Raises:
        RuntimeError: the answer is another error.
    """
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/{route}", json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise RuntimeError(content.decode())
    return json.loads(content)


@contextmanager
def server(index: Path) -> Iterator[tuple[int, int]]:
    """Fork a server; yield its process and port."""
    read, write = os.pipe()
    if not (process := os.fork()):
        os.dup2(write, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["retrieval", "serve", str(index), "--port", "0", "--feedback"]
        run_command()
        os._exit(1)
    os.close(write)
    try:
        with os.fdopen(read) as output:
            line = output.readline()
            port = re.search(r":(\d+)/", line)
            assert port is not None, line
            yield process, int(port[1])
    finally:
        os.waitpid(process, 0)


def kept_marks(index: Path) -> tuple[dict[Key, int], list[str]]:
    """Return the marks in the file, and what is wrong with it."""
    with FeedbackRecord.open(index / FEEDBACK_FILE) as record:
        entries = record.judged()
        count = record.counts()["marks"]
    rows = [
        ((entry.search.id, voter, item), mark)
        for entry in entries
        for voter, marks in entry.marks.items()
        for item, mark in marks.items()
    ]
    wrong = []
    if not len(rows) == len(dict(rows)) == count:
        wrong = [f"{len(rows)} marks, {len(dict(rows))} different ones, {count} counted"]
    return dict(rows), wrong


def kills(count: int, seed: int, folder: Path) -> list[living.Row]:
    """Kill as many servers of one index; return a row for each."""
    from sklearn.datasets import load_digits

    vectors = load_digits().data.astype("float32")
    make_bundle(folder / "bundle", vectors.shape[1], 1.0)
    make_index(folder / "index", folder / "bundle", vectors)
    chance = random.Random(seed)
    voters = [Voter(f"user{n}", random.Random(1000 * seed + n)) for n in range(CLIENTS)]
    rows: list[living.Row] = []
    for _ in range(count):
        begun = [(voter, voter.acknowledged) for voter in voters]
        with server(folder / "index") as (process, port):
            threads = [
                threading.Thread(target=voter.work, args=(port, vectors)) for voter in voters
            ]
            for thread in threads:
                thread.start()
            # The moment is random once all clients are at work.
            end = time.monotonic() + 60
            while (
                any(voter.acknowledged == count for voter, count in begun)
                and time.monotonic() < end
            ):
                time.sleep(0.01)
            time.sleep(chance.expovariate(2))
            os.kill(process, signal.SIGKILL)
        for thread in threads:
            thread.join()
        kept, wrong = kept_marks(folder / "index")
        outcomes = [voter.settle(kept) for voter in voters]
        wrong += [text for voter in voters for text in voter.wrong]
        if strangers := {voter for _, voter, _ in kept} - {f"/{voter.name}" for voter in voters}:
            wrong.append(f"marks of {strangers}")
        for voter in voters:
            voter.wrong = []
        acknowledged = sum(voter.acknowledged - count for voter, count in begun)
        rows.append(
            {
                "outcomes": outcomes,
                "wrong": wrong,
                "acknowledged": acknowledged,
                "marks": len(kept),
                "lost": sum(voter.lost for voter in voters),
            }
        )
        living.report(len(rows), rows[-1])
    return rows


def render(raw: living.Row) -> str:
    wrong = "\n".join(f"- {text}" for text in raw["wrong"][:50])
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(raw["outcomes"].items()))
    return page(f"""
        # A server that takes feedback and is killed

        `python benchmarks/feedback_kills.py --count {raw["kills"]} --seed {raw["seed"]}`;
        {raw["machine"]}.

        {raw["kills"]:,} servers were killed by SIGKILL at a random moment, while {CLIENTS} clients
        searched and marked hits. {raw["acknowledged"]:,} requests with marks were acknowledged.
        After each kill the file had every acknowledged mark once, with the value that was
        acknowledged last, and of a request without an answer all marks or none; the next server got
        these requests again and counted only what was new.

        **Differences: {len(raw["wrong"])}.** {raw["marks"]:,} marks at the end.

        The last request of each client at the kill: {outcomes} ("same either way": its marks were
        there already). {raw["lost"]} requests named a search that was answered just before a kill,
        had no mark yet and had not been written; the server promises to keep none of these, and
        answered 404.

        {wrong}
    """)


def main() -> None:
    options = living.run_arguments(__doc__, count=200).parse_args()
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        rows = kills(options.count, options.seed, Path(folder))
    raw = living.summary("kills", rows, options.seed)
    raw["acknowledged"] = sum(row["acknowledged"] for row in rows)
    raw |= {name: rows[-1][name] for name in ("marks", "lost")}
    outcomes = [outcome for row in rows for outcome in row["outcomes"]]
    raw["outcomes"] = {name: outcomes.count(name) for name in set(outcomes)}
    raw["machine"] = machine()
    living.conclude("feedback_kills", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
