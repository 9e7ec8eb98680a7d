"""The record of changes: its lines, and no change without a line."""

import errno
import json
import os
import platform
import pwd
import resource
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import wire
from limits import files_of_at_most
from retrieval.errors import RetrievalError
from retrieval.index.change_log import Audit, AuditUnavailable, Change
from retrieval.store.filters import as_filter

from retrieval_server.keys import add_key, new_key

VECTOR = {"vector": [0.25] * 16}


def change(what: str, ids=(), filter=None) -> Change:
    return Change(what, "i", "request-1", "shop", "write", "192.0.2.1", ids, filter)


def record(audit: Audit, id: str) -> None:
    """Record a change of one item."""
    with audit.recording(change("put", [id])):
        pass


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(path: Path) -> list[tuple[str, list[str]]]:
    return [(line["outcome"], line["ids"]) for line in lines(path)]


def test_both_lines_of_a_change_are_written_before_its_response(living, served, tmp_path):
    keys, audit = tmp_path / "keys", tmp_path / "audit.jsonl"
    sent, kept = new_key("importer", "write")
    add_key(keys, kept)
    client = served(living, "--keys", str(keys), "--audit", str(audit)).client
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    assert client.put("/v1/items/a", json=VECTOR).status_code == 401
    assert client.post("/v1/search", json=VECTOR).status_code == 401
    client.headers["Authorization"] = f"Bearer {sent}"
    assert client.post("/v1/search", json=VECTOR).status_code == 200
    assert lines(audit) == []
    answer = client.put("/v1/items/a", json=VECTOR)
    begun, done = lines(audit)
    assert answer.status_code == 200, answer.text
    assert (begun["outcome"], done["outcome"], done["count"]) == ("begun", "done", 1)
    who = {"key": "importer", "role": "write", "address": "127.0.0.1"}
    what = {"index": "i", "what": "put", "ids": ["a"], "ids_left_out": 0}
    for line in (begun, done):
        assert line | who | what | {"request": answer.headers["x-request-id"]} == line
    items = [{"id": f"n/{number}", "vector": [0.5] * 16} for number in range(100)]
    assert client.post("/v1/items", json={"items": items}).status_code == 200
    assert lines(audit)[-1]["count"] == 100 and lines(audit)[-1]["ids"][99] == "n/99"
    assert client.delete("/v1/items/a").status_code == 200
    assert (lines(audit)[-1]["what"], lines(audit)[-1]["count"]) == ("delete", 1)
    gone = client.post("/v1/delete", json={"filter": {"label": "3"}})
    assert gone.status_code == 200 and lines(audit)[-1]["count"] == gone.json()["deleted"] > 0
    assert lines(audit)[-1]["filter"] == "label = '3'"
    before = len(lines(audit))
    assert client.put("/v1/items/a", json={"vector": [0.25] * 15}).status_code == 422
    assert client.patch("/v1/items/new", json={"label": "x"}).status_code == 404
    last = lines(audit)[-1]
    assert (last["what"], last["outcome"]) == ("change", "failed")
    assert "no such item" in last["reason"]
    assert len(lines(audit)) == before + 2  # the invalid vector was refused before any change
    assert sent not in audit.read_text()


def test_commands_write_to_the_same_record(living, photos, tmp_path, cli, monkeypatch, bundle_path):
    audit = tmp_path / "audit.jsonl"
    assert cli("index", "delete", living, "3/0003.png", "nobody", "--audit", audit).code == 0
    begun, done = lines(audit)
    who = {"key": None, "role": None, "address": platform.node()}
    who["user"] = pwd.getpwuid(os.getuid()).pw_name
    what = {"index": living.name, "path": str(living), "what": "delete", "ids_left_out": 0}
    for line in (begun, done):
        assert line | who | what | {"ids": ["3/0003.png", "nobody"]} == line
    assert done["command"].startswith("retrieval index delete ") and done["count"] == 1
    assert begun["request"] == done["request"]
    monkeypatch.setenv("RETRIEVAL_AUDIT", str(audit))
    for verb, *arguments in (
        ("add", living, photos),
        ("migrate", living, bundle_path),
        ("rollback", living),
        ("snapshot", living, tmp_path / "copy"),
        ("restore", tmp_path / "copy", tmp_path / "restored.index"),
        ("create", tmp_path / "new.index", photos / "3", "--bundle", bundle_path),
    ):
        before = len(lines(audit))
        code = cli("index", verb, *arguments).code
        begun, done = lines(audit)[before:]
        assert (begun["what"], begun["outcome"]) == (verb, "begun")
        assert done["outcome"] == ("failed" if code else "done")
        if verb == "add":
            assert done["count"] == 1
    assert done["index"] == "new" and done["path"] == str(tmp_path / "new.index")
    assert cli("index", "delete", tmp_path / "none", "a").code == 2
    assert lines(audit)[-1]["outcome"] == "failed" and "none" in lines(audit)[-1]["reason"]
    before = len(lines(audit))
    assert cli("index", "list", living).code == 0 and len(lines(audit)) == before

    # No change without a line
    size = audit.stat().st_size
    with files_of_at_most(size):
        refused = cli("index", "delete", living, "1/0001.png")
    assert refused.code == 2 and "nothing is changed" in refused.err
    assert json.loads(cli("index", "show", living, "1/0001.png", "--json").out)["id"]


