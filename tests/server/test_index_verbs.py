"""`retrieval index` and its verbs, as an operator types them, on handwritten digits."""

import json
import os
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from retrieval.cli.index import index as group
from retrieval.index.index import open_index
from retrieval.store.contract import Item


@pytest.fixture
def answer(tmp_path, cli, monkeypatch):
    """Run a verb with --json in `tmp_path`, and return its JSON without the name of the index."""
    monkeypatch.chdir(tmp_path)

    def run(verb, *words, index="d.index"):
        done = cli("index", verb, *words, "--json")
        assert done.code == 0, done.err
        (first, name), *others = json.loads(done.out).items()
        assert (first, name) == ("index", index)
        return dict(others)

    return run


@pytest.fixture
def digits(answer, makers, bundle_path):
    """Sixty digits in `digits/`, indexed in `d.index`. Both are in the working directory."""
    makers.write_digits(Path("digits"), 60)
    assert answer("create", "d.index", "digits", "--bundle", bundle_path)["count"] == 60
    return sorted(Path("digits").rglob("*.png"))


def ids(answer, *words: str) -> list[str]:
    listing = answer("list", "d.index", "--limit", "1000", *words)
    assert listing["count"] == len(listing["items"])
    return [item["id"] for item in listing["items"]]


def nearest(cli, *words: object) -> dict:
    return json.loads(cli("search", "d.index", *words, "--json").out)[0]["results"][0]


def test_add_sync_list_show_and_delete(digits, answer, cli):
    assert len(ids(answer)) == 60
    again = cli("index", "add", "d.index", "digits")
    assert again.code == 0 and "0 added, 60 unchanged" in again.out
    digits[0].unlink()
    shutil.copy(digits[-1], digits[1])
    synced = answer("add", "d.index", "digits", "--sync")
    assert [synced[n] for n in ("added", "changed", "unchanged", "removed")] == [0, 1, 58, 1]
    threes = ids(answer, "--filter", "label = '3'")
    assert threes and all(id.startswith("3/") for id in threes)
    item = answer("show", "d.index", threes[0])
    assert item["label"] == "3" and len(item["vector"]) == 16 and item["keep"] == "reference"
    deleted = cli("index", "delete", "d.index", "--filter", "label = '3'").out
    assert f"{len(threes)} deleted" in deleted
    assert ids(answer, "--filter", "label = '3'") == []
    assert "1 deleted" in cli("index", "delete", "d.index", ids(answer)[0], "nobody").out
    hit = nearest(cli, digits[1], "-k", "2", "--filter", "label != '3'")
    assert hit["distance"] == pytest.approx(0, abs=1e-3)


def test_a_bad_image_is_named_and_the_others_are_added(digits, answer, cli):
    Path("digits/3/bad.png").write_bytes(b"no image")
    shutil.copy(digits[0], "digits/3/good.png")
    done = cli("index", "add", "d.index", "digits")
    assert done.code == 2 and "1 of 62 items cannot be used" in done.err and "bad.png" in done.err
    assert "All others are in the index" in done.err and "3/good.png" in ids(answer)
    assert cli("index", "add", "d.index", "digits", "--skip-bad").code == 0
    Path("twice.csv").write_text(f"path,key\n{digits[0]},same\n{digits[1]},same\n")
    result = cli("index", "add", "d.index", "twice.csv")
    assert result.code == 2 and "'same' is the id of 2 items" in result.err


def test_missing_originals_stop_a_migration_and_change_nothing(digits, answer, cli, makers):
    other = makers.make_bundle(Path("other"), seed=5)
    first, id = digits[0], digits[0].relative_to("digits").as_posix()
    content, status = first.read_bytes(), first.stat()
    first.unlink()
    result = cli("index", "migrate", "d.index", other)
    assert result.code == 2 and "is gone" in result.err and "--skip-bad" in result.err
    assert answer("show", "d.index")["generations"][0]["state"] == "served"
    done = cli("index", "migrate", "d.index", other, "--skip-bad")
    assert done.code == 0 and "59 items embedded" in done.out and "skipped" in done.err
    assert cli("index", "check", "d.index").code == 0
    first.write_bytes(content)
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    Path("one.csv").write_text(f"path,key,label\n{first},{id},new\n")
    assert "0 added, 1 changed" in cli("index", "add", "d.index", "one.csv").out
    hit = nearest(cli, first, "-k", "1")
    assert (hit["id"], hit["label"]) == (id, "new")
    assert hit["distance"] == pytest.approx(0, abs=1e-3)
    assert "0 added, 1 unchanged" in cli("index", "add", "d.index", "one.csv").out


