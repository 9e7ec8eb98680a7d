"""CUB-200-2011, Cars-196, Stanford Online Products and In-Shop, on small folders in the published
layouts; and the errors of all published sets.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import layouts
import pytest
from layouts import refused, sides
from PIL import Image
from retrieval.data.cache import dataset_identity
from retrieval.data.datasets import Dataset
from retrieval.data.image_archives import Count
from retrieval.data.splits import make_splits
from retrieval.errors import DataError
from retrieval.recipe.tables import Split

from retrieval_sets import (
    caltech101,
    caltech256,
    cars196,
    cifar100,
    cub200,
    disc21,
    dtd,
    food101,
    google_landmarks_v2,
    gpr1200,
    ilias,
    in_shop,
    inaturalist2018,
    market1501,
    met,
    roxford5k,
    stanford_online_products,
    vehicle_id,
    veri776,
)
from retrieval_sets.fine_grained import CUB
from retrieval_sets.published import Published, Row, count_problems

SETS: dict[str, tuple[Callable[..., Dataset], Callable[[Path], Path], str]] = {
    "cub": (cub200, layouts.cub, "as published its train side has 5,864 images of 100 classes"),
    "cars": (cars196, layouts.cars_whole, "8,054 images of 98 classes"),
    "cars_divided": (cars196, layouts.cars_divided, "8,131 images of 98 classes"),
    "products": (stanford_online_products, layouts.products, "as published its train side has"),
    "in_shop": (in_shop, layouts.in_shop, "as published its train side has"),
    "vehicle_id": (vehicle_id, layouts.vehicle_id, "110,178 images of 13,134 classes or 113,346"),
    "veri": (veri776, layouts.veri, "its gallery side has 11,579 images of 200 classes"),
    "market": (market1501, layouts.market, "has 3,368 images of 750 classes; here it has 2 images"),
    "inat": (inaturalist2018, layouts.inat, "its test side has 136,093 images of 2,452 classes"),
    "landmarks": (google_landmarks_v2, layouts.landmarks, "has 761,757 images; here it has 6"),
    "roxford": (roxford5k, layouts.revisited, "its query side has 70 images; here it has 2"),
    "gpr1200": (gpr1200, layouts.gpr1200, "its test side has 12,000 images of 1,200 classes"),
    "met": (met, layouts.met, "its gallery side has 397,121 images of 224,408 classes"),
    "ilias": (ilias, layouts.ilias, "its query side has 1,232 images of 1,000 classes"),
    "disc21": (disc21, layouts.disc21, "its query side has 25,000 images or 50,000 images"),
    "food": (food101, layouts.food, "its train side has 75,750 images of 101 classes"),
    "dtd": (dtd, layouts.dtd, "its validation side has 1,880 images of 47 classes"),
    "caltech101": (caltech101, layouts.caltech101, "it has 8,677 images of 101 classes"),
    "caltech256": (caltech256, layouts.caltech256, "it has 29,780 images of 256 classes"),
    "cifar100": (cifar100, layouts.cifar100, "its test side has 10,000 images of 100 classes"),
}
PARTITION, EBAY = "Eval/list_eval_partition.txt", "Ebay_train.txt"
VEHICLES, SOLUTION = "train_test_split/train_list.txt", "retrieval_solution_v2.1.csv"
CLASSES = "image_class_labels.txt"
FOLDERS = ("veri", "market", "gpr1200", "ilias", "caltech101", "caltech256", "cifar100")
"""Sets without lists, which consist of the images in their folders."""


def test_birds_by_species(tmp_path):
    layouts.cub(tmp_path / "CUB_200_2011")
    data = cub200(tmp_path, counts="any")  # the parent folder
    assert {side: sorted(set(labels)) for side, labels in sides(data).items()} == {
        "train": ["001.Bird_1", "002.Bird_2", "100.Bird_100"],
        "test": ["101.Bird_101", "200.Bird_200"],
    }
    assert data.keys[0] == "001.Bird_1/Bird_1_0.jpg" and data[0].size == layouts.SIZE
    assert len(make_splits(data, Split(validation=0)).query) == 4


@pytest.mark.parametrize("layout", ["cars_whole", "cars_divided"])
def test_cars_in_both_layouts(tmp_path, layout):
    root = getattr(layouts, layout)(tmp_path / "cars")
    data = cars196(root, counts="any")
    assert {side: sorted(set(labels)) for side, labels in sides(data).items()} == {
        "train": ["001", "098"],
        "test": ["099", "196"],
    }


def test_products_and_their_categories(tmp_path):
    data = stanford_online_products(layouts.products(tmp_path), counts="any")
    assert sides(data) == {"train": ["1", "1", "2", "2"], "test": ["3", "3", "4", "4"]}
    categories = [row["category"] for row in data.metadata or ()]
    assert categories[::2] == ["chair", "bicycle"] * 2


def test_in_shop_has_queries_and_a_gallery(tmp_path):
    data = in_shop(layouts.in_shop(tmp_path), counts="any")
    counts = {side: len(labels) for side, labels in sides(data).items()}
    assert counts == {"train": 4, "query": 2, "gallery": 3}
    actual = make_splits(data, Split(validation=0))
    assert actual.gallery is not None and (len(actual.query), len(actual.gallery)) == (2, 3)


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("cub", (2, 3, 12, 8)),
        ("cars", (3, 2, 13, 9)),
        ("cars_divided", (3, 2, 13, 9)),
        ("in_shop", (4, 5, 14, 12)),
    ],
)
def test_images_are_cropped_to_boxes(tmp_path, name, box):
    load, make, _ = SETS[name]
    root = make(tmp_path / "set")
    whole, cut = load(root, counts="any"), load(root, crop=True, counts="any")
    image, part = whole[1], cut[1]
    assert isinstance(image, Image.Image) and isinstance(part, Image.Image)
    assert part.tobytes() == image.crop(box).tobytes()
    assert dataset_identity(whole) != dataset_identity(cut)  # their cached features differ


def test_a_box_outside_its_image_is_named(tmp_path):
    root = layouts.cub(tmp_path)
    path = root / "bounding_boxes.txt"
    path.write_text(path.read_text().replace("1 2.0 3.0 10.0 5.0", "1 30.0 3.0 10.0 5.0", 1))
    data = cub200(root, crop=True, counts="any")
    says = r"Bird_1_0.jpg: its box \(30, 3, 40, 8\) covers no pixel .* 24 × 16"
    with pytest.raises(DataError, match=says):
        data[0]


@pytest.mark.parametrize("name", SETS)
def test_counts_that_differ_from_the_published_ones_are_refused(tmp_path, name):
    load, make, says = SETS[name]
    text = refused(load, make(tmp_path / "set"))
    assert says in text and 'set counts = "any"' in text
    assert "The folder must hold" in text and "Get " in text


def test_exactly_the_published_counts_are_accepted():
    rows = [Row(f"{i}", f"{i % 100}", "train") for i in range(5_864)]
    rows += [Row(f"{i}", f"{100 + i % 100}", "test") for i in range(5_924)]
    assert count_problems(CUB, rows) == []
    (problem,) = count_problems(CUB, rows[1:])
    assert "has 5,864 images of 100 classes; here it has 5,863 images of 100 classes" in problem
    either = Published("x", "y", "z", {"query": [Count(3), Count(2, 2)]})
    queries = [Row("a", "0", "test", "query"), Row("b", "0", "test", "query")]
    says = "3 images or 2 images of 2 classes; here it has 2 images of 1 class"
    assert says in count_problems(either, queries)[0]


@pytest.mark.parametrize("name", [name for name in SETS if name not in FOLDERS])
def test_all_missing_images_are_reported_at_once(tmp_path, name):
    load, make, _ = SETS[name]
    root = make(tmp_path / "set")
    deleted = sorted(root.rglob("*.jpg"))[:2]
    for file in deleted:
        file.unlink()
    text = refused(load, root, counts="any")
    assert "2 of " in text and "images are missing in" in text
    assert all(file.name in text for file in deleted)


@pytest.mark.parametrize("name", SETS)
def test_an_error_says_what_an_empty_folder_lacks_and_where_to_get_it(tmp_path, name):
    load, _, _ = SETS[name]
    text = refused(load, tmp_path)
    assert "is missing" in text and "The folder must hold" in text and "Get " in text
    assert "is not a folder" in refused(load, tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "list_file", "old", "new", "says"),
    [
        ("cub", CLASSES, "1 1\n", "1 201\n", "'201' is not a number from 1 to 200."),
        ("cub", CLASSES, "3 2\n", "3 two\n", "'two' is not a number"),
        ("cub", "bounding_boxes.txt", " 5.0\n", " nine\n", "line 1: 2.0 3.0 10.0 nine are not"),
        ("in_shop", PARTITION, " train\n", " trane\n", "line 3: 'trane' is not train, query or"),
        ("in_shop", PARTITION, "", "img/x.jpg id_1\n", "1 line does not have 3 values: 12."),
        ("products", EBAY, "", "9 1 1 ../x.jpg\n", "1 paths lead out of the folder: '../x.jpg'"),
        ("products", EBAY, "", "9 1 1 /etc/x.jpg\n", "1 paths lead out of the folder"),
        ("products", EBAY, "", "9 1 1 bicycle_final/2_0.jpg\n", "1 images are listed twice: bi"),
        ("products", EBAY, "", "9" * (1 << 20) + " 1 1 x.jpg\n", "lines do not have 4 values"),
        ("products", EBAY, "image_id", "\udcff\udcfe", "is not UTF-8 text"),
        ("vehicle_id", VEHICLES, "", "0000008 3\n", "1 vehicles are on both sides"),
        ("vehicle_id", VEHICLES, "", "0000008\n", "train_list.txt: 1 line does not have 2 values"),
        ("vehicle_id", VEHICLES, "", "00x 1\n", "line 7: '00x' is not a number"),
        ("landmarks", SOLUTION, ",Private", " ffff,Private", "line 3: ffff is not in the index."),
    ],
)
def test_wrong_lists_are_refused(tmp_path, name, list_file, old, new, says):
    load, make, _ = SETS[name]
    path = make(tmp_path / "set") / list_file
    text = path.read_text()
    changed = text.replace(old, new, 1) if old else text + new
    path.write_bytes(changed.encode("utf-8", "surrogateescape"))
    assert says in refused(load, tmp_path / "set", counts="any")


def test_cars_of_unknown_classes(tmp_path):
    cars = layouts.cars_whole(tmp_path, classes=(0, 197, 5))
    text = refused(cars196, cars, counts="any")
    assert "car_ims/000001.jpg has the class 0, which is not from 1 to 196." in text
    assert "the class 197" in text


def test_an_empty_gallery_and_a_gallery_without_a_class_of_the_queries(tmp_path):
    shop = layouts.in_shop(tmp_path)
    lists = shop / "Eval" / "list_eval_partition.txt"
    published = lists.read_text()
    lists.write_text(published.replace("gallery", "train"))
    text = refused(in_shop, shop, counts="any")
    assert "there are queries, but no image is in the gallery." in text
    rows = published.splitlines()
    lists.write_text("\n".join(rows[:-1]) + "\n")  # the last item has only a query left
    assert "1 class of queries has no image in the gallery: id_00000003." in refused(in_shop, shop)
    notes = make_splits(in_shop(shop, counts="any"), Split(validation=0)).notes
    assert notes[-1].startswith("1 queries have no item of their class in the gallery")


def bomb() -> bytes:
    """A file of format 5 whose one element unpacks to a gigabyte."""
    packed = zlib.compressobj(9)
    first, again = (
        packed.compress(bytes(1 << 20)) + packed.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    data = first + again * 1023
    return (
        b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + struct.pack("<II", 15, len(data)) + data
    )


def test_damaged_and_hostile_annotations(tmp_path):
    root = layouts.cars_whole(tmp_path)
    path = root / "cars_annos.mat"
    sound = path.read_bytes()
    for content, says in (
        (sound[: len(sound) // 2], "was cut short"),
        (sound[:200] + bytes(40) + sound[240:], "damaged"),
        (b"\x89HDF\r\n\x1a\n" + bytes(1000), "is not a MATLAB file of format 5"),
        (bomb(), "unpacks to more than 268,435,456 bytes"),
    ):
        path.write_bytes(content)
        assert says in refused(cars196, root, counts="any")
    layouts.savemat(path, {"other": [1]})
    assert "has no structure array 'annotations'" in refused(cars196, root, counts="any")
    layouts.savemat(path, layouts.annotations([{"fname": "x.jpg", "class": 1}]))
    assert "'annotations' has no field relative_im_path" in refused(cars196, root, counts="any")


def test_skip_bad_leaves_unreadable_images_out(tmp_path):
    root = layouts.products(tmp_path)
    next(root.rglob("*.jpg")).write_text("no image")
    assert len(stanford_online_products(root, counts="any")) == 8
    assert len(stanford_online_products(root, counts="any", skip_bad=True)) == 7
