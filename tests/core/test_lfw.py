"""Data in the layout of Labeled Faces in the Wild: reading, errors, training and verification."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from PIL import Image
from refusals import refusal
from retrieval.data.datasets import Dataset
from retrieval.data.splits import make_splits
from retrieval.errors import DataError, RecipeError
from retrieval.host.plugins import create
from retrieval.recipe.tables import Split
from sklearn.datasets import load_digits

FOLDS, EACH = 3, 4  # number of folds, and of pairs of each kind per fold
NAMES = [f"Person_{i:02d}" for i in range(12)]
"""Four people per fold, the last with a single image. The first nine are View 1's training set."""


RECIPE: dict[str, Any] = {
    "name": "faces",
    "split": {"validation": 0.0},
    "sampler": {"classes": 4, "items": 2, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 16, "width": 4, "depth": 2},
    "head": {"embedding_size": 8},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of images of people (digits), and five lists beside it."""
    root = tmp_path_factory.mktemp("lfw")
    digits = load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)
    images = dict.fromkeys(NAMES, 0)
    for i, name in enumerate(NAMES):
        images[name] = 1 if i % 4 == 3 else 5
        own = pixels[digits.target == i % 10][i // 10 * 20 :]
        for n in range(images[name]):
            path = root / "faces" / name / f"{name}_{n + 1:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(own[n]).resize((16, 16)).save(path, quality=95)
    folds = [NAMES[4 * k : 4 * k + 4] for k in range(FOLDS)]
    write(root / "people.txt", [str(FOLDS), *(line for f in folds for line in people(f, images))])
    write(root / "peopleDevTrain.txt", people(NAMES[:9], images))
    write(root / "peopleDevTest.txt", people(NAMES[9:], images))
    write(root / "pairs.txt", [f"{FOLDS}\t{EACH}", *(line for f in folds for line in pairs(f))])
    write(root / "pairsDevTest.txt", [str(EACH), *pairs(NAMES[9:])])
    return root


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def people(names: list[str], images: dict[str, int]) -> list[str]:
    return [str(len(names)), *(f"{name}\t{images[name]}" for name in names)]


def pairs(names: list[str]) -> list[str]:
    """Return four same pairs and four different pairs of two people with several images."""
    a, b = [name for name in names if NAMES.index(name) % 4 != 3][:2]
    same = [f"{a}\t1\t2", f"{a}\t3\t4", f"{b}\t1\t3", f"{b}\t2\t4"]
    return [*same, *(f"{a}\t{n}\t{b}\t{5 - n}" for n in (1, 2, 3, 4))]


@pytest.fixture
def faces(made, tmp_path):
    """The folder of images in a copy, which a test may change."""
    shutil.copytree(made, tmp_path / "lfw")
    return tmp_path / "lfw" / "faces"


def build(folder: Path, **values: Any) -> Dataset:
    return create("dataset", "core.lfw", folder=str(folder), **values)


def sides(data: Dataset) -> dict[str, set[str]]:
    actual: dict[str, set[str]] = {}
    for label, side in zip(data.labels, data.splits or (), strict=True):
        actual.setdefault(side, set()).add(label)
    return actual


def refused(folder: Path, **values: Any) -> str:
    return refusal(DataError, build, folder, **values)


def test_view_1(made):
    data = build(made / "faces")
    assert len(data) == 9 * 5 + 3 * 1
    assert data.keys[0] == "Person_00/Person_00_0001.jpg" and data.labels[0] == "Person_00"
    assert sides(data) == {"train": set(NAMES[:9]), "test": set(NAMES[9:])}
    assert isinstance(data[0], Image.Image) and data[0].size == (16, 16)
    actual = make_splits(data, Split(validation=0.0))
    assert actual.train_classes == NAMES[:9] and len(actual.query) == 2 * 5 + 1


def test_view_2(made):
    for fold in (1, 2, 3):
        data = build(made / "faces", view="folds", fold=fold)
        tested = set(NAMES[4 * fold - 4 : 4 * fold])
        assert len(data) == 48 and sides(data) == {"train": set(NAMES) - tested, "test": tested}


def test_without_a_view_no_list_is_needed(made):
    data = build(made / "faces", view="none")
    assert len(data) == 48 and data.splits is None
    assert len(make_splits(data, Split(by="class", test=0.5, validation=0.0)).query) > 10


def test_places_of_the_lists(faces, tmp_path):
    lists = tmp_path / "elsewhere"
    lists.mkdir()
    for name in ("peopleDevTrain.txt", "peopleDevTest.txt"):
        (faces.parent / name).rename(lists / name)
    assert "peopleDevTrain.txt is in none of" in refused(faces)
    assert len(build(faces, lists=str(lists))) == 48
    (lists / "link").symlink_to(faces, target_is_directory=True)  # the lists are beside the link
    assert len(build(lists / "link")) == 48
    (lists / "peopleDevTest.txt").rename(faces / "peopleDevTest.txt")
    shutil.copy(lists / "peopleDevTrain.txt", faces)
    assert len(build(faces)) == 48
    assert "people.txt is in none of" in refused(faces, view="folds", lists=str(lists))


def test_all_problems_are_reported_at_once(faces):
    (faces / "Person_00" / "Person_00_0002.jpg").unlink()
    (faces / "Person_09" / "Person_09_0001.jpg").rename(faces / "Person_09" / "portrait.jpg")
    twice = faces / "Person_01" / "Person_01_0001.jpg"
    shutil.copy(twice, twice.with_suffix(".png"))
    train = faces.parent / "peopleDevTrain.txt"
    train.write_text(train.read_text().replace("Person_02\t5", "Person_01\t7"))
    train, missing = "  - peopleDevTrain.txt", "Person_01/Person_01_0006, Person_01/Person_01_0007."
    assert refused(faces).splitlines() == [
        f"{faces} has 6 problems:",
        "  - 1 image is not named like NAME/NAME_0001.jpg: Person_09/portrait.jpg.",
        "  - there are several files of Person_01/Person_01_0001. Keep only one.",
        f"{train}: line 2: 1 of the 5 images of Person_00 are missing: Person_00/Person_00_0002.",
        f"{train}: line 4: Person_01 is already in line 3.",
        f"{train}: line 4: 2 of the 7 images of Person_01 are missing: {missing}",
        "  - peopleDevTest.txt: line 2: 1 of the 5 images of Person_09 are missing:"
        " Person_09/Person_09_0001.",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ten\n", "line 1 is 'ten' where the number of folds is expected."),
        (
            "2\n2\nA\t5\n1\nB\t5\n",
            "line 4 is '1' where 'NAME images' of person 2 of 2 is expected.",
        ),
        ("1\n1\nA\t5\nB\t5\n", "line 4 is after the last person that the list counts."),
        ("1\n1\nPerson_00\t5\n", "fold = 1: people.txt has 1 folds; one tests and the others"),
        ("2\n1\nPerson_00\t5\n1\nPerson_00\t5\n", "line 5: Person_00 is already in line 3."),
    ],
)
def test_wrong_lists_of_people_are_refused(faces, text, says):
    (faces.parent / "people.txt").write_text(text)
    assert "people.txt" in (message := refused(faces, view="folds")) and says in message


def test_lists_that_do_not_fit_the_view_are_refused(faces):
    lists = faces.parent
    assert "fold = 4: people.txt has 3 folds;" in refused(faces, view="folds", fold=4)
    with pytest.raises((DataError, RecipeError), match="fold"):
        build(faces, view="folds", fold=0)
    assert "is not a folder" in refused(faces / "none")
    shutil.copy(lists / "peopleDevTrain.txt", lists / "peopleDevTest.txt")
    assert "put people on both sides, training and test: Person_00, Person_01" in refused(faces)


def test_skip_bad(faces):
    (faces / "Person_00" / "Person_00_0002.jpg").write_text("no image")
    data = build(faces, skip_bad=True)
    assert len(data) == 47 and "Person_00/Person_00_0002.jpg" not in data.keys
    assert len(data.splits) == 47
    with pytest.raises(DataError, match="skip_bad = true"):
        build(faces)[1]


def test_training_on_one_view_and_verification_with_both_lists(cli, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"name": "core.lfw", "folder": str(made / "faces"), "view": "folds", "fold": 3}
    Path("faces.toml").write_text(tomli_w.dumps({**RECIPE, "data": data}), encoding="utf-8")
    assert cli("train", "faces.toml").code == 0
    verify = ("evaluate", "runs/faces", "--protocol", "verification", "--json", "--pairs")
    done = cli(*verify, made / "pairs.txt")
    assert done.code == 0, done.err
    actual = json.loads(done.out)
    counts = {"same": 12, "different": 12, "items": 24, "folds": 3}
    assert actual["pairs"] == {**counts, "file": str(made / "pairs.txt")}
    (note, *_) = actual["notes"]
    assert note.startswith("16 of 24 pairs") and note.endswith("without such pairs: 3.")
    done = cli(*verify, made / "pairsDevTest.txt")
    assert done.code == 0 and json.loads(done.out)["pairs"]["folds"] == 4
    wrong = tmp_path / "pairs.txt"
    text = (made / "pairs.txt").read_text().replace("3\t4\n", "3\t5\n", 1)
    wrong.write_text(text.replace("Person_00\t1\t2", "Nobody\t1\t2"))
    done = cli(*verify, wrong)
    assert done.code == 2 and done.out == ""
    assert "states 3 × 5 same and as many different pairs, 30 lines; 24 follow." in done.err
    assert "line 2: 'Nobody/Nobody_0001': there is no such item" in done.err
