"""Control characters in names of files and labels are printed as escapes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from retrieval.base.display_tables import text_table
from retrieval.index.queries_and_hits import Hit

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp"
SHOWN = "\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202egnp"


def harmless(outcome: Any) -> str:
    text = str(outcome.out + outcome.err)
    assert not [c for c in text if not c.isprintable() and c not in "\n\t\r"], outcome
    return text


@pytest.fixture
def photos(makers, tmp_path):
    """Digits; a label, and the names of two files, clear a terminal and set its title."""
    folder = tmp_path / "photos"
    makers.write_digits(folder, 40)
    (folder / "3").rename(folder / EVIL)
    first = next((folder / "0").iterdir())
    shutil.copy(first, folder / "0" / f"{EVIL}.png")
    (folder / "0" / f"bad{EVIL}.png").write_bytes(b"no image")
    return folder


def test_index_and_search(photos, bundle_path, cli, monkeypatch):
    monkeypatch.chdir(photos.parent)
    refused = cli("index", "create", "i", "photos", "--bundle", bundle_path)
    assert refused.code == 2 and f"bad{SHOWN}.png" in harmless(refused)
    made = cli("index", "create", f"i{EVIL}", "photos", "--bundle", bundle_path, "--skip-bad")
    assert made.code == 0 and f"bad{SHOWN}.png" in harmless(made)
    assert made.out.endswith(f": i{SHOWN}\n")
    query = f"photos/0/{EVIL}.png"
    found = cli("search", f"i{EVIL}", query, "-k", "40")
    assert found.code == 0
    for text in (f"Nearest to photos/0/{SHOWN}.png", f"0/{SHOWN}.png", f" {SHOWN} "):
        assert text in harmless(found)
    as_json = cli("search", f"i{EVIL}", query, "-k", "40", "--json")
    harmless(as_json)
    (answer,) = json.loads(as_json.out)
    assert answer["query"] == query and EVIL in {hit["label"] for hit in answer["results"]}
    gone = cli("search", f"i{EVIL}", f"{EVIL}.jpg")
    assert gone.code == 2 and SHOWN in harmless(gone)


def test_errors_of_other_commands(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = f"{EVIL}.toml"
    escaped = json.dumps(EVIL)[1:-1]
    Path(recipe).write_text(f'[loss]\nname = "{escaped}.x"\n"{escaped}" = 1\n')
    words = [["check", recipe], ["train", recipe], ["check", recipe, "--set", EVIL]]
    words += [["evaluate", "x", *more] for more in ([f"--{EVIL}"], ["--split", EVIL])]
    words += [[verb, EVIL] for verb in ("evaluate", "export", "serve")] + [[EVIL]]
    for call in words:
        run = cli(*call)
        assert run.code == 2 and "owned\\x07\\x9b31m\\u202e" in harmless(run), (call, run)


def test_a_line_break_in_a_label_or_id_keeps_a_hit_on_one_line():
    _, line = text_table([Hit("a\nb", "c\nd", 0.5, {})]).splitlines()
    assert line.split() == ["0.5000", "c\\nd", "a\\nb"]