@pytest.mark.parametrize("keep", ["copy", "nothing"])
def test_only_kept_originals_are_embedded_again(keep, tmp_path, cli, makers, bundle_path):
    makers.write_digits(tmp_path / "digits", 20)
    words = (tmp_path / "i", tmp_path / "digits", "--bundle", bundle_path, "--keep", keep)
    assert cli("index", "create", *words).code == 0
    shutil.rmtree(tmp_path / "digits")
    done = cli("index", "migrate", tmp_path / "i", makers.make_bundle(tmp_path / "other", seed=5))
    assert (done.code == 0) == (keep == "copy"), done.err


def test_copies_that_are_damaged_or_in_the_way(digits, cli):
    assert cli("index", "snapshot", "d.index", "s").code == 0
    assert "exists already" in cli("index", "snapshot", "d.index", "s").err
    result = cli("index", "restore", "s", "d.index")
    assert result.code == 2 and "for the snapshot" not in result.err
    assert "d.index exists already. Name a folder that does not exist yet" in result.err
    (segment,) = Path("s/arrays").glob("*.vector")
    content = bytearray(segment.read_bytes())
    content[500] ^= 4
    segment.write_bytes(content)
    result = cli("index", "check", "s")
    assert result.code == 2 and "was altered" in result.err
    assert cli("index", "restore", "s", "x").code == 2 and not Path("x").exists()


MISTAKES = [
    (["shwo", "d.index"], "Did you mean 'show'?"),
    (["check", "nowhere"], "nowhere is not an index: there is no such folder"),
    (["check", "."], ". is not an index. Create one with"),
    (["restore", ".", "x"], ". is not an index. Create one with"),
    (["compact", "nowhere", "--json"], "nowhere is not an index"),
    (["show", "d.index", "nobody"], "has no item 'nobody'"),
    (["list", "d.index", "--after", "\udcff"], "not an id that an item can have"),
    (["list", "d.index", "--limit", str(2**63)], "--limit"),
    (["list", "d.index", "--filter", "prise <"], "expected a value"),
    (["list", "d.index", "--filter", "prise < 3"], "No item of this index has a field 'prise'"),
    (["delete", "d.index"], "either ids or --filter"),
    (["create", "x", "digits"], "either --bundle BUNDLE or --model ADDRESS"),
    (["migrate", "d.index"], "Name the bundle to migrate to"),
    (["duplicates", "d.index", "--within", "-1"], "--within"),
    (["duplicates", "d.index", "--within", "0", "--reviewed", "gone.json"], "No such file"),
    (["duplicates", "d.index", "--within", "0", "--reviewed", "digits"], "Is a directory"),
]


def test_mistakes_are_sentences(digits, cli):
    for words, says in MISTAKES:
        result = cli("index", *words)
        assert (result.code, result.out) == (2, "") and says in result.err, (words, result.err)
        assert "Traceback" not in result.err


@pytest.mark.parametrize("verb", group.commands)
def test_every_verb_takes_json(verb):
    command = group.get_command(click.Context(group), verb)
    assert any(parameter.name == "as_json" for parameter in command.params)


