"""Feedback over HTTP: searches are noted, marks are durable, and some searches are explored."""

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client
from retrieval.errors import DataError, ServerError
from retrieval.feedback.feedback_record import (
    CLICKED,
    DISLIKED,
    FEEDBACK_FILE,
    LIKED,
    FeedbackRecord,
    Trial,
)
from retrieval.feedback.interleaving import team_draft
from retrieval.index.adapter_bundles import make_adapter_bundle
from retrieval.index.index import open_index

from retrieval_engines.testing.small_bundles import linear_head
from retrieval_server.keys import add_key, new_key

WIDTH = 16
VECTOR = [0.25] * WIDTH
UNKNOWN = "A" * 22


def record_of(index: Path) -> FeedbackRecord:
    return FeedbackRecord.open(index / FEEDBACK_FILE)


def ids_of(answer: dict) -> list[str]:
    return [hit["id"] for hit in answer["results"]]


def search(client, **body) -> dict:
    answer = client.post("/v1/search", json={"vector": VECTOR, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def mark(client, status: int = 200, **body) -> dict:
    answer = client.post("/v1/feedback", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_every_search_is_noted_and_its_hits_can_be_marked(served, living, photos):
    client = served(living, "--feedback").client
    image = (photos / "3" / "0003.png").read_bytes()
    queries = {
        "vector": search(client, k=3),
        "id": client.post("/v1/search", json={"id": "3/0003.png", "k": 3}).json(),
        "image": client.post("/v1/search", files={"image": image}, data={"k": "3"}).json(),
        "grouped": search(client, k=3, group_by="label", facets=["label"]),
        "liked": search(client, k=3, like=["3/0003.png"]),
    }
    bodies = [{"id": "3/0003.png"}, {"id": "0/0000.png"}]
    batch = client.post("/v1/search/batch", json={"queries": bodies, "k": 3}).json()
    queries |= {f"batch {place}": answer for place, answer in enumerate(batch["answers"])}
    assert queries["grouped"]["facets"] and "explored" not in queries["vector"]
    assert len({answer["search_id"] for answer in queries.values()}) == 7
    for answer in queries.values():
        first, second, third = ids_of(answer)
        marks = {"liked": [first], "disliked": [second], "clicked": [third, first]}
        assert mark(client, search_id=answer["search_id"], **marks) == {"counted": 3}
        assert mark(client, search_id=answer["search_id"], **marks) == {"counted": 0}
    with record_of(living) as record, open_index(living, threads=1) as index:
        noted = {entry.search.id: entry for entry in record.judged()}
        assert len(noted) == 7 and record.counts()["searches"] == 7
        for name, answer in queries.items():
            entry = noted[answer["search_id"]]
            assert list(entry.search.hits) == ids_of(answer)
            first, second, third = ids_of(answer)
            assert entry.marks == {"": {first: LIKED, second: DISLIKED, third: CLICKED}}
            assert entry.search.base == entry.search.served == index.bundle.sha256
            item = {"id": "3/0003.png", "batch 0": "3/0003.png", "batch 1": "0/0000.png"}
            assert entry.search.item == item.get(name)
        for name in ("vector", "grouped"):
            vector = noted[queries[name]["search_id"]].search.query
            assert vector.tolist() == VECTOR
        encoded = index.bundle.encode_image(photos / "3" / "0003.png").vector[0]
        np.testing.assert_array_equal(noted[queries["image"]["search_id"]].search.query, encoded)
        for name in ("id", "liked", "batch 0"):
            assert noted[queries[name]["search_id"]].search.query is None


def test_a_client_gives_feedback(served, living):
    url = served(living, "--feedback").url
    with Client(url) as client:
        hits = client.search(vector=VECTOR, k=3, user="ann")
        assert client.feedback(hits.search_id, liked=hits[0].id, user="ann") == 1
        marks = {"liked": [hits[0].id], "clicked": (hits[1].id,)}
        assert client.feedback(hits.search_id, **marks, user="ann") == 1
        assert client.feedback(hits.search_id, **marks, user="bob") == 2
        (answer,) = client.search_batch(ids=[hits[0].id], k=1).answers
        assert len(answer.search_id) == 22 and answer.explored is None
        assert client.index().feedback is True
        with pytest.raises(DataError, match="at least one hit"):
            client.feedback(hits.search_id)
        with pytest.raises(DataError, match="takes no feedback"):
            client.feedback(None, liked="a")
        with pytest.raises(ServerError, match="This search is not known") as fault:
            client.feedback(UNKNOWN, liked="a")
        assert fault.value.status == 404
    with record_of(living) as record:
        (entry,) = record.judged()
        assert entry.search.voter == "/ann" and set(entry.marks) == {"/ann", "/bob"}


def test_feedback_is_off_unless_it_is_asked_for(shared, index_path):
    client = shared(index_path).client
    assert "search_id" not in search(client, user="ann")
    detail = mark(client, 403, search_id=UNKNOWN, liked=["a"])["detail"]
    assert "--feedback" in detail or "read-only" in detail
    assert client.get("/v1/index").json()["feedback"] is False
    assert not (index_path / FEEDBACK_FILE).exists()


def test_a_mark_that_cannot_be_is_refused_in_a_sentence(served, living):
    client = served(living, "--feedback").client
    answer = search(client, k=3)
    first, second, _ = ids_of(answer)
    known = {"search_id": answer["search_id"]}
    for status, body, sentence in (
        (404, {"search_id": UNKNOWN, "liked": [first]}, "This search is not known"),
        (400, {"search_id": "short", "liked": [first]}, '"search_id" must be the search_id of'),
        (400, {"liked": [first]}, "JSON must be an object of"),
        (400, known, "Nothing is marked"),
        (400, {**known, "liked": [first], "disliked": [first]}, "both liked and disliked"),
        (400, {**known, "liked": first}, '"liked" must be a list of at most 1,000 ids'),
        (400, {**known, "liked": [first] * 1001}, '"liked" must be a list of at most 1,000 ids'),
        (400, {**known, "liked": [first], "user": "u" * 65}, '"user" must be text of 1 to 64'),
        (400, {**known, "liked": [first], "other": 1}, "JSON must be an object of"),
        (422, {**known, "liked": ["stranger"]}, "Not among the hits"),
        (422, {**known, "liked": [first], "clicked": ["stranger"]}, "Not among the hits"),
    ):
        problem = mark(client, status, **body)
        assert sentence in problem["detail"] and problem["status"] == status, problem
    many = {"liked": [f"a{n}" for n in range(900)], "clicked": [f"b{n}" for n in range(900)]}
    assert "At most 1,000 items" in mark(client, 400, **known, **many)["detail"]
    for text in (r'{"search_id": "%s", "liked": ["\ud800"]}', r'{"search_id": "%s", "liked": NaN}'):
        content = text.replace("%s", answer["search_id"]).encode()
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/feedback", content=content, headers=headers).status_code == 400
    assert client.post("/v1/feedback?k=1", json=known).status_code == 400
    assert client.post("/v1/feedback", data=known).status_code == 415
    with record_of(living) as record:
        assert record.counts()["marks"] == 0
    assert mark(client, **known, disliked=[second]) == {"counted": 1}


def test_keys_and_users_are_voters_and_a_key_may_give_feedback_without_writing(served, living):
    keys = living.parent / "keys.jsonl"
    headers = {}
    for role in ("read", "feedback", "write"):
        sent, kept = new_key(f"the-{role}-key", role)
        add_key(keys, kept)
        headers[role] = {"Authorization": f"Bearer {sent}"}
    audit = living.parent / "audit.jsonl"
    client = served(living, "--feedback", "--keys", str(keys), "--audit", str(audit)).client

    def post(role, path, **body):
        return client.post(path, json=body, headers=headers[role])

    answer = post("read", "/v1/search", vector=VECTOR, k=2).json()
    first, second = ids_of(answer)
    body = {"search_id": answer["search_id"], "liked": [first]}
    refused = post("read", "/v1/feedback", **body)
    assert refused.status_code == 403
    assert "marking hits need a key with the role feedback" in refused.json()["detail"]
    assert post("feedback", "/v1/feedback", **body).json() == {"counted": 1}
    assert post("feedback", "/v1/feedback", **body, user="ann").json() == {"counted": 1}
    assert post("write", "/v1/feedback", **body, clicked=[second]).json() == {"counted": 2}
    assert post("feedback", "/v1/delete", filter="label = '3'").status_code == 403
    with record_of(living) as record:
        (entry,) = record.judged()
        assert entry.search.voter == "the-read-key"
        voters = {"the-feedback-key", "the-feedback-key/ann", "the-write-key"}
        assert set(entry.marks) == voters
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    done = [line for line in lines if line["what"] == "feedback" and line["outcome"] == "done"]
    assert [line["count"] for line in done] == [1, 1, 2] and first not in audit.read_text()


def begin(index: Path, **changes) -> tuple[Trial, Bundle]:
    """Open a trial of another metric over an index; return it and the served bundle."""
    with open_index(index, threads=1) as opened:
        bundle = opened.bundle
        adapter = bundle.manifest.adapter
        width = bundle.manifest.vector if adapter is None else adapter.width
        base = bundle.sha256 if adapter is None else adapter.base
    fields = {"kind": "challenge", "base": base, "challenger": "c" * 64, "learner": "diagonal"}
    fields |= {"head": linear_head(width, 5, seed=3), "incumbent": bundle.sha256, "alpha": 0.025}
    trial = Trial(**{**fields, "cutoff": 0, "explore": True, **changes})
    with FeedbackRecord.open(index / FEEDBACK_FILE, create=True) as record:
        return record.begin_trial(trial), bundle


def rankings(index: Path, trial: Trial, query: np.ndarray, depth: int = 100):
    """Return the ids nearest to a query, and these as a trial's head orders them."""
    import onnxruntime

    with open_index(index, threads=1) as opened:
        hits = opened.search(query, depth)
        vectors = np.stack([opened.vector(hit.id) for hit in hits])
    session = onnxruntime.InferenceSession(trial.head)
    rows = np.vstack([query[None], vectors]).astype(np.float32)
    (learned,) = session.run(["vector"], {"input": rows})
    order = np.linalg.norm(learned[1:].astype(float) - learned[0], axis=1).argsort(kind="stable")
    ids = [hit.id for hit in hits]
    return ids, [ids[place] for place in order], {hit.id: hit.distance for hit in hits}


def drafts(incumbent: list[str], challenger: list[str]) -> list[tuple[list[str], tuple]]:
    """Return all interleaved pages of ten hits, with their credits."""
    pages = []
    for coins in itertools.product((True, False), repeat=5):
        tosses = iter(coins)
        pages.append(team_draft(incumbent, challenger, 10, lambda tosses=tosses: next(tosses)))
    return pages


def test_a_share_of_plain_searches_is_interleaved_while_a_trial_is_open(served, living):
    trial, _ = begin(living)
    client = served(living, "--feedback", "--explore", "0.5").client
    query = np.random.default_rng(0).normal(size=WIDTH).astype(np.float32)
    incumbent, challenger, distances = rankings(living, trial, query)
    assert incumbent[:10] != challenger[:10]
    answers = [search(client, vector=query.tolist(), k=10) for _ in range(60)]
    explored = [answer for answer in answers if answer.get("explored")]
    assert 15 <= len(explored) <= 45
    for answer in answers:
        for hit in answer["results"]:
            assert hit["distance"] == pytest.approx(distances[hit["id"]], rel=1e-6)
        if not answer.get("explored"):
            assert ids_of(answer) == incumbent[:10]
        mark(client, search_id=answer["search_id"], liked=ids_of(answer)[:1])
    with record_of(living) as record:
        noted = {entry.search.id: entry.search for entry in record.judged()}
    for answer in answers:
        kept = noted[answer["search_id"]]
        assert bool(kept.credits) == bool(kept.challenger) == bool(answer.get("explored"))
        if kept.credits:
            assert kept.challenger == trial.challenger
            assert (ids_of(answer), kept.credits) in drafts(incumbent, challenger)
    # Neither what is more than plain nor several at once is explored.
    for body in ({"k": 101}, {"group_by": "label"}, {"offset": 1}, {"diversity": 0.5}):
        assert not any(search(client, **body).get("explored") for _ in range(12)), body
    batch = client.post("/v1/search/batch", json={"queries": [{"vector": VECTOR}] * 12}).json()
    assert not any(answer.get("explored") for answer in batch["answers"])
    # An item that is the query is no hit of its own, and a filter holds.
    for _ in range(12):
        body = {"id": "3/0003.png", "filter": "label = '3'"}
        answer = client.post("/v1/search", json=body).json()
        assert len(answer["results"]) == 10 and "3/0003.png" not in ids_of(answer)
        assert {hit["label"] for hit in answer["results"]} == {"3"}
    with record_of(living) as record:
        record.close_trial(trial.n, "refused", {})
    time.sleep(2)
    assert not any(search(client).get("explored") for _ in range(12))


def test_a_watch_gets_few_searches_until_it_raises_a_suspicion(served, living):
    watch, _ = begin(living, kind="watch", challenger="a" * 64)
    begin(living)
    client = served(living, "--feedback", "--explore", "1").client
    for least, most in ((3, 30), (60, 60)):
        answers = [search(client) for _ in range(60)]
        assert all(answer["explored"] for answer in answers)
        for answer in answers:
            mark(client, search_id=answer["search_id"], liked=ids_of(answer)[:1])
        ids = {answer["search_id"] for answer in answers}
        with record_of(living) as record:
            of_watch = [
                entry.search.challenger == watch.challenger
                for entry in record.judged()
                if entry.search.id in ids
            ]
            assert least <= sum(of_watch) <= most
            record.note_evidence(watch.n, {"wealth": 2.5})
        time.sleep(2)


@pytest.mark.parametrize("why", ["share", "asked", "incumbent", "tainted", "broken"])
def test_a_search_is_not_explored_if_the_trial_or_the_operator_says_so(why, served, living):
    changes = {"asked": {"explore": False}, "incumbent": {"incumbent": "d" * 64}}
    changes["broken"] = {"head": linear_head(WIDTH + 1, 5)}
    begin(living, **changes.get(why, {}))
    if why == "tainted":
        with record_of(living) as record, record._writing() as writing:
            writing.execute("update trials set tainted = 1")
    client = served(living, "--feedback", "--explore", "0" if why == "share" else "1").client
    plain = [search(client) for _ in range(5)]
    assert not any(answer.get("explored") for answer in plain)
    assert all(ids_of(answer) == ids_of(plain[0]) for answer in plain)


def test_a_search_for_words_is_noted_and_not_explored(served, living):
    begin(living)
    with open_index(living) as index:
        index.keep_words(progress=False)
    client = served(living, "--feedback", "--explore", "1").client
    answer = client.post("/v1/search", json={"text": "3", "k": 5}).json()
    assert "explored" not in answer and {hit["label"] for hit in answer["results"]} == {"3"}
    mark(client, search_id=answer["search_id"], liked=ids_of(answer)[:1])
    assert search(client)["explored"]


def test_an_adapter_is_explored_over_the_vectors_of_its_base(served, living, photos, tmp_path):
    with open_index(living, threads=1) as index:
        base = index.bundle
        head = linear_head(WIDTH, 5, seed=1)
        adapter = Bundle.open(make_adapter_bundle(base, head, tmp_path / "adapter"), threads=1)
        index.migrate(adapter, progress=False)
    # The challenger is the base itself.
    _, bundle = begin(living, head=None)
    assert bundle.sha256 == adapter.sha256
    client = served(living, "--feedback", "--explore", "1").client
    image = photos / "3" / "0003.png"
    answer = client.post("/v1/search", files={"image": image.read_bytes()}).json()
    assert answer["explored"] and answer["results"][0]["distance"] == pytest.approx(0, abs=1e-3)
    by_id = client.post("/v1/search", json={"id": "3/0003.png"}).json()
    assert by_id["explored"]
    # The base vector of a vector of the adapter is unknown.
    assert not search(client, vector=[0.5] * 5).get("explored")
    for entry in (answer, by_id):
        mark(client, search_id=entry["search_id"], liked=ids_of(entry)[:1])
    with record_of(living) as record:
        first, second = record.judged(base.sha256)
    np.testing.assert_array_equal(first.search.query, base.encode_image(image).vector[0])
    assert second.search.item == "3/0003.png" and second.search.query is None
    with open_index(living, threads=1) as index:
        nearest = [hit.id for hit in index.search(image, 101)]
        vectors = {id: item.arrays["base"] for id, item in index.get(nearest, arrays=True).items()}
    query = base.encode_image(image).vector[0]
    distances = {id: np.square(vectors[id] - query, dtype=float).sum() for id in nearest}
    for entry, own in ((first, []), (second, ["3/0003.png"])):
        incumbent = [id for id in nearest if id not in own][:100]
        challenger = sorted(incumbent, key=distances.__getitem__)
        assert incumbent[:10] != challenger[:10]
        shown = (list(entry.search.hits), entry.search.credits)
        assert shown in drafts(incumbent, challenger)


def test_a_full_disk_refuses_marks_and_searches_go_on(served, living, tmp_path, mount):
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    server = served(living, "--feedback-file", str(disk / "marks.sqlite"))
    client = server.client
    acknowledged = []
    answer = search(client, k=3)
    mark(client, search_id=answer["search_id"], liked=ids_of(answer)[:1])
    acknowledged.append(answer["search_id"])
    known = search(client, k=3)
    time.sleep(0.5)  # so that this search is written
    free = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    refused = 0
    for number in range(300):
        problem = client.post(
            "/v1/feedback",
            json={"search_id": known["search_id"], "liked": ids_of(known), "user": f"u{number}"},
        )
        if problem.status_code == 503:
            assert "the disk is full" in problem.json()["detail"]
            assert str(disk) not in problem.text
            refused += 1
            break
        assert problem.status_code == 200, problem.text
    assert refused
    assert len(search(client, k=3)["results"]) == 3  # and its note is lost
    (disk / "ballast").unlink()
    answer = search(client, k=3)
    assert mark(client, search_id=answer["search_id"], liked=ids_of(answer)) == {"counted": 3}
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(15)
    with FeedbackRecord.open(disk / "marks.sqlite") as record:
        assert {acknowledged[0], answer["search_id"]} <= {e.search.id for e in record.judged()}


def test_a_damaged_file_is_named_before_anything_is_served(cli, living):
    (living / FEEDBACK_FILE).write_bytes(b"a letter to a friend\n" * 1000)
    for options in ((), ("--processes", "2")):
        done = cli("serve", living, "--port", "0", "--feedback", *options)
        assert done.code == 2 and str(living / FEEDBACK_FILE) in done.err
        assert "Traceback" not in done.err
    both = cli("serve", f"a={living}", f"b={living}", "--port", "0", "--feedback-file", "f.sqlite")
    assert both.code == 2 and "cannot hold the feedback of several indexes" in both.err


def test_several_indexes_have_a_file_each(served, living, index_path, tmp_path):
    import shutil

    other = Path(shutil.copytree(index_path, tmp_path / "other"))
    client = served(living, str(other), "--feedback").client
    for name, path in (("i", living), ("other", other)):
        answer = client.post(f"/v1/indexes/{name}/search", json={"vector": VECTOR, "k": 2}).json()
        body = {"search_id": answer["search_id"], "liked": ids_of(answer)}
        done = client.post(f"/v1/indexes/{name}/feedback", json=body)
        assert done.json() == {"counted": 2}
        with record_of(path) as record:
            assert [entry.search.id for entry in record.judged()] == [answer["search_id"]]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_acknowledged_survives_sigkill_of_a_busy_server(processes, served, living):
    server = served(living, "--feedback", "--processes", str(processes))
    acknowledged: set[tuple[str, str]] = set()
    sent: set[tuple[str, str]] = set()

    def work(number: int) -> None:
        import httpx

        with httpx.Client(base_url=server.url, timeout=5) as client:
            while True:
                try:
                    answer = client.post("/v1/search", json={"vector": VECTOR, "k": 5}).json()
                    id, hits = answer["search_id"], ids_of(answer)
                    sent.update((id, hit) for hit in hits)
                    body = {"search_id": id, "clicked": hits, "user": str(number)}
                    if client.post("/v1/feedback", json=body).status_code == 200:
                        acknowledged.update((id, hit) for hit in hits)
                except (httpx.HTTPError, ValueError, KeyError):
                    return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for process in (pid, *map(int, children)):
        os.kill(process, signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    with record_of(living) as record:
        kept = {
            (entry.search.id, item)
            for entry in record.judged()
            for marks in entry.marks.values()
            for item in marks
        }
        assert acknowledged <= kept <= sent and len(acknowledged) > 50
        assert record.counts()["marks"] == len(kept)
