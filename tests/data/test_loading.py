import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from batches import GREY8, batches as batches_of, digits_dataset
from PIL import Image
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils import common_functions
from retrieval.data.augment import Changes, MixedLabels, crop_box
from retrieval.data.datasets import ArrayDataset, FileDataset
from retrieval.data.loading import (
    ClassBalanced,
    RawInputs,
    TrainBatches,
    drawn_batches,
    inputs,
    training_items,
)
from retrieval.errors import DataError
from retrieval.images.preprocessing import Preprocessing
from retrieval.recipe.tables import Augmentation, Sampler
from torch import Tensor
from torchvision.transforms import v2

TWELVE = Sampler(classes=4, items=3)
NOTHING = Augmentation()
CROP_AND_MIRROR = Augmentation(crop_scale=(0.3, 1.0), horizontal_flip=0.5)


@pytest.fixture(scope="module")
def digits():
    return digits_dataset()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """48 colour images of several sizes, six classes of eight."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    files = []
    for i in range(48):
        size = (20 + i % 5, 24 + i % 7, 3)
        files.append(folder / f"{i}.png")
        Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)).save(files[-1])
    return FileDataset(files, [f"c{i // 8}" for i in range(48)])


def batches(
    dataset, preprocessing=GREY8, sampler=TWELVE, augmentation=NOTHING, **options
) -> TrainBatches:
    return batches_of(dataset, sampler, augmentation, preprocessing=preprocessing, **options)


def assert_same(a: Iterator[tuple[Tensor, Tensor]], b: Iterator[tuple[Tensor, Tensor]]) -> int:
    count = 0
    for (x, y), (u, v) in zip(a, b, strict=True):
        assert torch.equal(x, u) and torch.equal(y, v)
        count += 1
    return count


def test_batches_are_p_classes_of_m_items(digits):
    indices = np.flatnonzero(np.array(digits.labels) != "3")
    loader = batches(digits, sampler=Sampler(classes=5, items=6), indices=indices)
    assert len(loader) == len(indices) // 30
    seen = list(loader.epoch(0))
    assert len(seen) == len(loader)
    classes = [c for c in "0123456789" if c != "3"]
    by_pixels = {digits.arrays[i].tobytes(): digits.labels[i] for i in indices}
    for x, y in seen:
        assert x.shape == (30, 1, 8, 8) and x.dtype == torch.uint8 and x.is_contiguous()
        assert y.shape == (30,) and y.dtype == torch.int64
        assert sorted(Counter(y.tolist()).values()) == [6] * 5
        images = [image.numpy().tobytes() for image in x]
        assert len(set(images)) == 30  # no item twice: every class has more than six
        assert [by_pixels[image] for image in images] == [classes[k] for k in y]


def test_epochs_and_seeds_differ_and_repeat(digits):
    loader = batches(digits)
    assert assert_same(loader.epoch(2), batches(digits).epoch(2)) == len(loader)
    first, other = next(loader.epoch(0))[0], next(loader.epoch(1))[0]
    assert not torch.equal(first, other)
    assert not torch.equal(first, next(batches(digits, seed=6).epoch(0))[0])
    assert not torch.equal(first, next(batches(digits, seed=-6).epoch(0))[0])


TRANSFORMS = ["RandAugment", {"name": "RandomAffine", "degrees": 20}]
AUGMENTATIONS = {
    "nothing": NOTHING,
    "mirror": Augmentation(horizontal_flip=0.5),
    "crop": CROP_AND_MIRROR,
    "transforms": Augmentation(transforms=TRANSFORMS),
    "crop and transforms": Augmentation(crop_scale=(0.5, 1.0), transforms=TRANSFORMS),
    "mixup": Augmentation(mix="mixup", horizontal_flip=0.5),
}


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_an_epoch_resumes_at_any_batch_and_processes_share_each_batch(digits, photos, augmentation):
    def epoch(dataset, preprocessing, **options) -> list[list[Tensor]]:
        sampler = Sampler(classes=4, items=3, batches=25 if dataset is digits else 3)
        loader = batches(dataset, preprocessing, sampler, augmentation)
        rows = []
        for x, y in loader.epoch(3, **options):
            mixed = isinstance(y, MixedLabels)
            rows.append([x, y.own, y.other, torch.full([len(x)], y.weight)] if mixed else [x, y])
        return rows

    for dataset, preprocessing in ((digits, GREY8), (photos, Preprocessing((12, 10)))):
        whole = epoch(dataset, preprocessing)
        for start in (1, len(whole) // 2, len(whole) - 1, len(whole)):
            resumed = epoch(dataset, preprocessing, start=start)
            assert len(resumed) == len(whole) - start
            for batch, same_batch in zip(whole[start:], resumed, strict=True):
                assert all(map(torch.equal, batch, same_batch))
        shares = [epoch(dataset, preprocessing, rank=rank, world=3) for rank in range(3)]
        for batch, *parts in zip(whole, *shares, strict=True):
            for tensor, *pieces in zip(batch, *parts, strict=True):
                assert torch.equal(tensor, torch.cat(pieces))
    says = r"12 rows \(classes × items × views\) cannot be shared equally by 5 proc"
    with pytest.raises(DataError, match=says):
        epoch(digits, GREY8, world=5)


def test_worker_processes_give_the_same_batches(photos):
    alone = batches(photos, Preprocessing((12, 10)), augmentation=CROP_AND_MIRROR)
    helped = batches(photos, Preprocessing((12, 10)), augmentation=CROP_AND_MIRROR, workers=2)
    try:
        torch.manual_seed(7)
        state = torch.get_rng_state()
        assert assert_same(alone.epoch(0), helped.epoch(0)) == len(alone)
        next(helped.epoch(1))  # an epoch left early
        assert assert_same(alone.epoch(1, start=2), helped.epoch(1, start=2)) == len(alone) - 2
        assert torch.equal(state, torch.get_rng_state())
        whole = photos.files[5].read_bytes()
        photos.files[5].write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=r"^\S*5\.png is damaged.*$"):
            list(itertools.chain(*map(helped.epoch, range(20))))
        photos.files[5].write_bytes(whole)
    finally:
        helped.close()


def test_nothing_touches_the_global_generators(digits, photos):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    of_library = common_functions.NUMPY_RANDOM
    few = Sampler(classes=4, items=3, batches=3)
    list(batches(digits, sampler=few, augmentation=CROP_AND_MIRROR).epoch(0))
    list(batches(photos, Preprocessing((12, 10)), augmentation=CROP_AND_MIRROR).epoch(0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()
    assert common_functions.NUMPY_RANDOM is of_library


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_the_draw_is_pytorch_metric_learnings(monkeypatch, dtype):
    generator = np.random.default_rng(5)
    for p, m, number, seed, epoch in [(3, 4, 7, 0, 0), (6, 2, 1, 2**70, 3), (2, 9, None, 11, 2)]:
        labels = np.repeat(np.array([7, 2, 90, 5, 41, 3], dtype), [1, 30, 4, 12, 3, 5])
        labels = generator.permutation(labels)
        count = number or len(labels) // (p * m)
        sequence = np.random.SeedSequence([seed % 2**64, epoch])
        own = np.random.RandomState(np.random.MT19937(sequence))
        monkeypatch.setattr(common_functions, "NUMPY_RANDOM", own)
        theirs = list(MPerClassSampler(labels, m, p * m, count * p * m))
        items = training_items(Sampler(classes=p, items=m, batches=number), labels, None)
        drawn = drawn_batches(ClassBalanced(), items, seed, epoch)
        np.testing.assert_array_equal(drawn, np.reshape(theirs, (count, p * m)))


def test_raw_inputs_are_what_preprocessing_gives(digits):
    indices = np.array([5, 3, 3, 1000])
    for pre in (
        GREY8,
        Preprocessing((8, 8), 3),
        Preprocessing((13, 9), 1, (0.0,), (1.0,)),
        Preprocessing((6, 6), 1, (0.0,), (1.0,), resize=7),
    ):
        expected = np.stack([pre(digits[i]) for i in indices])
        raw = RawInputs(digits, pre)
        for _ in range(2):  # the second time from memory
            np.testing.assert_array_equal(raw.batch(indices), expected)
        assert raw.ready(indices)
        np.testing.assert_array_equal(RawInputs(digits, pre, budget=0).batch(indices), expected)
    assert RawInputs(digits, GREY8).array is not None
    larger = Preprocessing((28, 28), 1, (0.0,), (1.0,))
    assert not RawInputs(digits, larger, budget=10).in_memory


def test_batches_have_memory_of_their_own(digits):
    before = digits.arrays.copy()
    for x, _ in batches(digits, augmentation=Augmentation(horizontal_flip=1.0)).epoch(0):
        x.zero_()
    np.testing.assert_array_equal(digits.arrays, before)


def test_mirror_follows_its_probability(digits):
    plain = batches(digits)
    always = batches(digits, augmentation=Augmentation(horizontal_flip=1.0))
    third = batches(digits, augmentation=Augmentation(horizontal_flip=1 / 3))
    mirrored = total = 0
    for (x, _), (y, _), (z, _) in zip(plain.epoch(0), always.epoch(0), third.epoch(0), strict=True):
        assert torch.equal(x.flip(-1), y)
        changed = (x != z).flatten(1).any(1)
        assert torch.equal(z[changed], x[changed].flip(-1))
        mirrored += int(changed.sum())
        total += len(x)
    assert abs(mirrored / total - 1 / 3) < 0.05


def test_a_crop_sees_the_whole_image(tmp_path):
    # Each pixel holds the number of its column. A centre crop shows only the middle columns.
    wide = np.repeat(np.arange(200, dtype=np.uint8)[None], 20, axis=0)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    data = FileDataset([tmp_path / "wide.png"] * 4, list("aabb"))
    pre = Preprocessing((20, 20), 1, (0.0,), (1.0,), "nearest", 20)
    middle = next(inputs(data, [0], pre, 1))
    assert (int(middle.min()), int(middle.max())) == (90, 109)
    sampler, crop = Sampler(classes=2, items=2, batches=60), Augmentation(crop_scale=(0.05, 0.1))
    crops = batches(data, pre, sampler, crop)
    seen = torch.cat([x for x, _ in crops.epoch(0)])
    assert int(seen.min()) < 15 and int(seen.max()) > 184
    widths = seen[:, 0, 0, -1].int() - seen[:, 0, 0, 0].int()
    assert int(widths.max()) < 30


@pytest.mark.parametrize(("height", "width"), [(28, 28), (100, 37), (30, 300)])
def test_crops_are_distributed_as_torchvisions(height, width):
    scale, ratio = (0.2, 1.0), (0.75, 4 / 3)
    draws = Changes(NOTHING).draw(0, 0, 0, 6000).uniform
    ours = np.array([crop_box(row, height, width, scale, ratio) for row in draws])
    transform = v2.RandomResizedCrop(8, scale=scale, ratio=ratio)
    image = torch.zeros(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        boxes = [transform.make_params([image]) for _ in range(6000)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in boxes])
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all() and (ours[:, 1] + ours[:, 3] <= width).all()
    for column in range(4):
        a, b = ours[:, column], theirs[:, column]
        spread = max(a.std(), b.std(), 0.5)
        assert abs(a.mean() - b.mean()) < 5 * spread * (2 / 6000) ** 0.5
        assert abs(a.std() - b.std()) < 0.05 * spread + 0.05


def test_inputs_in_order(digits, photos):
    pre = Preprocessing((12, 10), 3, resize=14)
    chosen = [40, 2, 2, 17, 0]
    chunks = list(inputs(photos, chosen, pre, 2))
    assert [len(x) for x in chunks] == [2, 2, 1]
    np.testing.assert_array_equal(torch.cat(chunks), np.stack([pre(photos[i]) for i in chosen]))
    assert list(inputs(photos, [], pre, 2)) == []
    together = torch.cat(list(inputs(digits, range(100), GREY8, 64)))
    np.testing.assert_array_equal(together[:, 0], digits.arrays[:100])
    vectors = np.random.default_rng(0).normal(size=(9, 3))
    data = ArrayDataset(vectors, list("abcabcabc"), kind="features")
    x = torch.cat(list(inputs(data, [8, 1], None, 5)))
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x, vectors[[8, 1]].astype(np.float32))
    ((rows, _),) = batches(
        data, None, Sampler(classes=3, items=3, batches=1), CROP_AND_MIRROR
    ).epoch(0)
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(vectors.astype(np.float32), 0))


def test_an_abandoned_iteration_ends(photos):
    before = threading.active_count()
    stream = inputs(photos, range(48), Preprocessing((12, 10)), 4)
    next(stream)
    del stream
    # The eight decoding threads wait for more; the thread that works ahead is gone.
    assert threading.active_count() <= before + 8
    assert not any(thread.name.startswith("ahead") for thread in threading.enumerate())


def test_kind_of_item_and_backbone_must_fit(digits):
    with pytest.raises(DataError, match="items are images, and the backbone takes vectors"):
        inputs(digits, [0], None, 1)
    vectors = ArrayDataset(np.zeros((2, 3), np.float32), ["a", "b"], kind="features")
    with pytest.raises(DataError, match=r"Use the backbone core.features"):
        inputs(vectors, [0], GREY8, 1)


def test_bad_images_end_in_a_sentence(tmp_path):
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 not really")
    (tmp_path / "empty.png").touch()
    Image.new("1", (5001, 5001)).save(tmp_path / "huge.png")
    for words in (
        "torn.jpg",
        "empty.png is empty",
        "huge.png has 5001 × 5001 pixels",
        "gone.png cannot be read",
    ):
        data = FileDataset([tmp_path / words.split()[0]], ["a"], advice="Do this.")
        with pytest.raises(DataError, match=rf"(?s){words}.*Do this\.$"):
            list(inputs(data, [0], GREY8, 1))
