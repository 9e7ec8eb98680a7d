"""Vehicles and people seen by several cameras: VehicleID, VeRi-776 and Market-1501."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from retrieval.errors import DataError
from retrieval.helpers import Count, Counts
from retrieval.plugin import Dataset, find_images

from retrieval_sets.published import (
    SPLIT_AND_ROLE,
    Listing,
    Published,
    Row,
    documented,
    numbers,
    read_lines,
)

_SIZES = {"small": 800, "medium": 1600, "large": 2400}
# The paper and the released lists give different counts, for training and for testing.
_TEST_IMAGES = {"small": (6_493, 7_332), "medium": (13_377, 12_995), "large": (19_777, 20_038)}
_VEHICLES = (
    "image/ and train_test_split/ with train_list.txt and test_list_800.txt, test_list_1600.txt or"
    " test_list_2400.txt"
)
_VEHICLE_TRAIN = [Count(110_178, 13_134), Count(113_346, 13_164)]
VERI = Published(
    "VeRi-776",
    "its makers, on request (github.com/JDAI-CV/VeRidataset)",
    "image_train/, image_query/ and image_test/",
    {
        "train": [Count(37_778, 576), Count(37_746, 575)],
        "query": [Count(1_678, 200)],
        "gallery": [Count(11_579, 200)],
    },
)
MARKET = Published(
    "Market-1501",
    "its makers (zheng-lab.cecs.anu.edu.au/Project/project_reid.html) or a mirror of it",
    "bounding_box_train/, query/ and bounding_box_test/, as Market-1501-v15.09.15.zip unpacks them",
    {"train": [Count(12_936, 751)], "query": [Count(3_368, 750)], "gallery": [Count(15_913, 751)]},
)
# Market-1501 names junk images by the person −1.
_FILE_NAME = re.compile(r"(-1|\d{4,6})_c(\d{1,3})(?:s\d+)?_.*\.\w+")


@documented
def vehicle_id(
    folder: Path,
    size: Literal["small", "medium", "large"] = "small",
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load VehicleID: vehicles seen by surveillance cameras, with one of its three test sets.

    Liu, Tian, Wang, Pang & Huang, "Deep Relative Distance Learning: Tell the Difference Between
    Similar Vehicles", CVPR 2016. Nothing is downloaded. The paper gives 110,178 training images of
    13,134 vehicles; the released list has 113,346 of 13,164. Both are accepted. The test side has
    no fixed gallery. One random image per vehicle is the gallery, the others are queries, and
    metrics are means over repetitions: set `[evaluate] gallery_items = 1` and `repetitions = 10`.

    Args:
        folder: the folder `VehicleID_V1.0`, or its parent.
        size: number of vehicles in the test set, 800, 1,600 or 2,400.
    """
    published = Published(
        "VehicleID",
        "Peking University, on request (pkuml.org/resources/pku-vehicleid.html)",
        _VEHICLES,
        {
            "train": _VEHICLE_TRAIN,
            "test": [Count(images, _SIZES[size]) for images in _TEST_IMAGES[size]],
        },
        apart="vehicles",
    )
    lists = {"train": "train_list.txt", "test": f"test_list_{_SIZES[size]}.txt"}
    listing = published.listing(
        folder,
        "image",
        *(f"train_test_split/{n}" for n in lists.values()),
        inside=["VehicleID_V1.0"],
    )
    problems = listing.problems
    for side, name in lists.items():
        path = listing.root / "train_test_split" / name
        for line, words in read_lines(path, 2, problems):
            if numbers(path, line, words, problems, 0, 10**9) is not None:
                listing.rows.append(Row(f"{words[0]}.jpg", words[1], side))
    return listing.dataset(counts, skip_bad, images="image")


@documented
def veri776(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load VeRi-776: 776 vehicles seen by 20 cameras, with queries and a gallery.

    Liu, Liu, Mei & Ma, "A Deep Learning-Based Approach to Progressive Vehicle Re-identification for
    Urban Surveillance", ECCV 2016. Nothing is downloaded. 576 vehicles are for training (37,778
    images). Of 200 others, 1,678 images are queries and 11,579 are the gallery. The metadata of an
    item have its camera. Evaluate with `[evaluate] exclude = "camera"` and
    `exclude_label = "same"`.

    Args:
        folder: the folder `VeRi`, or its parent.
    """
    folders = {"train": "image_train", "query": "image_query", "gallery": "image_test"}
    listing = VERI.listing(folder, *folders.values(), inside=["VeRi", "VeRi_with_plate"])
    _add_rows(listing, folders)
    return listing.dataset(counts, skip_bad)


@documented
def market1501(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Market-1501: 1,501 people seen by six cameras, with queries and a gallery.

    Zheng, Shen, Tian, Wang, Wang & Tian, "Scalable Person Re-identification: A Benchmark", ICCV
    2015. Nothing is downloaded. 751 people are for training (12,936 images). Of 750 others, 3,368
    images are queries and 13,115 are the gallery, together with 2,798 distractors (person "0000").
    The 3,819 junk images (person −1) are left out, as in the protocol. The metadata of an item have
    its camera. Evaluate with `[evaluate] exclude = "camera"` and `exclude_label = "same"`.

    Args:
        folder: the folder `Market-1501-v15.09.15`, or its parent.
    """
    folders = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
    inside = ["Market-1501-v15.09.15", "market1501"]
    listing = MARKET.listing(folder, *folders.values(), inside=inside)
    _add_rows(listing, folders)
    people = [row for row in listing.rows if row.label != "-1"]
    if junk := len(listing.rows) - len(people):
        listing.notes.append(f"{junk:,} junk images are left out.")
    listing.rows = people
    return listing.dataset(counts, skip_bad)


def _add_rows(listing: Listing, folders: dict[str, str]) -> None:
    """Add the images of the folder of each part, whose names contain identity and camera."""
    misnamed = []
    root = listing.root
    for part, name in folders.items():
        split, role = SPLIT_AND_ROLE[part]
        try:
            images = find_images(root / name)
        except DataError as error:
            listing.problems.append(str(error))
            continue
        if images.nowhere:
            listing.problems.append(images.dangling(root / name))
        for path in images.images:
            key = path.relative_to(root).as_posix()
            if match := _FILE_NAME.fullmatch(path.name):
                metadata = {"camera": f"c{int(match[2])}"}
                listing.rows.append(Row(key, match[1], split, role, metadata=metadata))
            else:
                # Misnamed files are collected, so that one error names all of them.
                misnamed.append(key)
    if misnamed:
        listing.problems.append(
            f"{len(misnamed):,} images are not named ID_cCAMERA_… like 0002_c1s1_000451_03.jpg:"
            f" {', '.join(misnamed[:5])}."
        )