def test_the_json_of_every_verb(answer, makers, bundle_path, cli):
    makers.write_digits(Path("digits"), 30)
    Path("digits/3/bad.png").write_bytes(b"no image")
    created = answer("create", "d.index", "digits", "--bundle", bundle_path, "--skip-bad")
    facts = [created[name] for name in ("count", "backend", "recall_at_10", "resumed")]
    assert facts == [30, "flat", None, 0]
    (fault,) = created["skipped"]
    assert "bad.png" in fault and created["seconds"] > 0

    assert answer("snapshot", "d.index", "s.index") == {"snapshot": "s.index"}
    assert answer("restore", "s.index", "r.index", index="r.index") == {"snapshot": "s.index"}
    count = answer("list", "r.index", "--filter", "label = '3'", index="r.index")["count"]
    assert (
        answer("delete", "d.index", "--filter", "label = '3'") == {"deleted": count} and count > 0
    )
    freed = answer("compact", "d.index")
    assert freed.keys() == {"bytes_before", "bytes"}
    assert freed["bytes"] == answer("show", "d.index")["bytes"]

    other = makers.make_bundle(Path("other"), seed=5)
    moved = answer("migrate", "d.index", other)
    embedded = {"embedded": 30 - count, "from_features": 0, "from_vectors": 0}
    assert moved == {"generation": 2, "skipped": [], **embedded}
    assert answer("rollback", "d.index") == moved | {"generation": 1, "embedded": 0}
    first = sorted(Path("digits/4").iterdir())[0]
    first.unlink()
    third = makers.make_bundle(Path("third"), seed=6)
    again = answer("migrate", "d.index", third, "--skip-bad", "--drop-old")
    assert (again["dropped"], again["embedded"]) == (2, 29 - count)
    assert first.name in again["skipped"][0]
    assert answer("migrate", "d.index", "--drop-old") == {"dropped": 0}
    assert answer("check", "d.index") == {"damaged": [], "rebuilt": []}
    item = answer("show", "d.index", f"4/{first.name}")
    assert item["id"] == f"4/{first.name}" and item["vector"] is None
    assert answer("duplicates", "d.index", "--within", "0") == {"groups": []}
    assert "vector: none" in cli("index", "show", "d.index", f"4/{first.name}").out


def test_a_line_break_in_an_id_or_a_label_splits_no_line(living, bundle_path, cli):
    with open_index(living) as index:
        vector = np.full((2, 16), 0.5, np.float32)
        index.store.upsert(
            [
                Item(f"0\n{number}", "a\nb\tc", {}, arrays={"vector": row})
                for number, row in enumerate(vector)
            ],
            index.bundle.sha256,
        )
    listed = cli("index", "list", living, "--limit", "2").out.splitlines()
    assert listed == [f"0\\n{number}  a\\nb\\tc" for number in range(2)]
    groups = cli("index", "duplicates", living, "--within", "0").out.splitlines()
    assert any(line.endswith(": 0\\n0  0\\n1") for line in groups)
    shown = cli("index", "show", living, "0\n0").out.splitlines()
    assert "id: 0\\n0" in shown and "label: a\\nb\\tc" in shown


def test_duplicates_are_written_for_the_page_and_reviewed_ones_left_out(digits, answer, cli):
    for number in (1, 2):
        shutil.copy(digits[0], digits[0].with_name(f"copy{number}.png"))
    assert answer("add", "d.index", "digits")["added"] == 2
    words = ["duplicates", "d.index", "--within", "0"]
    (group,) = answer(*words, "--output", "groups.json")["groups"]
    ids = [path.relative_to("digits").as_posix() for path in (digits[0], *copies_of(digits[0]))]
    assert group == {"ids": ids, "radius": 0, "diameter": 0, "distances": [0, 0, 0]}
    written = json.loads(Path("groups.json").read_text())
    with open_index(Path("d.index")) as index:
        expected = {"index": "d.index", "identity": index.identity, "groups": [group]}
        assert written == expected
    for number, kept in enumerate((ids[1:], ids)):
        content = {"identity": written["identity"], "reviewed": [kept]}
        Path(f"{number}.json").write_text(json.dumps(content))
    (left,) = answer(*words, "--reviewed", "0.json")["groups"]
    assert left["ids"] == ids[:2]
    assert answer(*words, "--reviewed", "0.json", "--reviewed", "1.json") == {"groups": []}
    for content, says in (
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"reviewed": [[1]]}', "is damaged"),
        ('{"reviewed": 7}', "is damaged"),
        ('{"identity": "x", "reviewed": []}', "is of another index"),
    ):
        Path("bad.json").write_text(content)
        result = cli("index", *words, "--reviewed", "bad.json")
        assert (result.code, result.out) == (2, "") and says in result.err, result.err
    with Path("bad.json").open("wb") as file:
        file.truncate(100_000_001)
    assert "100,000,000 bytes" in cli("index", *words, "--reviewed", "bad.json").err


def copies_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob("copy*"))
