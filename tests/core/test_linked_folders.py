"""Every reader of folders follows links, stops at cycles, and names links that lead nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import retrieval
import torchvision
from layouts import picture
from retrieval.base.photo_files import files_below, leads_nowhere
from retrieval.errors import DataError
from retrieval.export.export_backbone import Photos
from retrieval.images.image_files import find_images
from retrieval.index.sources import collect

from retrieval_lab.findings import Findings
from retrieval_server.client.push import walk


def keys(folder: Path, **values: Any) -> list[str]:
    return list(retrieval.create("dataset", "core.image_folder", folder=str(folder), **values).keys)


def found_by(folder: Path) -> dict[str, list[str]]:
    """The images below a folder, by each reader of folders."""
    return {
        "training": keys(folder),
        "index": [item.id for item in collect([folder], "image").items],
        "push": [path.relative_to(folder).as_posix() for path, image in walk(folder) if image],
        "find_images": [p.relative_to(folder).as_posix() for p in find_images(folder).images],
    }


@pytest.fixture
def photos(tmp_path):
    """Four classes of three images."""
    for number in range(12):
        picture(tmp_path / "photos" / f"{number // 3}" / f"{number % 3}.png", number)
    return tmp_path / "photos"


@pytest.fixture
def linked(photos):
    """The same folder, with three classes as links, one of them through a second link."""
    folder = photos.parent / "linked"
    folder.mkdir()
    (photos.parent / "store").symlink_to(photos)
    for label, home in (("0", photos), ("1", photos), ("2", photos.parent / "store")):
        (folder / label).symlink_to(home / label)
    (folder / "3").mkdir()
    for number in range(3):
        (folder / "3" / f"{number}.png").symlink_to(photos / "3" / f"{number}.png")
    return folder


def checked(folder: Path) -> Findings:
    return retrieval.check_data(folder, progress=False)


def test_every_reader_follows_links_as_torchvision_does(photos, linked):
    expected = [f"{label}/{number}.png" for label in "0123" for number in range(3)]
    theirs = torchvision.datasets.ImageFolder(str(linked)).samples
    assert [Path(path).relative_to(linked).as_posix() for path, _ in theirs] == expected
    assert found_by(linked) == dict.fromkeys(found_by(photos), expected) == found_by(photos)
    assert len(Photos([linked]).files) == 12
    actual = checked(linked)
    assert actual.clean and len(actual.subjects) == 12 and actual.as_dict()["labels"] == 4


def test_linked_folders_define_the_split(photos):
    folder = photos.parent / "split"
    folder.mkdir()
    (folder / "train").symlink_to(photos)
    (folder / "test").symlink_to(photos)
    data = retrieval.create("dataset", "core.image_folder", folder=str(folder))
    assert list(data.splits or ()) == ["test"] * 12 + ["train"] * 12
    assert checked(folder).counts()["leaks"] == 12


def test_a_linked_class_folder_keeps_the_name_of_the_link(photos):
    cats = photos.parent / "cats"
    cats.symlink_to(photos / "0")
    assert {item.label for item in collect([cats], "image").items} == {"cats"}
    both = collect([cats, photos], "image").items
    cats = [f"cats/{number}.png" for number in range(3)]
    assert [item.id for item in both][:4] == [*cats, "photos/0/0.png"]


def test_cycles_of_links_end(photos):
    plain = sorted(files_below(photos))
    (photos / "0" / "up").symlink_to(photos)
    (photos / "1" / "here").symlink_to(".")
    actual = sorted(files_below(photos))
    assert set(plain) <= set(actual) and len(actual) == 12  # `up` leads to the folder around it
    (photos / "2" / "aside").symlink_to(photos / "3")
    (photos / "3" / "aside").symlink_to(photos / "2")
    assert len(list(files_below(photos))) == 12 + 3 + 3


def test_too_many_paths_through_links_are_refused(tmp_path):
    names = [f"folder{number}" for number in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        for other in names:
            (tmp_path / name / other).symlink_to(tmp_path / other)
    with pytest.raises(DataError, match="more than 100 times"):
        list(files_below(tmp_path))


def test_links_that_lead_nowhere_are_named(linked, caplog):
    (linked / "4").symlink_to(linked / "gone")
    (linked / "3" / "9.png").symlink_to(linked / "9.png")
    (linked / "3" / "loop.png").symlink_to("loop.png")
    assert leads_nowhere(linked / "4") and leads_nowhere(linked / "3" / "loop.png")
    sentence = r"3 links lead nowhere: 3/9\.png, 3/loop\.png, 4\. Mend or remove them\."
    with pytest.raises(DataError, match=f"{sentence} Set .*skip_bad"):
        keys(linked)
    data = retrieval.create("dataset", "core.image_folder", folder=str(linked), skip_bad=True)
    assert len(data) == 12 and any("3 links lead nowhere" in note for note in data.notes)  # type: ignore[attr-defined]
    assert len(Photos([linked]).files) == 12 and "3 links lead nowhere" in caplog.text
    actual = checked(linked)
    assert [why for _, why in actual.broken] == [
        f"{linked}/{name} is a link that leads nowhere." for name in ("3/9.png", "3/loop.png", "4")
    ]
    assert not actual.clean
    assert {"4", "9.png", "loop.png"} <= {path.name for path, image in walk(linked) if image}


def test_a_folder_with_only_broken_links(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0").symlink_to("gone")
    says = r"holds no image .* 1 link leads nowhere: 0\. Mend or remove it"
    with pytest.raises(DataError, match=says):
        find_images(tmp_path / "photos")


def test_published_layouts_follow_links_and_name_broken_ones(linked):
    root = linked.parent / "101_ObjectCategories"
    root.symlink_to(linked)
    values = {"folder": str(linked.parent), "counts": "any"}
    assert len(retrieval.create("dataset", "sets.caltech101", **values)) == 12
    (linked / "4").symlink_to("gone")
    with pytest.raises(DataError, match="1 link leads nowhere: 4"):
        retrieval.create("dataset", "sets.caltech101", **values)
    assert len(retrieval.create("dataset", "sets.caltech101", **values, skip_bad=True)) == 12
