"""`as_dataset` keeps the pixels, labels and sides of other libraries' objects."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from retrieval.data.datasets import ArrayDataset
from retrieval.data.foreign_datasets import as_dataset
from retrieval.errors import DataError
from torch.utils.data import ConcatDataset, Subset, TensorDataset

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
LABELS = [0, 0, 1, 1, 2, 2]
NAMES = ["cat", "dog", "emu"]
TEXTS = [NAMES[label] for label in LABELS]


class Torch:
    """A map-style dataset that gets its items from a function and lists no labels."""

    classes = NAMES

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def tensor(index: int) -> Any:
    return torch.from_numpy(PIXELS[index]).permute(2, 0, 1).float() / 255, LABELS[index]


def pillow(index: int) -> Any:
    return Image.fromarray(PIXELS[index]), torch.tensor(LABELS[index]), "more"


def keyed(index: int) -> Any:
    return {"label": LABELS[index], "image": PIXELS[index]}


def pixels(dataset: Any) -> NDArray[np.uint8]:
    return np.stack([np.asarray(dataset[i]) for i in range(len(dataset))])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number, image in enumerate(PIXELS):
        Image.fromarray(image).save(folder / f"{number}.png")
    return [folder / f"{number}.png" for number in range(len(PIXELS))]


@pytest.mark.parametrize("item", [tensor, pillow, keyed])
def test_datasets_of_torch(item):
    data = as_dataset(Torch(item))
    assert np.array_equal(pixels(data), PIXELS) and data.labels == TEXTS
    again = pickle.loads(pickle.dumps(data))  # as for worker processes
    assert np.array_equal(pixels(again), PIXELS)
    part = as_dataset(Subset(Torch(item), [4, 1]))
    assert np.array_equal(pixels(part), PIXELS[[4, 1]]) and part.labels == ["emu", "cat"]


def test_the_values_of_a_dictionary_are_joined_as_sides():
    data = as_dataset({"train": Subset(Torch(tensor), [0, 1, 2]), "val": Torch(pillow)})
    assert data.splits == ["train"] * 3 + ["validation"] * 6 and data.keys[3] == "val/0"
    assert np.array_equal(pixels(data), np.concatenate([PIXELS[:3], PIXELS]))
    assert len(as_dataset(ConcatDataset([Torch(tensor), Torch(tensor)]))) == 12
    parts = {"train": Torch(pillow), "query": Torch(pillow), "gallery": (PIXELS, LABELS)}
    roles = as_dataset(parts)
    assert roles.splits == ["train"] * 6 + ["test"] * 12
    assert roles.roles == [""] * 6 + ["query"] * 6 + ["gallery"] * 6
    own = ArrayDataset(PIXELS, TEXTS)
    own.labels = np.array(TEXTS)  # as in a dataset of the user's
    assert as_dataset({"train": own, "test": own}).labels == TEXTS * 2
    arrays = as_dataset({"train": (PIXELS, LABELS), "test": (PIXELS, LABELS)})
    assert arrays.arrays is not None and arrays.splits == ["train"] * 6 + ["test"] * 6


def test_labels_come_from_the_items_unless_the_class_is_torchvisions():
    reads: list[int] = []

    class Listing(Torch):
        target_transform = None
        targets = LABELS

    def item(index):
        reads.append(index)
        return pillow(index)

    wrong = Listing(item)
    wrong.targets = [LABELS[0], *[9] * 5]  # agrees on the first item only
    assert as_dataset(wrong).labels == TEXTS
    Listing.__module__ = "torchvision.datasets.listing"
    reads.clear()
    assert as_dataset(Listing(item)).labels == TEXTS and set(reads) == {0}
    wrong.target_transform = str
    assert as_dataset(wrong).labels == TEXTS


def test_every_class_needs_a_name():
    few = Torch(pillow)
    few.classes = few.classes[:2]
    with pytest.raises(DataError, match="`classes` only names the labels 0 to 1"):
        as_dataset(few)


@pytest.mark.parametrize("form", ["paths", "bytes", "pillow", "uint8", "float", "tensor", "list"])
def test_images_and_labels(form, files):
    images: Any = {
        "paths": files,
        "bytes": [file.read_bytes() for file in files],
        "pillow": list(map(Image.fromarray, PIXELS)),
        "uint8": PIXELS,
        "float": PIXELS / 255,
        "tensor": torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
        "list": list(torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255),
    }[form]
    data = as_dataset((images, np.array(LABELS)), split=["train"] * 4 + ["test"] * 2)
    assert np.array_equal(pixels(data), PIXELS) and data.labels == list(map(str, LABELS))
    assert data.splits == ["train"] * 4 + ["test"] * 2
    assert (data.files is not None) == (form == "paths")


def test_an_array_with_channels_first_is_refused():
    with pytest.raises(DataError, match=r"item 0: Pixels must be uint8 of shape \(H, W\) or"):
        as_dataset((PIXELS.transpose(0, 3, 1, 2), LABELS))


def test_vectors_are_features():
    vectors = torch.rand(6, 7)
    for obj in (TensorDataset(vectors, torch.tensor(LABELS)), (vectors, LABELS)):
        data = as_dataset(obj)
        assert data.kind == "features" and np.array_equal(pixels(data), vectors.numpy())


def test_a_data_frame(files):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(
        {
            "file": list(map(str, files)),
            "class": TEXTS,
            "split": ["train"] * 4 + ["val"] * 2,
            "price": [1.5, None, 2, 2, 2, 2],
            "odd": [[1]] * 6,
        }
    )
    data = as_dataset(frame, image="file", label="class")
    assert np.array_equal(pixels(data), PIXELS) and data.labels == TEXTS
    assert data.splits == ["train"] * 4 + ["validation"] * 2
    assert data.metadata is not None and data.metadata[:2] == [{"price": 1.5}, {"price": None}]
    with pytest.raises(DataError, match=r"(?s)2 problems.*'imgae'.*has no column 'label'"):
        as_dataset(frame, image="imgae")
    with pytest.raises(DataError, match=r"gone\.png is not a file"):
        as_dataset(frame.assign(file="gone.png"), image="file", label="class")


def test_a_hugging_face_dataset(files):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.ClassLabel(names=NAMES),
            "price": datasets.Value("int64"),
            "other": datasets.Image(),
        }
    )
    paths = list(map(str, files))
    columns = {"img": paths, "label": LABELS, "price": LABELS, "other": paths}
    table = datasets.Dataset.from_dict(columns, features=features)
    data = as_dataset(table, image="img")
    assert np.array_equal(pixels(data), PIXELS) and data.labels == TEXTS
    assert data.metadata is not None and data.metadata[3] == {"price": 1}
    sides = as_dataset(datasets.DatasetDict(train=table, test=table), image="img", metadata=[])
    assert sides.splits == ["train"] * 6 + ["test"] * 6 and sides.metadata is None


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (5, "pass a PyTorch dataset"),
        ("photos", "pass a PyTorch dataset"),
        ([], "holds no items"),
        ([1, 2], "is an object of type int. It must"),
        ([[1, 2], [3, 4]], "item 0 is an object of type int, not an image. Pass an image as"),
        ((PIXELS, LABELS[:3]), "6 images and 3 labels"),
        ((5, LABELS), "images cannot be read: 'int' object is not iterable"),
        (([1.5, 2.5], LABELS[:2]), "item 0 is an object of type float, not an image"),
        ((PIXELS, [0.5] * 6), r"a label must be text or an integer, not 0\.5"),
        (([*PIXELS], [np.array([0, 1])] * 6), r"a label must be text or an integer, not \[0 1\]"),
        (Torch(lambda index: (PIXELS[index], torch.ones(2))), "an integer, not tensor"),
        (Torch(lambda index: 1 // 0), "item 0 cannot be read: integer division"),
        (Torch(lambda index: ("x.png",)), "is an object of type tuple. It must"),
        (Torch(lambda index: ([5], 1)), "item 0 is an object of type list, not an image"),
        (
            Torch(lambda index: (torch.randn(3, 4, 4) * 9, 1)),
            "item 0: Pixels .* leave out a normalisation",
        ),
    ],
)
def test_other_objects_are_refused(obj, words):
    with pytest.raises(DataError, match=words):
        as_dataset(obj)


@pytest.mark.parametrize("shape", [(4, 0, 8), (4, 8, 0), (4, 8, 8, 0), (4, 0)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_items_without_numbers_are_refused(shape, kind):
    with pytest.raises(DataError, match=r"its items hold no numbers; their shape is \(\d,"):
        as_dataset((np.zeros(shape, kind), list("abab")))


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_no_images_are_an_empty_dataset(kind):
    assert len(as_dataset((np.zeros((0, 8, 8), kind), []))) == 0


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_the_label_minus_one_is_none(kind):
    images = np.zeros((4, 8, 8), np.uint8)
    assert as_dataset((images, kind([-1, 0, 1, -1]))).labels == ["", "0", "1", ""]
    assert as_dataset((images, ["-1", "a", "b", "b"])).labels == ["-1", "a", "b", "b"]


def test_the_label_minus_one_is_not_the_last_class():
    class Items(torch.utils.data.Dataset[Any]):
        classes = ("ant", "bee")

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return Image.new("L", (8, 8), index), (0, 1, -1, -1)[index]

    assert as_dataset(Items()).labels == ["ant", "bee", "", ""]
    assert as_dataset(Subset(Items(), [1, 2])).labels == ["bee", ""]