def test_a_full_disk_permits_no_change_and_rotation_loses_no_line(living, served, tmp_path):
    audit = tmp_path / "audit.jsonl"
    with audit.open("wb") as file:
        file.truncate(1_000_000_000)  # sparse, and larger than any file of the index
    server = served(living, "--open", "admin", "--audit", str(audit))
    client, size = server.client, audit.stat().st_size
    for room in (0, 10):  # nothing fits, and a part of a line
        bounds = (size + room, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, bounds)
        answer = client.put("/v1/items/a", json=VECTOR)
        assert answer.status_code == 503 and "nothing is changed" in answer.json()["detail"]
        assert client.delete("/v1/items/b").status_code == 503
        assert client.get("/v1/items/a").status_code == 404
        assert client.post("/v1/search", json=VECTOR).status_code == 200
        assert audit.stat().st_size == size
    for id, rotate in (
        ("a", lambda: os.truncate(audit, 0)),  # as logrotate's copytruncate does
        ("b", lambda: audit.rename(tmp_path / "audit.1")),
        ("d", audit.unlink),
    ):
        rotate()
        if id == "b":
            server.process.send_signal(signal.SIGHUP)  # as logrotate's postrotate does
        assert client.put(f"/v1/items/{id}", json=VECTOR).status_code == 200
        assert events(audit) == [("begun", [id]), ("done", [id])]
    assert "record of changes" in wire.log_of(server)


def test_lines_are_limited_in_length_and_never_mixed(tmp_path):
    audit = Audit(tmp_path / "a")
    ids = ["x" * 100_000, "line\nbreak", "\ud800", *map(str, range(5000))]
    with audit.recording(deleted := change("delete", ids)):
        deleted.count = 3
    filter = as_filter({"label": {"in": [str(number) * 50 for number in range(900)]}})
    with audit.recording(change("delete", filter=filter)):
        pass
    written = lines(tmp_path / "a")
    assert len(written) == 4 and all(len(json.dumps(line)) < 10_000 for line in written)
    assert len(written[0]["ids"]) == 100 and written[0]["ids_left_out"] == 4903
    with pytest.raises(ValueError, match="why"), audit.recording(change("put", ["a"])):
        raise ValueError("why")
    assert lines(tmp_path / "a")[-1]["reason"] == "ValueError"
    with (tmp_path / "a").open("a") as file:
        file.write('{"time": "cut off by a power')
    record(audit, "b")
    *_, cut, begun, done = (tmp_path / "a").read_text().splitlines()
    assert cut.endswith("power") and json.loads(begun)["ids"] == json.loads(done)["ids"] == ["b"]


def test_control_characters_and_direction_marks_are_escaped(tmp_path):
    odd = ["\x85", "\u2028", "\u202e", "\x7f", "\x9b", "\ud800", "\u2066"]
    audit, ids = Audit(tmp_path / "a.jsonl"), [f"é{sign}a" for sign in odd]
    with audit.recording(change("put", ids)):
        pass
    text = (tmp_path / "a.jsonl").read_text("utf-8")
    assert all(c.isprintable() or c == "\n" for c in text) and "é" in text
    assert [json.loads(line)["ids"] for line in text.split("\n")[:-1]] == [ids, ids]


def test_many_threads_and_processes_write_whole_lines(tmp_path):
    records = [Audit(tmp_path / "a") for _ in range(2)]  # one a process
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: record(records[number % 2], str(number)), range(80)))
    written = events(tmp_path / "a")
    assert len(written) == 160
    done = {ids[0] for outcome, ids in written if outcome == "done"}
    assert done == set(map(str, range(80)))


def test_a_failed_line_cuts_off_no_line_of_another_process(tmp_path, monkeypatch):
    path, fsync = tmp_path / "audit.jsonl", os.fsync
    failing, other = Audit(path), Audit(path)  # one a process
    with ThreadPoolExecutor(1) as pool:

        def fail(file: int) -> None:
            monkeypatch.setattr(os, "fsync", fsync)
            pool.submit(record, other, "b")
            time.sleep(0.3)
            raise OSError(errno.EIO, "a broken disk")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(AuditUnavailable):
            record(failing, "a")
    assert events(path) == [("begun", ["b"]), ("done", ["b"])]


def test_a_file_that_cannot_be_written_to_is_refused(tmp_path, cli, index_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "no" / "a", tmp_path, tmp_path / "pipe"):
        with pytest.raises(RetrievalError, match="cannot be written to"):
            Audit(path)
    outcome = cli("serve", index_path, "--port", "0", "--audit", tmp_path)
    assert outcome.code == 2 and "record of changes" in outcome.err
    audit, done = Audit(tmp_path / "a"), []
    with (
        files_of_at_most(0),
        pytest.raises(AuditUnavailable, match="cannot be written, so nothing"),
        audit.recording(change("put", ["a"])),
    ):
        done.append("changed")
    assert not done and not (tmp_path / "a").read_bytes()
