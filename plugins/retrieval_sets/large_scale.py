"""iNaturalist 2018, Google Landmarks v2, Stanford Online Products and In-Shop Clothes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from retrieval.helpers import Box, Count, Counts, some
from retrieval.plugin import Dataset

from retrieval_sets.published import (
    SPLIT_AND_ROLE,
    Published,
    Row,
    documented,
    numbers,
    read_lines,
)

_INAT_HOME = "its makers (github.com/visipedia/inat_comp/tree/master/2018)"
INAT = Published(
    "iNaturalist 2018",
    f"{_INAT_HOME}, and the two lists from Brown et al. (github.com/Andrew-Brown1/Smooth_AP)",
    "train_val2018/, Inat_train_set1.txt (or Inat_dataset_splits/Inat_train_set1.txt) and"
    " Inat_test_set1.txt",
    {"train": [Count(325_846, 5_690)], "test": [Count(136_093, 2_452)]},
)
LANDMARKS = Published(
    "Google Landmarks v2",
    "its makers (github.com/cvdfoundation/google-landmark)",
    "train/, index/ and test/ with their images (a/b/c/abc….jpg), train_clean.csv,"
    " index_image_to_landmark.csv and retrieval_solution_v2.1.csv",
    {
        "train": [Count(1_580_470, 81_313)],
        "gallery": [Count(761_757)],
        "query": [Count(1_129)],
    },
)
SOP = Published(
    "Stanford Online Products",
    "Stanford (cvgl.stanford.edu/projects/lifted_struct)",
    "Ebay_train.txt, Ebay_test.txt and the folders of images that they name (bicycle_final/ and"
    " so on)",
    {"train": [Count(59_551, 11_318)], "test": [Count(60_502, 11_316)]},
    apart="products",
)
IN_SHOP = Published(
    "In-Shop Clothes Retrieval",
    "the Chinese University of Hong Kong"
    " (mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html)",
    "img/ and list_eval_partition.txt (also as Img/img/ and Eval/list_eval_partition.txt), for crop"
    " = true also list_bbox_inshop.txt",
    {
        "train": [Count(25_882, 3_997)],
        "query": [Count(14_218, 3_985)],
        "gallery": [Count(12_612, 3_985)],
    },
)
_MAX_ID = 10**9


@documented
def inaturalist2018(
    folder: Path,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load iNaturalist 2018: 461,939 photographs of 8,142 species.

    Van Horn et al., "The iNaturalist Species Classification and Detection Dataset", CVPR 2018.
    Nothing is downloaded. The split by species is from Brown, Xie, Kalogeiton & Zisserman,
    "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval", ECCV 2020: 5,690 species
    are for training (325,846 images), 2,452 others for testing (136,093). The metadata of an item
    have its group, a kingdom or class such as "Aves".

    Args:
        folder: the folder that holds `train_val2018` and the lists.
    """
    listing = INAT.listing(folder, "train_val2018")
    for name, side in (("Inat_train_set1.txt", "train"), ("Inat_test_set1.txt", "test")):
        path = INAT.file(listing.root, name, f"Inat_dataset_splits/{name}")
        for _, (word,) in read_lines(path, 1, listing.problems):
            if (parts := _of_path(word)) is None:
                listing.problems.append(
                    f"{name}: {word!r} is not train_val2018/GROUP/SPECIES/NAME.jpg."
                )
            else:
                listing.rows.append(Row(parts[0], parts[2], side, metadata={"group": parts[1]}))
    return listing.dataset(counts, skip_bad)


def _of_path(path: str) -> tuple[str, str, str] | None:
    """Return an image's path from `train_val2018/` on, its group and its species, or None."""
    parts = path.split("/")
    if "train_val2018" not in parts or len(parts) - parts.index("train_val2018") != 4:
        return None
    relative = parts[parts.index("train_val2018") :]
    return "/".join(relative), relative[1], relative[2]


