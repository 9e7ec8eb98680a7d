"""Sets of the test side only, with lists of relevant images or with queries without an answer."""

from __future__ import annotations

import io
import pickle
import struct

import layouts
import numpy as np
import pytest
from layouts import refused, sides

from retrieval_sets import (
    disc21,
    google_landmarks_v2,
    gpr1200,
    ilias,
    met,
    roxford5k,
    rparis6k,
    wildlife_reid10k,
)


def queries(data):
    """Return the metadata of each query by its key."""
    rows = zip(data.keys, data.roles, data.metadata, strict=True)
    return {key: metadata for key, role, metadata in rows if role == "query"}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_oxford_has_lists_and_boxes(tmp_path, protocol, listed):
    data = roxford5k(layouts.revisited(tmp_path, protocol=protocol, listed=listed), counts="any")
    assert queries(data) == {
        "jpg/gate_000001.jpg": {
            "easy": "jpg/tower_000000.jpg;jpg/tower_000002.jpg",
            "hard": "jpg/tower_000001.jpg",
            "junk": "jpg/tower_000005.jpg",
        },
        "jpg/tower_000009.jpg": {"easy": "", "hard": "jpg/tower_000004.jpg", "junk": ""},
    }
    assert data.roles.count("gallery") == 6 and set(data.splits) == {"test"}
    assert data[data.keys.index("jpg/gate_000001.jpg")].size == (12, 6)
    assert data[data.keys.index("jpg/tower_000000.jpg")].size == layouts.SIZE


def test_paris_and_distractors(tmp_path):
    layouts.revisited(tmp_path, "rparis6k")
    for number in range(3):
        layouts.picture(tmp_path / "1m" / "jpg" / f"{number}.jpg", 90 + number)
    data = rparis6k(tmp_path, distractors="1m", counts="any")
    assert data.roles.count("gallery") == 9 and "1m/jpg/2.jpg" in data.keys
    assert "has 6,325 images; here it has 9 images" in refused(rparis6k, tmp_path, distractors="1m")


class Hostile:
    def __reduce__(self):
        return exec, ("open('ran', 'w').write('x')",)


def test_a_hostile_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = layouts.revisited(tmp_path) / "gnd_roxford5k.pkl"
    sound = path.read_bytes()
    huge = 1 << 31
    contents = {
        "it refers to __builtin__.exec": pickle.dumps({"imlist": Hostile()}, protocol=2),
        "it refers to numpy.load": b"cnumpy\nload\n(S'x'\ntR.",
        "it refers to retrieval.base.trec.quote": b"cretrieval.base.trec\nquote\n(S'x'\ntR.",
        "it refers to _codecs.lookup": b"c_codecs\nlookup\n(S'x'\ntR.",
        "lambda": b"c__builtin__\nbytes\n(I1000000000000\ntR.",
        # in the unpickler in C, this place among its references would take 16 GB
        "has no entry 'imlist'": b"\x80\x02Nr" + struct.pack("<I", huge) + b".",
        "is damaged": sound[: len(sound) // 2],
        "Only lists, dictionaries": pickle.dumps(io.BytesIO(), protocol=2),
    }
    for says, content in contents.items():
        path.write_bytes(content)
        assert says in refused(roxford5k, tmp_path, counts="any")
    path.write_bytes(bytes((16 << 20) + 1))
    assert "may have at most 16,777,216" in refused(roxford5k, tmp_path, counts="any")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("easy", [6]),
        ("easy", [-1]),
        ("hard", [0.5]),
        ("junk", "all"),
        ("junk", np.array(["a"])),
        ("junk", np.array([object()])),
        ("easy", [[1]]),
        ("bbx", [1.0, 2.0, 3.0]),
        ("bbx", [1.0, 2.0, 3.0, float("nan")]),
        ("bbx", None),
    ],
)
def test_wrong_annotations_of_oxford(tmp_path, key, value):
    path = layouts.revisited(tmp_path) / "gnd_roxford5k.pkl"
    table = pickle.loads(path.read_bytes())
    table["gnd"][1][key] = value
    path.write_bytes(pickle.dumps(table, protocol=2))
    text = refused(roxford5k, tmp_path, counts="any")
    assert "tower_000009 needs a box of four numbers" in text or "Only lists, dic" in text


