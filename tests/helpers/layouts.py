"""Small folders in the layouts of published data sets, with real images."""

import itertools
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from retrieval.data.datasets import Dataset
from retrieval.errors import DataError
from scipy.io import savemat

SIZE = (24, 16)


def picture(path: Path, number: int) -> None:
    """Write an image that differs for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    options = {"quality": 95} if path.suffix == ".jpg" else {}
    Image.fromarray(pixels).save(path, **options)


def lines(path: Path, rows: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def idx(array: NDArray[np.uint8]) -> bytes:
    """Return an array in the format of MNIST's files."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.tobytes()


def cub(root: Path) -> Path:
    names = {c: f"{c:03d}.Bird_{c}" for c in (1, 2, 100, 101, 200)}
    items = [(c, f"{name}/Bird_{c}_{i}.jpg") for c, name in names.items() for i in range(2)]
    for number, (_, path) in enumerate(items):
        picture(root / "images" / path, number)
    lines(root / "classes.txt", (f"{c} {name}" for c, name in names.items()))
    for name, rows in {
        "images": [path for _, path in items],
        "image_class_labels": [c for c, _ in items],
        "bounding_boxes": ["2.0 3.0 10.0 5.0"] * len(items),
    }.items():
        lines(root / f"{name}.txt", (f"{i} {row}" for i, row in enumerate(rows, 1)))
    return root


BOX = {"bbox_x1": 3, "bbox_y1": 2, "bbox_x2": 13, "bbox_y2": 9}