@documented
def google_landmarks_v2(
    folder: Path, counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load Google Landmarks v2: the clean training images, the index and the queries.

    Weyand, Araujo, Cao & Sim, "Google Landmarks Dataset v2: A Large-Scale Benchmark for
    Instance-Level Recognition and Retrieval", CVPR 2020. Nothing is downloaded. The clean list has
    1,580,470 training images of 81,313 landmarks. The gallery is the index of 761,757 images. The
    queries are the test images for which the solution lists images of the index. The metadata of a
    query say whether its `usage` is "Public" or "Private", and list those images in `relevant`: set
    `[evaluate] relevant = ["relevant"]` and the metric `map_at_100`, as in the paper; the key
    `by = "usage"` gives both numbers. Without the lists, all images of the query's label are
    relevant: of the most frequent landmark among them.

    Args:
        folder: the folder that holds `train`, `index`, `test` and the lists.
    """
    name = "train_clean.csv"
    listed = "index_image_to_landmark.csv"
    solution = "retrieval_solution_v2.1.csv"
    listing = LANDMARKS.listing(folder, name, listed, solution)
    root = listing.root
    rows = listing.rows
    problems = listing.problems
    for _, (label, images) in read_lines(root / name, 2, problems, skip=1, comma=True):
        rows += [Row(_image_path("train", image), label, "train") for image in images.split()]
    # The solution lists images, not landmarks; the index says what they show.
    index: dict[str, str] = {}
    for _, (image, label) in read_lines(root / listed, 2, problems, skip=1, comma=True):
        index[image] = label
        rows.append(Row(_image_path("index", image), label, "test", "gallery"))
    queries = read_lines(root / solution, 3, problems, skip=1, comma=True)
    for line, (image, images, usage) in queries:
        if usage.lower() == "ignored":
            continue
        labels = Counter(index[image_name] for image_name in images.split() if image_name in index)
        if absent := [image_name for image_name in images.split() if image_name not in index]:
            problems.append(f"{solution}, line {line}: {some(absent)} is not in the index.")
        if labels:
            landmark = labels.most_common(1)[0][0]
            relevant = [_image_path("index", image_name) for image_name in images.split()]
            metadata = {"usage": usage, "relevant": ";".join(relevant)}
            key = _image_path("test", image)
            rows.append(Row(key, landmark, "test", "query", metadata=metadata))
    return listing.dataset(counts, skip_bad)


def _image_path(side: str, image: str) -> str:
    """Return an image's path, in which the first three characters of its name are folders."""
    return f"{side}/{'/'.join(image[:3])}/{image}.jpg"


@documented
def stanford_online_products(
    folder: Path, counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load Stanford Online Products: 120,053 photographs of 22,634 products from eBay.

    Oh Song, Xiang, Jegelka & Savarese, "Deep Metric Learning via Lifted Structured Feature
    Embedding", CVPR 2016. Nothing is downloaded. 11,318 products are for training (59,551 images),
    11,316 others for testing (60,502). The metadata of an item name its category, such as
    "bicycle".

    Args:
        folder: the folder `Stanford_Online_Products`, or its parent.
    """
    lists = ("Ebay_train.txt", "Ebay_test.txt")
    listing = SOP.listing(folder, *lists, inside=["Stanford_Online_Products"])
    problems = listing.problems
    for name, side in zip(lists, ("train", "test"), strict=True):
        file = listing.root / name
        for line, (*ids, path) in read_lines(file, 4, problems, skip=1):
            if (parsed := numbers(file, line, ids, problems, 1, _MAX_ID)) is not None:
                category = path.split("/")[0].removesuffix("_final")
                metadata = {"category": category}
                listing.rows.append(Row(path, str(parsed[1]), side, metadata=metadata))
    return listing.dataset(counts, skip_bad)


@documented
def in_shop(
    folder: Path, crop: bool = False, counts: Counts = "published", skip_bad: bool = False
) -> Dataset:
    """Load In-Shop Clothes Retrieval (DeepFashion): 52,712 photographs of 7,982 clothing items.

    Liu, Luo, Qiu, Wang & Tang, "DeepFashion: Powering Robust Clothes Recognition and Retrieval with
    Rich Annotations", CVPR 2016. Nothing is downloaded. 3,997 clothing items are for training
    (25,882 images). Of 3,985 others, 14,218 images are queries and 12,612 are the gallery. The
    images of `img.zip` are already cropped and centred.

    Args:
        folder: the folder that holds `img/` and the lists.
        crop: whether to crop images to the boxes in `list_bbox_inshop.txt`.
    """
    listing = IN_SHOP.listing(folder, "img", inside=["Img"])
    problems = listing.problems
    name = "list_eval_partition.txt"
    boxed = "list_bbox_inshop.txt"
    listed = IN_SHOP.file(folder, f"Eval/{name}", name)
    boxes: dict[str, Box] = {}
    if crop:
        boxes = _boxes(IN_SHOP.file(folder, f"Anno/{boxed}", boxed), problems)
    # The first line is the number of images, the second names the columns.
    for line, (path, item, status) in read_lines(listed, 3, problems, skip=2):
        if status not in SPLIT_AND_ROLE:
            problems.append(
                f"{listed.name}, line {line}: {status!r} is not train, query or gallery."
            )
            continue
        if crop and path not in boxes:
            problems.append(f"{path} has no box in list_bbox_inshop.txt.")
        split, role = SPLIT_AND_ROLE[status]
        listing.rows.append(Row(path, item, split, role, boxes.get(path)))
    return listing.dataset(counts, skip_bad, crop=crop)


def _boxes(path: Path, problems: list[str]) -> dict[str, Box]:
    """Return the boxes by image: the list's last four columns left, top, right and bottom."""
    boxes: dict[str, Box] = {}
    # Columns two and three are the type of clothing and of the pose, which nothing here uses.
    for line, (name, _, _, *words) in read_lines(path, 7, problems, skip=2):
        if (edges := numbers(path, line, words, problems, 0, 1 << 20)) is not None:
            left, top, right, bottom = edges
            boxes[name] = (left, top, right, bottom)
    return boxes
