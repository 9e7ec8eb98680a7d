"""`retrieval index` and its verbs, as an operator types them, on handwritten digits."""

import json
import os
import shutil
from pathlib import Path

import click
import pytest
from retrieval.cli.index import index as group


@pytest.fixture
def photos(tmp_path, makers, bundle_path, cli):
    """An index `d.index` of sixty digits in `digits/`, made by the command."""
    makers.write_digits(tmp_path / "digits", 60)
    created = cli(
        "index", "create", tmp_path / "d.index", tmp_path / "digits", "--bundle", bundle_path
    )
    assert created.code == 0 and "Indexed 60 items" in created.out, created.err
    return tmp_path


def ids(cli, index: Path, *words: str) -> list[str]:
    listing = json.loads(cli("index", "list", index, "--limit", "1000", "--json", *words).out)
    assert listing["count"] == len(listing["items"])
    return [item["id"] for item in listing["items"]]


def test_items_come_change_and_go(photos, cli, makers):
    index, folder = photos / "d.index", photos / "digits"
    assert len(ids(cli, index)) == 60
    again = cli("index", "add", index, folder)
    assert again.code == 0 and "0 added, 60 unchanged" in again.out
    gone = sorted(folder.rglob("*.png"))[0]
    gone.unlink()
    changed = sorted(folder.rglob("*.png"))[0]
    changed.write_bytes(sorted(folder.rglob("*.png"))[-1].read_bytes())
    synced = json.loads(cli("index", "add", index, folder, "--sync", "--json").out)
    assert [synced[n] for n in ("added", "changed", "unchanged", "removed")] == [0, 1, 58, 1]
    threes = ids(cli, index, "--where", "label = '3'")
    assert threes and all(id.startswith("3/") for id in threes)
    item = json.loads(cli("index", "show", index, threes[0], "--json").out)
    assert item["label"] == "3" and len(item["vector"]) == 16 and item["keep"] == "reference"
    assert f"{len(threes)} deleted" in cli("index", "delete", index, "--where", "label = '3'").out
    assert ids(cli, index, "--where", "label = '3'") == []
    assert "1 deleted" in cli("index", "delete", index, ids(cli, index)[0], "nobody").out
    result = cli("search", index, changed, "-k", "2", "--where", "label != '3'", "--json")
    assert json.loads(result.out)[0]["results"][0]["distance"] == pytest.approx(0, abs=1e-3)


def test_a_bad_image_is_named_and_the_others_are_added(photos, cli):
    index, folder = photos / "d.index", photos / "digits"
    (folder / "3" / "bad.png").write_bytes(b"no image")
    (folder / "3" / "good.png").write_bytes(sorted((folder / "3").glob("0*.png"))[0].read_bytes())
    done = cli("index", "add", index, folder)
    assert done.code == 2 and "1 of 62 items cannot be used" in done.err and "bad.png" in done.err
    assert "All others are in the index" in done.err and "3/good.png" in ids(cli, index)
    assert cli("index", "add", index, folder, "--skip-bad").code == 0
    twice = photos / "twice.csv"
    twice.write_text(
        "path,key\n" + "".join(f"{path},same\n" for path in sorted(folder.rglob("0*.png"))[:2])
    )
    result = cli("index", "add", index, twice)
    assert result.code == 2 and "'same' is the id of 2 items" in result.err


def test_missing_originals_stop_a_migration_and_change_nothing(photos, cli, makers):
    index = photos / "d.index"
    other = makers.make_bundle(photos / "other", seed=5)
    first = sorted((photos / "digits").rglob("*.png"))[0]
    content, known = first.read_bytes(), first.stat()
    first.unlink()
    result = cli("index", "migrate", index, other)
    assert result.code == 2 and "is gone" in result.err and "--skip-bad" in result.err
    assert (
        json.loads(cli("index", "show", index, "--json").out)["generations"][0]["state"] == "served"
    )
    done = cli("index", "migrate", index, other, "--skip-bad")
    assert done.code == 0 and "59 items embedded" in done.out and "skipped" in done.err
    assert cli("index", "check", index).code == 0
    id = f"{first.parent.name}/{first.name}"
    first.write_bytes(content)
    os.utime(first, ns=(known.st_atime_ns, known.st_mtime_ns))
    relabelled = photos / "one.csv"
    relabelled.write_text(f"path,key,label\n{first},{id},new\n")
    assert "0 added, 1 changed" in cli("index", "add", index, relabelled).out
    hit = json.loads(cli("search", index, first, "-k", "1", "--json").out)[0]["results"][0]
    assert (hit["id"], hit["label"]) == (id, "new") and hit["distance"] == pytest.approx(
        0, abs=1e-3
    )
    assert "0 added, 1 unchanged" in cli("index", "add", index, relabelled).out


