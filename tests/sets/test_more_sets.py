"""Vehicles, people, nature, landmarks and sets of classes, on small folders in the published
layouts.
"""

from __future__ import annotations

import layouts
import numpy as np
from layouts import refused, sides
from retrieval.data.splits import make_splits
from retrieval.recipe.tables import Split

from retrieval_sets import (
    caltech101,
    caltech256,
    cifar100,
    dtd,
    food101,
    google_landmarks_v2,
    inaturalist2018,
    market1501,
    vehicle_id,
    veri776,
)


def test_vehicles_of_three_sizes(tmp_path):
    layouts.vehicle_id(tmp_path / "VehicleID_V1.0")
    for size, tested in (("small", "33344 4"), ("medium", "55566 6"), ("large", "77788 8")):
        data = vehicle_id(tmp_path, size=size, counts="any")
        assert sides(data) == {"train": list("111222"), "test": list(tested.replace(" ", ""))}


def test_people_of_market_without_junk_and_with_cameras(tmp_path):
    data = market1501(layouts.market(tmp_path), counts="any")
    assert {side: sorted(set(labels)) for side, labels in sides(data).items()} == {
        "train": ["0002", "0007"],
        "query": ["0001", "0003"],
        "gallery": ["0000", "0001", "0003"],
    }
    assert data.metadata is not None and {m["camera"] for m in data.metadata} == {"c1", "c2"}
    assert list(data.notes) == ["2 junk images are left out."]
    actual = make_splits(data, Split(validation=0))
    assert actual.gallery is not None and (len(actual.query), len(actual.gallery)) == (2, 6)
    (tmp_path / "query" / "0001_c1s1_001451_03.jpg").rename(tmp_path / "query" / "someone.jpg")
    assert "1 images are not named ID_cCAMERA_…" in refused(market1501, tmp_path, counts="any")


def test_veri_and_an_empty_gallery(tmp_path):
    root = layouts.veri(tmp_path / "VeRi")
    data = veri776(tmp_path, counts="any")
    counts = {side: len(labels) for side, labels in sides(data).items()}
    assert counts == {"train": 4, "query": 2, "gallery": 4}
    for file in (root / "image_test").iterdir():
        file.unlink()
    text = refused(veri776, root, counts="any")
    assert "holds no image" in text and "there are queries, but no image is in the gallery." in text


def test_species_of_both_sides(tmp_path):
    root = layouts.inat(tmp_path)
    data = inaturalist2018(root, counts="any")
    assert sides(data) == {"train": ["10", "10", "11", "11"], "test": ["12", "12", "13", "13"]}
    assert data.metadata is not None and data.metadata[0] == {"group": "Aves"}


def test_landmarks_and_their_queries(tmp_path):
    data = google_landmarks_v2(layouts.landmarks(tmp_path), counts="any")
    train, gallery = ["7", "7", "9", "9"], ["3", "4"] * 3
    assert sides(data) == {"train": train, "gallery": gallery, "query": ["3", "4"]}


def test_dishes_textures_and_things(tmp_path):
    food = food101(layouts.food(tmp_path / "food-101").parent, counts="any")
    assert sides(food)["test"] == ["apple_pie"] * 2 + ["sushi"] * 2
    actual = sides(dtd(layouts.dtd(tmp_path / "dtd"), partition=2, counts="any"))
    assert set(actual) == {"train", "validation", "test"}
    assert set(actual["test"]) == {"banded", "woven"}
    for load, make in ((caltech101, layouts.caltech101), (caltech256, layouts.caltech256)):
        data = load(make(tmp_path / "caltech"), counts="any")
        # without the background class or the clutter class
        assert sides(data) == {"": ["anchor", "anchor", "cup", "cup"]}


def test_cifar100_fine_and_coarse(tmp_path):
    root = layouts.cifar100(tmp_path)
    data = cifar100(root, counts="any")
    assert data.labels == ["fine_0", "fine_1", "fine_2", "fine_3", "fine_0", "fine_1"]
    assert data.splits == ["train"] * 4 + ["test"] * 2 and data.arrays is not None
    record = np.fromfile(root / "train.bin", np.uint8).reshape(4, -1)[2, 2:]
    assert np.array_equal(data.arrays[2], record.reshape(3, 32, 32).transpose(1, 2, 0))
    assert cifar100(root, labels="coarse", counts="any").labels[1] == "coarse_1"
    broken = bytearray((root / "train.bin").read_bytes())
    broken[1] = 100
    (root / "train.bin").write_bytes(broken)
    text = refused(cifar100, root, counts="any")
    assert "record 0 has the label 100; labels go from 0 to 99" in text
    (root / "train.bin").write_bytes(broken[:-1])
    assert "records of 3,074 bytes" in refused(cifar100, root, counts="any")
    (root / "fine_label_names.txt").write_text("apple\n")
    assert "has 1 names instead of 100" in refused(cifar100, root, counts="any")