def annotations(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return variables that `savemat` writes as a structure array, as in the files of Cars-196."""
    table = np.zeros((1, len(rows)), dtype=[(name, object) for name in rows[0]])
    for i, row in enumerate(rows):
        for name, value in row.items():
            table[name][0, i] = value if isinstance(value, str) else np.uint8([[value]])
    return {"annotations": table}


def cars_whole(root: Path, classes: tuple[int, ...] = (1, 98, 99, 196)) -> Path:
    rows = []
    for number, c in enumerate(np.repeat(classes, 2).tolist()):
        path = f"car_ims/{number + 1:06d}.jpg"
        picture(root / path, number)
        rows.append({"relative_im_path": path, **BOX, "class": c, "test": number % 2})
    savemat(root / "cars_annos.mat", annotations(rows), do_compression=True)
    return root


def cars_divided(root: Path) -> Path:
    (root / "devkit").mkdir(parents=True)
    for side, name in (("train", "train_annos"), ("test", "test_annos_withlabels")):
        rows = []
        for number, label in enumerate((1, 98, 99, 196)):
            file = f"{number + 1:05d}.jpg"
            picture(root / f"cars_{side}" / file, number + 100 * (side == "test"))
            rows.append({**BOX, "class": label, "fname": file})
        savemat(root / "devkit" / f"cars_{name}.mat", annotations(rows))
    return root


def products(root: Path) -> Path:
    number = itertools.count(1)
    for side, ids in (("train", (1, 2)), ("test", (3, 4))):
        rows = ["image_id class_id super_class_id path"]
        for product, view in itertools.product(ids, range(2)):
            path = f"{('bicycle', 'chair')[product % 2]}_final/{product}_{view}.jpg"
            rows.append(f"{next(number)} {product} {product % 2 + 1} {path}")
            picture(root / path, len(rows) + 10 * product)
        lines(root / f"Ebay_{side}.txt", rows)
    return root


def in_shop(root: Path) -> Path:
    sides = {1: "train train", 4: "train train", 2: "query gallery gallery", 3: "query gallery"}
    rows, boxes = [], []
    for item, statuses in sides.items():
        for view, status in enumerate(statuses.split()):
            path = f"img/WOMEN/Dresses/id_{item:08d}/{view:02d}_front.jpg"
            picture(root / path, 10 * item + view)
            rows.append(f"{path}    id_{item:08d}    {status}")
            boxes.append(f"{path} 1 2 4 5 14 12")
    for name, head, table in (
        ("Eval/list_eval_partition", "image_name item_id evaluation_status", rows),
        ("Anno/list_bbox_inshop", "image_name clothes_type pose_type x_1 y_1 x_2 y_2", boxes),
    ):
        lines(root / f"{name}.txt", [str(len(table)), head, *table])
    return root


def vehicle_id(root: Path) -> Path:
    number = itertools.count(1)
    names = ("train_list", *(f"test_list_{n}" for n in (800, 1600, 2400)))
    for pair, name in enumerate(names):
        rows = [f"{next(number):07d} {2 * pair + 1 + view // 3}" for view in range(6)]
        for file in (row.split()[0] for row in rows):
            picture(root / "image" / f"{file}.jpg", int(file))
        lines(root / "train_test_split" / f"{name}.txt", rows)
    return root


def _cameras(root: Path, folders: tuple[str, str, str], junk: tuple[str, ...] = ()) -> Path:
    train, query, gallery = folders
    sides = {train: ("0002", "0007"), query: ("0001", "0003"), gallery: ("0001", "0003", *junk)}
    number = itertools.count()
    for folder, people in sides.items():
        for person in people:
            for camera in (1,) if folder == query else (1, 2):
                name = f"{person}_c{camera}s1_00{camera}451_03.jpg"
                picture(root / folder / name, next(number))
    return root


def market(root: Path) -> Path:
    return _cameras(root, ("bounding_box_train", "query", "bounding_box_test"), ("0000", "-1"))


def veri(root: Path) -> Path:
    return _cameras(root, ("image_train", "image_query", "image_test"))


def inat(root: Path) -> Path:
    sides = {"train": ["Aves/10", "Fungi/11"], "test": ["Aves/12", "Plantae/13"]}
    files: list[str] = []
    for side, species in sides.items():
        rows = []
        for left in (name for name in species for _ in range(2)):
            files.append(f"train_val2018/{left}/{len(files) + 1}.jpg")
            picture(root / files[-1], len(files))
            rows.append(f"Inaturalist/{files[-1]}")
        lines(root / "Inat_dataset_splits" / f"Inat_{side}_set1.txt", rows)
    return root


def landmarks(root: Path) -> Path:
    def images(side: str, numbers: range) -> list[str]:
        names = [f"{number:03x}f{number:012x}" for number in numbers]
        for number, name in zip(numbers, names, strict=True):
            picture(root / side / name[0] / name[1] / name[2] / f"{name}.jpg", number)
        return names

    train, test = images("train", range(4)), images("test", range(40, 43))
    index = images("index", range(20, 26))
    tables = {
        "train_clean": ["landmark_id,images", f"7,{train[0]} {train[1]}"],
        "index_image_to_landmark": ["id,landmark_id"],
        "retrieval_solution_v2.1": [
            "id,images,Usage",
            f"{test[0]},{index[0]} {index[2]} {index[1]},Public",
            f"{test[1]},{index[1]},Private",
            f"{test[2]},None,Ignored",
        ],
    }
    tables["train_clean"].append(f"9,{train[2]} {train[3]}")
    tables["index_image_to_landmark"] += [f"{name},{3 + i % 2}" for i, name in enumerate(index)]
    for name, rows in tables.items():
        lines(root / f"{name}.csv", rows)
    return root


def revisited(root: Path, name: str = "roxford5k", protocol: int = 2, listed: bool = False) -> Path:
    """Write two queries and six images; `listed` writes lists in place of arrays."""
    images = [f"tower_{i:06d}" for i in range(6)]
    queries = ["gate_000001", "tower_000009"]
    for number, image in enumerate([*images, *queries]):
        picture(root / "jpg" / f"{image}.jpg", number)
    as_kept = list if listed else np.array
    gnd = [
        {"bbx": [2.0, 3.0, 14.0, 9.0], "easy": [0, 2], "hard": [1], "junk": [5]},
        {"bbx": [1.0, 1.0, 24.0, 16.0], "easy": [], "hard": [4], "junk": []},
    ]
    kept = [{key: as_kept(value) for key, value in entry.items()} for entry in gnd]
    table = {"imlist": images, "qimlist": queries, "gnd": kept}
    (root / f"gnd_{name}.pkl").write_bytes(pickle.dumps(table, protocol=protocol))
    return root


def gpr1200(root: Path) -> Path:
    for number in range(6):
        picture(root / "images" / f"{number // 2}_n0{number}_x.jpg", number)
    return root


def met(root: Path) -> Path:
    tables = {
        "MET_database": [{"id": 100 + i // 2, "path": f"MET/{i}/0.jpg"} for i in range(4)],
        "testset": [{"MET_id": 101, "path": "test_met/a.jpg"}, {"path": "test_other/b.jpg"}],
        "valset": [{"MET_id": 100, "path": "val_met/c.jpg"}],
    }
    for name, rows in tables.items():
        for number, row in enumerate(rows):
            picture(root / "images" / str(row["path"]), number)
        lines(root / "ground_truth" / f"{name}.json", [json.dumps(rows)])
    return root


def ilias(root: Path) -> Path:
    for number, name in enumerate(("lamp_000", "shoe_001")):
        for path in (f"query/Q{number:03d}_00", f"pos/P{number:03d}_00", f"pos/P{number:03d}_01"):
            picture(root / name / f"{path}.jpg", number)
            lines(root / name / f"{path}_bbox.txt", ["1 1 4 4"])
        lines(root / name / f"query/T{number:03d}.txt", ["a thing"])
    for number in range(3):
        picture(root / "yfcc" / "00000" / f"{number}.jpg", 50 + number)
    return root


def disc21(root: Path) -> Path:
    for number in range(3):
        picture(root / "queries" / f"Q0000{number}.jpg", number)
    for number in range(4):
        picture(root / "references" / f"R00000{number}.jpg", 10 + number)
    rows = ["query_id,reference_id", "Q00000,R000002", "Q00001,", "Q00002,R000000"]
    lines(root / "public_ground_truth.csv", [*rows, "Q00002,R000003"])
    return root


def wildlife(root: Path) -> Path:
    rows = ["image_id,identity,path,split,species,dataset"]
    sides = ("a train", "a train", "b database", "a test", "c query")
    for number, (identity, split) in enumerate(side.split() for side in sides):
        path = f"images/{split}/{number}.jpg"
        picture(root / path, number)
        rows.append(f"{number},{identity},{path},{split},lynx,LynxID2025")
    lines(root / "metadata.csv", rows)
    return root


def food(root: Path) -> Path:
    number = itertools.count(1)
    for side in ("train", "test"):
        names = [f"{dish}/{next(number)}" for dish in ("apple_pie", "sushi") for _ in range(2)]
        for name in names:
            picture(root / "images" / f"{name}.jpg", int(name.partition("/")[2]))
        lines(root / "meta" / f"{side}.txt", names)
    return root


def dtd(root: Path) -> Path:
    number = itertools.count(1)
    for side in ("train", "val", "test"):
        names = [f"{t}/{t}_{next(number):04d}.jpg" for t in ("banded", "woven") for _ in range(2)]
        for name in names:
            picture(root / "images" / name, int(name[-8:-4]))
        for partition in (1, 2):
            lines(root / "labels" / f"{side}{partition}.txt", names)
    return root


def caltech(root: Path, name: str, left_out: str) -> Path:
    for number, kind in enumerate(("cup", "anchor", left_out)):
        for i in range(2):
            picture(root / name / kind / f"image_{i:04d}.jpg", 2 * number + i)
    return root


caltech101 = partial(caltech, name="101_ObjectCategories", left_out="BACKGROUND_Google")
caltech256 = partial(caltech, name="256_ObjectCategories", left_out="257.clutter")


def cifar100(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for side, count in (("train", 4), ("test", 2)):
        planes = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        codes = np.array([[i % 20, i % 100] for i in range(count)], np.uint8)
        np.concatenate([codes, planes], axis=1).tofile(root / f"{side}.bin")
    lines(root / "coarse_label_names.txt", (f"coarse_{i}" for i in range(20)))
    lines(root / "fine_label_names.txt", (f"fine_{i}" for i in range(100)))
    return root


def refused(load: Callable[..., Dataset], folder: Path, **values: Any) -> str:
    """Return the error message for a folder."""
    with pytest.raises(DataError) as error:
        load(folder, **values)
    return str(error.value)


def sides(data: Dataset) -> dict[str, list[str]]:
    """Return the labels of each role, or of each side for items without a role."""
    actual: dict[str, list[str]] = {}
    for i, label in enumerate(data.labels):
        role = data.roles[i] if data.roles else ""
        actual.setdefault(role or (data.splits[i] if data.splits else ""), []).append(label)
    return actual