@pytest.mark.parametrize("keep", ["copy", "nothing"])
def test_what_is_kept_of_originals(keep, tmp_path, cli, makers, bundle_path):
    makers.write_digits(tmp_path / "digits", 20)
    words = (tmp_path / "i", tmp_path / "digits", "--bundle", bundle_path, "--keep", keep)
    assert cli("index", "create", *words).code == 0
    shutil.rmtree(tmp_path / "digits")
    done = cli("index", "migrate", tmp_path / "i", makers.make_bundle(tmp_path / "other", seed=5))
    assert (done.code == 0) == (keep == "copy"), done.err


def test_copies_that_are_damaged_or_in_the_way(photos, cli):
    def index(verb, *names):
        return cli("index", verb, *(photos / name for name in names))

    assert index("snapshot", "d.index", "s").code == 0
    assert "exists already" in index("snapshot", "d.index", "s").err
    result = index("restore", "s", "d.index")
    sentence = f"{photos / 'd.index'} exists already. Name a folder that does not exist yet"
    assert result.code == 2 and sentence in result.err and "for the snapshot" not in result.err
    (segment,) = (photos / "s" / "arrays").glob("*.vector")
    content = bytearray(segment.read_bytes())
    content[500] ^= 4
    segment.write_bytes(content)
    result = index("check", "s")
    assert result.code == 2 and "was altered" in result.err
    assert index("restore", "s", "x").code == 2 and not (photos / "x").exists()


MISTAKES = [
    (["shwo", "d.index"], "Did you mean 'show'?"),
    (["check", "nowhere"], "nowhere is not an index: there is no such folder"),
    (["compact", "nowhere", "--json"], "nowhere is not an index"),
    (["show", "d.index", "nobody"], "has no item 'nobody'"),
    (["list", "d.index", "--after", "\udcff"], "not an id that an item can have"),
    (["list", "d.index", "--where", "prise <"], "expected a value"),
    (["list", "d.index", "--where", "prise < 3"], "No item of this index has a field 'prise'"),
    (["delete", "d.index"], "either ids or --where"),
    (["create", "x", "digits"], "either --bundle BUNDLE or --model NAME"),
    (["migrate", "d.index"], "Name the bundle to migrate to"),
    (["duplicates", "d.index", "--within", "-1"], "--within"),
]


def test_mistakes_are_sentences(photos, cli, monkeypatch):
    monkeypatch.chdir(photos)
    for words, says in MISTAKES:
        result = cli("index", *words)
        assert (result.code, result.out) == (2, "") and says in result.err, (words, result.err)
        assert "Traceback" not in result.err


@pytest.fixture
def say(tmp_path, cli, monkeypatch):
    """Run a verb on `d.index` with --json, and return what it prints but the index."""
    monkeypatch.chdir(tmp_path)

    def run(verb, *words, named="d.index"):
        done = cli("index", verb, *words, "--json")
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        assert next(iter(answer.items())) == ("index", named)
        del answer["index"]
        return answer

    return run


@pytest.mark.parametrize("verb", group.commands)
def test_every_verb_takes_json(verb):
    command = group.get_command(click.Context(group), verb)
    assert any(parameter.name == "as_json" for parameter in command.params)


def test_a_life(say, makers, bundle_path, cli):
    makers.write_digits(Path("digits"), 30)
    Path("digits/3/bad.png").write_bytes(b"no image")
    created = say("create", "d.index", "digits", "--bundle", bundle_path, "--skip-bad")
    facts = [created[name] for name in ("count", "backend", "recall_at_10", "resumed")]
    assert facts == [30, "flat", None, 0]
    (fault,) = created["skipped"]
    assert "bad.png" in fault and created["seconds"] > 0

    assert say("snapshot", "d.index", "s.index") == {"snapshot": "s.index"}
    assert say("restore", "s.index", "r.index", named="r.index") == {"snapshot": "s.index"}
    count = say("list", "r.index", "--where", "label = '3'", named="r.index")["count"]
    assert say("delete", "d.index", "--where", "label = '3'") == {"deleted": count} and count > 0
    freed = say("compact", "d.index")
    assert freed.keys() == {"bytes_before", "bytes"}
    assert freed["bytes"] == say("show", "d.index")["bytes"]

    other = makers.make_bundle(Path("other"), seed=5)
    moved = say("migrate", "d.index", other)
    assert moved == {"generation": 2, "embedded": 30 - count, "skipped": [], "from_features": 0}
    assert say("rollback", "d.index") == moved | {"generation": 1, "embedded": 0}
    first = sorted(Path("digits/4").iterdir())[0]
    first.unlink()
    third = makers.make_bundle(Path("third"), seed=6)
    again = say("migrate", "d.index", third, "--skip-bad", "--drop-old")
    assert (again["dropped"], again["embedded"]) == (2, 29 - count)
    assert first.name in again["skipped"][0]
    assert say("migrate", "d.index", "--drop-old") == {"dropped": 0}
    assert say("check", "d.index") == {"damaged": [], "rebuilt": []}
    left = say("show", "d.index", f"4/{first.name}")
    assert left["id"] == f"4/{first.name}" and left["vector"] is None
    assert say("duplicates", "d.index", "--within", "0") == {"groups": []}
    assert "vector: none" in cli("index", "show", "d.index", f"4/{first.name}").out
