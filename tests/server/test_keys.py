"""API keys: their file, the command `keys`, and how a server recognises a key."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from retrieval.errors import RetrievalError

from retrieval_server import keys as module
from retrieval_server.keys import (
    Keys,
    KeySource,
    add_key,
    key_source,
    new_key,
    parse_keys,
    read_keys,
    remove_key,
)


def test_a_key_is_recognised_and_nothing_else():
    sent, kept = new_key("shop", "read")
    other, _ = new_key("other", "read")
    keys = Keys([kept])
    assert keys.find(sent) == kept
    id, secret = sent.split("_", 2)[1:]
    near = (sent[:-1], f"{sent}A", f"{sent}\n", f" {sent}", sent.upper(), kept.hash)
    forged = (f"rk_{id}_{'A' * 43}", f"rk_{id}_", f"rk_{'0' * 12}_{secret}", "rk__")
    for wrong in (other, *near, *forged, "", "é" * 43, "x" * 100_000):
        assert keys.find(wrong) is None, wrong
    again = new_key("shop", "read")[1]
    assert again.salt != kept.salt and again.hash != kept.hash
    assert secret not in kept.model_dump_json() and len(secret) == 43


def test_the_command_adds_lists_and_removes_keys(cli, tmp_path):
    path = tmp_path / "keys.jsonl"
    fresh = cli("keys", "add", "shop", "--output", path)
    options = ("--role", "write", "--index", "photos", "--index", "shoes", "-o", path)
    limited = cli("keys", "add", "importer", *options)
    assert (fresh.code, limited.code) == (0, 0), limited.err
    sent = fresh.out.strip()
    assert "\n" not in sent and sent not in path.read_text() and sent not in fresh.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_keys(path)
    assert keys.find(sent).name == "shop"
    key = keys.find(limited.out.strip())
    assert (key.role, key.indexes) == ("write", ("photos", "shoes"))
    listed = cli("keys", "list", path).out
    assert "shop" in listed and "importer  write" in listed and "photos, shoes" in listed
    assert key.hash not in listed and key.salt not in listed
    shown = json.loads(cli("keys", "list", path, "--json").out)
    assert [entry["name"] for entry in shown] == ["shop", "importer"] and "hash" not in shown[0]
    path.chmod(0o640)
    assert cli("keys", "remove", "shop", "--output", path).code == 0
    assert [key.name for key in read_keys(path)] == ["importer"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640  # a server of this group can still read it
    assert cli("keys", "remove", "importer", "--output", path).code == 0
    assert len(read_keys(path)) == 0


def test_a_mistake_is_one_sentence_and_changes_nothing(cli, tmp_path):
    path = tmp_path / "keys.jsonl"
    assert cli("keys", "add", "shop", "--output", path).code == 0
    before = path.read_bytes()
    for arguments, says in (
        (("add", "shop", "-o", path), f"with 'retrieval keys rotate shop --output {path}'"),
        (("add", "x", "--expires", "soon", "-o", path), "write 90d, 12h or 30m"),
        (("add", "x", "--expires", "0d", "-o", path), "Give it a longer time"),
        (("rotate", "shoe", "-o", path), "has no key shoe. It has: shop."),
        (("add", "two words", "-o", path), "created: name: it must have at most 64 characters"),
        (("add", "x", "--role", "reader", "-o", path), "Did you mean 'read'"),
        (("add", "x", "-o", tmp_path / "no" / "keys"), "cannot be locked"),
        (("add", "x", "-o", tmp_path), "not a regular file"),
        (("remove", "shoe", "-o", path), "has no key shoe. It has: shop."),
        (("remove", "shop", "-o", tmp_path / "none"), "retrieval keys add NAME --output"),
        (("list", tmp_path / "none"), "There is no file of keys"),
    ):
        outcome = cli("keys", *arguments)
        assert outcome.code == 2 and says in outcome.err, (arguments, outcome)
    assert path.read_bytes() == before


def test_a_byte_order_mark_is_no_part_of_the_first_key(monkeypatch, cli, tmp_path):
    """Editors on Windows write it."""
    sent, kept = new_key("shop", "read")
    add_key(tmp_path / "keys", kept)
    text = b"\xef\xbb\xbf" + (tmp_path / "keys").read_bytes()
    (tmp_path / "keys").write_bytes(text)
    assert key_source(tmp_path / "keys").keys.find(sent).name == "shop"
    assert cli("keys", "add", "other", "--output", tmp_path / "keys").code == 0
    assert "other" in (out := cli("keys", "list", tmp_path / "keys").out) and "shop" in out
    monkeypatch.setenv("RETRIEVAL_KEYS", text.decode())
    assert key_source(None).keys.find(sent).name == "shop"


def test_all_faults_of_a_file_are_reported_without_its_content():
    sent, kept = new_key("shop", "read")
    sound = json.loads(kept.model_dump_json(exclude_none=True))

    def other(name: str, digit: str, **fields) -> str:
        return json.dumps({**sound, "name": name, "id": digit * 12, **fields})

    lines = {
        "# a comment": "",
        "": "",
        json.dumps(sound): "",
        f"{json.dumps(sound)} ": "line 4 repeats the name shop of line 3",
        "nonsense rk_secret": "line 5 is not",
        other("b", "a", role="god"): "line 6: role",
        other("c", "b", hash=sent): "line 7: hash",
        other("d", "c", created=3): "line 8: created",
        other("e", "d", expires=sent): "line 9: expires",
        other("f", "e")[:-1] + ', "salt": NaN}': "line 10",
        '{"name": "g", "name": "h"}': "line 11",
        "[]": "line 12",
    }
    with pytest.raises(RetrievalError) as caught:
        parse_keys("\n".join(lines).encode(), "keys.jsonl")
    text = str(caught.value)
    for says in lines.values():
        assert says in text, (says, text)
    assert sent not in text and "rk_secret" not in text and sound["hash"] not in text


def test_a_rotated_key_keeps_all_but_its_secret_and_the_old_one_ends(cli, tmp_path):
    path = tmp_path / "keys"
    options = ("--role", "write", "--index", "photos", "--expires", "90d", "-o", path)
    old = cli("keys", "add", "shop", *options).out.strip()
    assert cli("keys", "add", "other", "-o", path).code == 0
    rotated = cli("keys", "rotate", "shop", "-o", path)
    assert rotated.code == 0 and "The old key is refused from 20" in rotated.err
    sent = rotated.out.strip()
    other, first, second = read_keys(path)
    assert (other.name, first.name, second.name) == ("other", "shop", "shop")
    assert read_keys(path).find(old) == first and read_keys(path).find(sent) == second
    assert (second.role, second.indexes) == ("write", ("photos",))
    assert first.expires == second.created + timedelta(hours=24)  # the default grace
    assert second.expires == second.created + timedelta(days=90)
    shown = cli("keys", "list", path).out.splitlines()
    assert f"expires {first.expires}" in shown[1] and f"expires {second.expires}" in shown[2]
    assert json.loads(cli("keys", "list", path, "--json").out)[2]["expires"].startswith("20")

    # A shorter grace ends all older keys; one of 0 removes them, and no other key.
    again = cli("keys", "rotate", "shop", "--grace", "5m", "--expires", "1h", "-o", path)
    assert [key.name for key in read_keys(path)] == ["other", "shop", "shop", "shop"]
    now = read_keys(path)[3].created
    ends = [key.expires - now for key in read_keys(path) if key.name == "shop"]
    assert ends == [timedelta(minutes=5)] * 2 + [timedelta(hours=1)]
    last = cli("keys", "rotate", "shop", "--grace", "0", "-o", path).out.strip()
    assert [key.name for key in read_keys(path)] == ["other", "shop"]
    assert read_keys(path).find(last) and not read_keys(path).find(again.out.strip())
    assert cli("keys", "remove", "shop", "-o", path).code == 0
    assert [key.name for key in read_keys(path)] == ["other"]


def test_an_expiry_needs_a_time_zone_and_only_an_expiring_name_repeats():
    line = new_key("shop", "read")[1].model_dump(mode="json", exclude_none=True)
    old = {**line, "id": "0" * 12}
    for expires, says in (
        ("2026-12-31T00:00:00", "line 1: expires: Input should have timezone info"),
        (1_800_000_000, "line 1: expires"),
        (None, "line 2 repeats the name shop of line 1"),
        ("2026-12-31T00:00:00Z", None),
    ):
        lines = [json.dumps({**old, "expires": expires}), json.dumps(line)]
        if says is None:
            assert len(parse_keys("\n".join(lines).encode(), "keys")) == 2
            continue
        with pytest.raises(RetrievalError, match=says):
            parse_keys("\n".join(lines).encode(), "keys")


def test_an_expired_key_is_refused_with_a_sentence(served, index_path, tmp_path, cli):
    path = tmp_path / "keys"
    sent, kept = new_key("shop", "read", lifetime=timedelta(seconds=-1))
    add_key(path, kept)
    valid, kept = new_key("importer", "read", lifetime=timedelta(days=1))
    add_key(path, kept)
    server = served(index_path, "--keys", str(path))
    answers = [
        server.client.get("/v1/index", headers={"Authorization": f"Bearer {key}"})
        for key in (sent, valid)
    ]
    assert [answer.status_code for answer in answers] == [401, 200]
    assert answers[0].json()["detail"].startswith("This key expired at 20")
    shown = cli("keys", "list", path).out.splitlines()
    assert "expired 20" in shown[0] and "expires 20" in shown[1]


def test_the_size_of_a_file_is_limited(tmp_path):
    path = tmp_path / "keys"
    with path.open("wb") as file:
        file.truncate(100_000_000_000)  # sparse, and too large to read
    for text, says in ((None, "too large"), (b"", "is empty"), (b" \n\n", "is empty")):
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(RetrievalError, match=says):
            read_keys(path)
    wide = json.dumps(dict.fromkeys(map(str, range(50_000)))).encode()
    long = (b'"' * 900_000, b"9" * 900_000, b"{}\n" * 300_000, wide)
    for hostile in (b"[" * 500_000, b'{"a":' * 100_000, b"\xff" * 1000, *long):
        with pytest.raises(RetrievalError) as caught:
            parse_keys(hostile, "keys")
        assert len(str(caught.value)) < 5000
    full, (_, kept) = tmp_path / "full", new_key("first", "read")
    others = (
        kept.model_copy(update={"name": f"key-{number:04}", "id": f"{number:012x}"})
        for number in range(10_000)
    )
    lines = [json.dumps(key.model_dump(mode="json", exclude_none=True)) for key in others]
    count = 999_950 // (len(lines[0]) + 1)
    full.write_text("\n".join(lines[:count]))
    with pytest.raises(RetrievalError, match="too large: the limit is 1,000,000 bytes"):
        add_key(full, new_key("n" * 64, "read")[1])
    assert len(read_keys(full)) == count  # it can still be read and changed
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RetrievalError, match="not a regular file"):
        read_keys(tmp_path / "pipe")
    with pytest.raises(RetrievalError, match="name"):
        new_key("a\nb", "read")


def test_two_commands_at_once_lose_no_key(tmp_path):
    path, faults = tmp_path / "keys", []

    def add(name: str) -> None:
        for _ in range(100):
            try:
                return add_key(path, new_key(name, "read")[1])
            except RetrievalError as fault:
                faults.append(str(fault))

    names = [f"k{number}" for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(add, names))
    assert {key.name for key in read_keys(path)} == set(names)
    assert all("Another process is changing these keys" in fault for fault in faults)


def test_a_changed_file_is_read_and_an_invalid_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "keys"
    first, kept = new_key("first", "read")
    add_key(path, kept)
    keys = KeySource(path)
    second, other = new_key("second", "read")
    add_key(path, other)
    keys.look()
    assert keys.keys.find(second) is None  # another process might still write the file
    keys.look()
    assert keys.keys.find(second) and keys.keys.find(first)
    sound = path.read_bytes()
    for broken in (b"", b"nonsense", sound[:-9], None):
        path.unlink() if broken is None else path.write_bytes(broken)
        caplog.clear()
        for _ in range(4):
            keys.look()
        assert keys.keys.find(second) and keys.keys.find(first), broken
        assert len(caplog.records) == 1, "the log repeats itself"
        assert "The keys stay as they were" in caplog.text and kept.hash not in caplog.text
    path.write_bytes(sound)
    remove_key(path, "first")
    for _ in range(2):
        keys.look()
    assert keys.keys.find(first) is None and keys.keys.find(second)
    assert "has 1 key" in caplog.text


def test_a_link_is_followed_as_for_mounted_secrets(tmp_path):
    sent = {}
    for name in "ab":
        (tmp_path / name).mkdir()
        sent[name], kept = new_key(name, "read")
        add_key(tmp_path / name / "keys", kept)
    (tmp_path / "now").symlink_to("a")
    (tmp_path / "keys").symlink_to("now/keys")
    keys = KeySource(tmp_path / "keys")
    assert keys.keys.find(sent["a"])
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").rename(tmp_path / "now")
    for _ in range(2):
        keys.look()
    assert keys.keys.find(sent["b"]) and not keys.keys.find(sent["a"])


def test_keys_of_the_environment(monkeypatch, tmp_path):
    sent, kept = new_key("shop", "read")
    assert key_source(None) is None
    monkeypatch.setenv(module.VARIABLE, kept.model_dump_json(exclude_none=True))
    assert key_source(None).keys.find(sent) == kept
    add_key(tmp_path / "keys", kept)
    with pytest.raises(RetrievalError, match="set twice"):
        key_source(tmp_path / "keys")
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "keys"))
    assert key_source(None).keys.find(sent) == kept
    monkeypatch.setenv(module.VARIABLE, "{nonsense")
    with pytest.raises(RetrievalError, match="RETRIEVAL_KEYS: line 1 is not"):
        key_source(None)
    monkeypatch.setenv(module.VARIABLE, "nonsense")
    with pytest.raises(RetrievalError, match="no file of keys nonsense"):
        key_source(None)