def test_numbers_of_numpy_are_read(tmp_path):
    path = layouts.revisited(tmp_path) / "gnd_roxford5k.pkl"
    table = pickle.loads(path.read_bytes())
    table["gnd"][1]["easy"] = [np.int64(3), np.int32(2)]
    table["gnd"][1]["junk"] = np.array([1], ">i4")
    path.write_bytes(pickle.dumps(table, protocol=2))
    lists = queries(roxford5k(tmp_path, counts="any"))["jpg/tower_000009.jpg"]
    assert lists["easy"] == "jpg/tower_000003.jpg;jpg/tower_000002.jpg"
    assert lists["junk"] == "jpg/tower_000001.jpg"


def test_gpr1200_by_names(tmp_path):
    root = layouts.gpr1200(tmp_path)
    assert sides(gpr1200(root, counts="any")) == {"test": list("001122")}
    (root / "images" / "0_n00_x.jpg").rename(root / "images" / "cat.jpg")
    assert "images/cat.jpg: its name does not begin" in refused(gpr1200, root, counts="any")


def test_met_has_queries_of_no_exhibit(tmp_path):
    root = layouts.met(tmp_path)
    gallery = ["100", "100", "101", "101"]
    assert sides(met(root, counts="any")) == {"gallery": gallery, "query": ["101", "no exhibit"]}
    data = met(root, queries="validation", counts="any")
    assert sides(data) == {"gallery": gallery, "query": ["100"]}
    assert "here it has 1 image" in refused(met, root, queries="validation")
    database = root / "ground_truth" / "MET_database.json"
    for text, says in (
        ('[{"path": "x.jpg"}]', "entry 0 lacks 'path' or 'id'"),
        ('[{"path": 1, "id": 2}]', "entry 0 lacks 'path' or 'id'"),
        ('{"path": 1}', "must be a list of objects"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
    ):
        database.write_text(text)
        assert says in refused(met, root, counts="any")


def test_ilias_with_and_without_distractors(tmp_path):
    root = layouts.ilias(tmp_path / "ilias_core")
    positives = ["lamp_000"] * 2 + ["shoe_001"] * 2
    assert sides(ilias(tmp_path, counts="any"))["gallery"] == positives
    data = ilias(root, distractors="yfcc", counts="any")
    assert sides(data) == {
        "query": ["lamp_000", "shoe_001"],
        "gallery": [*positives, *["distractor"] * 3],
    }
    assert "has 4,718 images; here it has 7 images" in refused(ilias, root, distractors="yfcc")


def test_disc21_lists_the_sources_of_copies(tmp_path):
    root = layouts.disc21(tmp_path)
    data = disc21(root, counts="any")
    assert {key: row["relevant"] for key, row in queries(data).items()} == {
        "queries/Q00000.jpg": "references/R000002.jpg",
        "queries/Q00001.jpg": "",
        "queries/Q00002.jpg": "references/R000000.jpg;references/R000003.jpg",
    }
    assert data.roles.count("gallery") == 4


def test_landmarks_list_the_solution(tmp_path):
    data = google_landmarks_v2(layouts.landmarks(tmp_path), counts="any")
    listed = [row["relevant"].split(";") for row in queries(data).values()]
    assert [len(keys) for keys in listed] == [3, 1]
    assert {key for keys in listed for key in keys} <= set(data.keys)


def test_known_and_new_animals(tmp_path):
    root = layouts.wildlife(tmp_path)
    data = wildlife_reid10k(root)
    assert sides(data) == {"gallery": ["a", "a", "b"], "query": ["a", "c"]}
    assert data.metadata[0] == {"dataset": "LynxID2025", "species": "lynx"}
    table = root / "metadata.csv"
    text = table.read_text()
    for old, new in ((",query,", ",unknown,"), ("4,c,", "4,,")):
        table.write_text(text.replace(old, new))
        assert "line 6: the split must be" in refused(wildlife_reid10k, root)
    table.write_text(text.replace("images/query", "../query"))
    assert "1 paths lead out of the folder" in refused(wildlife_reid10k, root)
