"""`retrieval index VERB --json`: one object, which begins with the index as it was named."""

import json
from pathlib import Path

import click
import pytest
from retrieval.cli.index import index


@pytest.fixture
def say(tmp_path, cli, monkeypatch):
    """Run a verb on `d.index` with --json, and return what it prints but the index."""
    monkeypatch.chdir(tmp_path)

    def run(verb, *words, named="d.index"):
        done = cli("index", verb, *words, "--json")
        assert done.code == 0, done.err
        said = json.loads(done.out)
        assert next(iter(said.items())) == ("index", named)
        del said["index"]
        return said

    return run


@pytest.mark.parametrize("verb", index.commands)
def test_every_verb_takes_it(verb):
    found = index.get_command(click.Context(index), verb)
    assert any(parameter.name == "as_json" for parameter in found.params)


def test_a_life(say, makers, bundle_path, cli):
    makers.write_digits(Path("digits"), 30)
    Path("digits/3/bad.png").write_bytes(b"no image")
    made = say("create", "d.index", "digits", "--bundle", bundle_path, "--skip-bad")
    assert (made["count"], made["backend"], made["recall_at_10"], made["resumed"]) == (
        30,
        "flat",
        None,
        0,
    )
    (fault,) = made["skipped"]
    assert "bad.png" in fault and made["seconds"] > 0

    assert say("snapshot", "d.index", "s.index") == {"snapshot": "s.index"}
    assert say("restore", "s.index", "r.index", named="r.index") == {"snapshot": "s.index"}
    count = say("list", "r.index", "--where", "label = '3'", named="r.index")["count"]
    assert say("delete", "d.index", "--where", "label = '3'") == {"deleted": count} and count > 0
    freed = say("compact", "d.index")
    assert (
        freed.keys() == {"bytes_before", "bytes"}
        and freed["bytes"] == say("show", "d.index")["bytes"]
    )

    other = makers.make_bundle(Path("other"), seed=5)
    moved = say("migrate", "d.index", other)
    assert moved == {"generation": 2, "embedded": 30 - count, "skipped": [], "from_features": 0}
    assert say("rollback", "d.index") == moved | {"generation": 1, "embedded": 0}
    first = sorted(Path("digits/4").iterdir())[0]
    first.unlink()
    again = say(
        "migrate", "d.index", makers.make_bundle(Path("third"), seed=6), "--skip-bad", "--drop-old"
    )
    assert (
        again["dropped"] == 2
        and again["embedded"] == 29 - count
        and first.name in again["skipped"][0]
    )
    assert say("migrate", "d.index", "--drop-old") == {"dropped": 0}
    assert say("check", "d.index") == {"damaged": [], "rebuilt": []}
    left = say("show", "d.index", f"4/{first.name}")
    assert left["id"] == f"4/{first.name}" and left["vector"] is None
    assert say("duplicates", "d.index", "--within", "0") == {"groups": []}
    assert "vector: none" in cli("index", "show", "d.index", f"4/{first.name}").out


def test_a_mistake_is_a_sentence_all_the_same(cli, tmp_path):
    for verb in ("compact", "rollback"):
        told = cli("index", verb, tmp_path / "nowhere", "--json")
        assert told.code == 2 and not told.out and "is not an index" in told.err
