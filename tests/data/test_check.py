"""`retrieval data check` finds the faults planted in real images, and none in clean images."""

import itertools
import json
import shutil
import struct
import zlib
from pathlib import Path

import makers
import numpy as np
import pytest
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.data.datasets import ArrayDataset
from retrieval.errors import DataError
from retrieval.index import near_pairs
from sklearn.datasets import load_digits, load_sample_images

from retrieval_lab.check_data import PICTURES, check_data
from retrieval_lab.findings import Alike, Findings, Subject, spelt_alike
from retrieval_lab.fingerprints import fingerprint

SIZE = 96


@pytest.fixture(scope="module")
def parts():
    """20 parts of two photographs, which do not overlap."""
    return [
        Image.fromarray(photo[top : top + 128, left : left + 128]).resize((SIZE, SIZE))
        for photo in load_sample_images().images
        for left in range(0, 5 * 128, 128)
        for top in (0, 200)
    ]


@pytest.fixture
def photos(parts, tmp_path, monkeypatch):
    """`photos/train/CLASS` and `photos/test/CLASS`: five classes a side, two images each, all
    different.
    """
    monkeypatch.chdir(tmp_path)
    for number, part in enumerate(parts):
        folder = Path("photos", "train" if number < 10 else "test", f"c{number // 2}")
        folder.mkdir(parents=True, exist_ok=True)
        part.save(folder / f"{number}.png")
    return Path("photos")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A projection of small grey pictures; it measures distances of photographs too."""
    return Bundle.open(makers.make_bundle(tmp_path_factory.mktemp("model") / "bundle"))


def names(found: Findings, alike: Alike) -> set[str]:
    return {Path(found.subjects[i].name).name for i in alike.items}


def plant(photos: Path) -> None:
    """Plant one of each: the same file with another label, the same pixels and three near copies on
    the other side, broken files, and labels with one item.
    """
    train, test = photos / "train", photos / "test"
    shutil.copy(train / "c0" / "0.png", train / "c1" / "twice.png")
    Image.open(train / "c1" / "2.png").save(test / "c5" / "pixels.bmp")
    Image.open(train / "c2" / "4.png").save(test / "c6" / "saved.jpg", quality=70)
    Image.open(train / "c3" / "6.png").resize((72, 72)).save(test / "c7" / "smaller.png")
    larger = Image.open(test / "c8" / "16.png").resize((240, 240))
    larger.save(test / "c8" / "larger.jpg", quality=85)
    (train / "c4" / "cut.png").write_bytes((train / "c4" / "8.png").read_bytes()[:2000])
    (train / "c4" / "empty.jpg").touch()
    (test / "alone").mkdir()
    (test / "c9" / "19.png").rename(test / "alone" / "19.png")


def test_clean_photographs_are_clean(photos, cli):
    done = cli("data", "check", "photos")
    assert (done.code, done.err) == (0, "")
    assert done.out == "photos: 20 items of 10 labels; 10 test, 10 train\nNo problems found.\n"


COUNTS = {"few_levels": 0, "broken": 2, "same": 2, "items_too_many": 2, "near": 3, "leaks": 3}
COUNTS |= {"label_errors": 4, "labels_of_one_item": 2, "labels_spelt_alike": 0}


def test_all_planted_faults_are_found(photos, cli):
    plant(photos)
    done = cli("data", "check", "photos", "--output", "found.json")
    assert done.code == 1 and not done.err
    findings = json.loads(Path("found.json").read_text())
    assert findings["counts"] == COUNTS
    cut, empty = findings["broken"]
    assert [Path(item["item"]).name for item in (cut, empty)] == ["cut.png", "empty.jpg"]
    assert "damaged" in cut["why"] and "is empty (0 bytes)" in empty["why"]
    assert (cut["label"], cut["side"]) == ("c4", "train")
    marks = {
        tuple(sorted(Path(entry["item"]).name for entry in group["items"])): tuple(
            group[mark] for mark in ("by", "leak", "labels_differ")
        )
        for group in findings["same"] + findings["near"]
    }
    assert marks == {
        ("0.png", "twice.png"): ("bytes", False, True),
        ("2.png", "pixels.bmp"): ("pixels", True, True),
        ("4.png", "saved.jpg"): ("picture", True, True),
        ("6.png", "smaller.png"): ("picture", True, True),
        ("16.png", "larger.jpg"): ("picture", False, False),
    }
    assert findings["within"]["picture"] == PICTURES
    assert all(0 < group["distance"] <= PICTURES for group in findings["near"])
    assert sorted(findings["labels_of_one_item"]) == ["alone", "c9"]
    assert findings["sides"] == {"test": 14, "train": 13}
    apart = "2 across the split and 2 with different labels:"
    for line in (
        "2 items cannot be read:",
        f"3 pairs of images look the same (within 0.08), {apart}",
        "1 group of files is the same, 1 with different labels:",
        "LABEL  photos/train/c0/0.png (train, c0)  photos/train/c1/twice.png (train, c1)",
    ):
        assert line in done.out
    pairs = done.out.partition("look the same")[2].splitlines()[1:4]
    worst = [line.split()[:2] for line in pairs[:2]]
    assert worst == [["LEAK", "LABEL"]] * 2, "the worst come first"
    short = cli("data", "check", "photos", "--show", "1").out
    assert "… and 2 more" in short and short.count("look the same") == 1
    assert len(short.splitlines()) < len(done.out.splitlines())


def test_sixteen_bit_images_that_lose_most_of_their_levels_are_named(photos, cli):
    folder = photos / "train" / "c0"
    grey = np.asarray(Image.open(folder / "0.png").convert("L")).astype(np.uint16)
    grey = grey * 255 // grey.max()
    sheets = {"whole": grey * 257, "camera": grey * 16, "black": grey // 2, "dark": grey * 65}
    for name, values in sheets.items():
        Image.fromarray(values.astype(np.uint16)).save(folder / f"{name}.png")
    (folder / "colour.png").write_bytes(sixteen_bit_colour(grey[:, ::-1] * 16))
    values = np.asarray(Image.open(folder / "1.png").convert("L"), np.float32)
    Image.fromarray(values / 255).save(folder / "float.tif")
    done = cli("data", "check", "photos", "--output", "found.json")
    assert done.code == 1
    above = "is a 16-bit image with no value above"
    for text in (
        "3 16-bit images lose most of their levels:",
        f"c0/camera.png {above} 4,080 of 65,535, so 16 of 256 levels",
        "Multiply it by 16 before it is saved.",
        f"c0/black.png {above} 255, so it is black in 8 bits.",
        f"c0/colour.png {above} 4,095 of 65,535",
        "float.tif is floating-point grey (mode F)",
    ):
        assert text in done.out
    few = json.loads(Path("found.json").read_text())["few_levels"]
    assert [Path(item["item"]).name for item in few] == ["black.png", "camera.png", "colour.png"]


def sixteen_bit_colour(values: np.ndarray) -> bytes:
    """A PNG of 16-bit RGB, all three the same."""
    rows = np.repeat(values, 3, axis=1).astype(">u2")
    header = struct.pack(">IIBBBBB", values.shape[1], len(values), 16, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    whole = b"\x89PNG\r\n\x1a\n"
    for chunk in (b"IHDR" + header, b"IDAT" + body, b"IEND"):
        whole += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return whole


def test_sides_come_from_folders_a_recipe_or_a_csv_file(photos, cli):
    plant(photos)
    for broken in ("train/c4/cut.png", "train/c4/empty.jpg"):
        (photos / broken).unlink()
    Path("r.toml").write_text(
        'name = "r"\n[data]\nname = "core.image_folder"\nfolder = "photos"\n[split]\nvalidation ='
        ' 0.0\n[sampler]\nclasses = 2\nitems = 2\n[backbone]\nname = "core.pixels"\nsize ='
        ' 8\n[loss]\nname = "pml.contrastive"\n'
    )
    folder, recipe = check_data("photos", progress=False), check_data("r.toml", progress=False)
    assert folder.counts() == recipe.counts() and folder.counts()["leaks"] == 3
    assert [item.side for item in folder.subjects] == [item.side for item in recipe.subjects]
    rows = [f"{item.name},{item.label},{item.side}" for item in folder.subjects]
    Path("items.csv").write_text("\n".join(["path,label,split", *rows, "gone.png,c0,train"]) + "\n")
    table = check_data(Path("items.csv"), progress=False)
    assert table.counts() == {**folder.counts(), "broken": 1}
    assert "No such file" in table.broken[0][1]
    apart = check_data(["photos/train", "photos/test"], progress=False)
    assert apart.counts() == folder.counts() and apart.subjects[0].side == "photos/train"
    changed = cli("data", "check", "r.toml", "--set", "split.by=item", "--set", "split.test=0.5")
    assert changed.code == 2 and "[split]" in changed.err  # the classes have too few items


def test_near_duplicates_by_a_model(photos, bundle, cli):
    plant(photos)
    findings = check_data(photos, model=bundle, within=0.05, progress=False)
    by_model = [pair for pair in findings.near if pair.by == "model"]
    vectors = {
        i: bundle.encode_image(subject.name).vector[0].astype(float)
        for i, subject in enumerate(findings.subjects)
        if i not in dict(findings.broken)
    }
    same = {frozenset(group.items) for group in findings.same}
    expected = {}
    for i, j in itertools.combinations(vectors, 2):
        apart = float(np.linalg.norm(vectors[i] - vectors[j]))
        if apart <= 0.05 and frozenset((i, j)) not in same:
            expected[i, j] = apart
    assert 3 < len(expected) < 20, len(expected)
    assert {pair.items: pair.distance for pair in by_model} == pytest.approx(expected, abs=1e-5)
    assert any(names(findings, pair) == {"4.png", "saved.jpg"} for pair in by_model)
    done = cli("data", "check", "photos", "--model", str(bundle.path), "--within", "0.05")
    says = "pairs of items are the same to the model (within 0.05)"
    assert done.code == 1 and says in done.out, done.err


def pairs_of(near) -> dict[tuple[int, int], float]:
    pairs = zip(near.first.tolist(), near.second.tolist(), strict=True)
    return dict(zip(pairs, near.distance.tolist(), strict=True))


def test_pairs_against_all_pairs_in_double_precision(monkeypatch):
    monkeypatch.setattr(near_pairs, "_ENTRIES", 170)
    monkeypatch.setattr(near_pairs, "_ROWS", 10)
    random = np.random.default_rng(0)
    copies = np.repeat(random.normal(size=(1, 6)), 40, 0)
    vectors = np.concatenate([random.normal(size=(60, 6)), copies])
    vectors = (vectors + 0.01 * random.normal(size=vectors.shape)).astype(np.float32)
    apart = np.linalg.norm(vectors[:, None].astype(float) - vectors[None], axis=2)
    same = np.arange(100)
    same[70:75] = 70
    actual = near_pairs.near_pairs(vectors, 1.5, same=same)
    expected = {
        (i, j): apart[i, j]
        for i, j in itertools.combinations(range(100), 2)
        if apart[i, j] <= 1.5 and same[i] != same[j]
    }
    assert pairs_of(actual) == pytest.approx(expected)
    assert actual.complete and (np.diff(actual.distance) >= 0).all()

    monkeypatch.setattr(near_pairs, "MAX_PAIRS", 100)
    ended = near_pairs.near_pairs(vectors, 1.5)
    assert not ended.complete and 100 < len(ended.first) < len(expected)
    equal = near_pairs.near_pairs(np.full((300, 4), 1000, np.float32), 0.0)
    assert not equal.complete


def test_far_rows_are_not_compared():
    random = np.random.default_rng(0)
    centres = random.normal(size=(40, 32))
    vectors = np.repeat(centres, 100, 0) + 0.01 * random.normal(size=(4000, 32))
    vectors = vectors.astype(np.float32)
    axes = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)[2]
    components = vectors @ axes[: near_pairs._AXES].T
    compared = sum(
        len(rows) * len(others)
        for rows, others in near_pairs._blocks(components, 0.01, np.zeros(4000, np.float32))
    )
    assert compared < 4000**2 / 5  # each pair once would be half of all
    assert compared > 40 * 100**2 / 2


def test_a_long_vector_or_an_offset_does_not_end_the_search(monkeypatch):
    monkeypatch.setattr(near_pairs, "MAX_PAIRS", 100)
    random = np.random.default_rng(0)
    vectors = random.normal(size=(200, 64)).astype(np.float32)
    vectors[0] *= 10_000
    vectors[7] = vectors[3]
    for offset in (0, 1000):
        pairs = near_pairs.near_pairs(vectors + np.float32(offset), 0.01)
        assert pairs.complete and pairs_of(pairs) == {(3, 7): 0}


def test_copies_are_one_group_and_no_pairs(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    for number in range(300):
        Image.fromarray(image).save(tmp_path / "a" / f"{number}.png")
    Image.new("RGB", (50, 50), "white").save(tmp_path / "a" / "white.png")
    Image.new("RGB", (40, 40), "white").save(tmp_path / "a" / "white too.png")
    found = check_data(tmp_path, progress=False)
    assert [len(group.items) for group in found.same] == [300] and not found.near
    assert "and 294 more" in found.text()


def test_marks_of_sides_and_labels():
    sides = [("q", "a", "query"), ("g", "a", "gallery"), ("t", None, "train"), ("n", "b")]
    subjects = [Subject(*side) for side in sides]
    found = Findings("x", subjects, [], [], [], {}, [], [("a", "b")])
    pairs = {pair: Alike(pair, "bytes") for pair in itertools.combinations(range(4), 2)}
    assert not found.leaks(pairs[0, 1]) and found.leaks(pairs[1, 2])
    assert not found.leaks(pairs[2, 3]) and not found.contradicts(pairs[0, 2])
    assert found.contradicts(pairs[0, 3]) and not found.clean
    labels = ["Cat", "cat ", "CAT", "dog", "Straße", "STRASSE", "ﬁn", "fin"]
    alike = [("Cat", "cat ", "CAT"), ("Straße", "STRASSE"), ("ﬁn", "fin")]
    assert spelt_alike([Subject(label, label) for label in labels]) == alike


def test_vectors_that_are_equal_or_not_finite(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    vectors[3] = vectors[0]
    vectors[5, 2] = np.nan
    np.savez(tmp_path / "v.npz", features=vectors, labels=["a", "a", "b", "b", "c", "c"])
    found = check_data(tmp_path / "v.npz", progress=False)
    assert found.same == [Alike((0, 3), "numbers")] and found.contradicts(found.same[0])
    assert found.broken[0][0] == 5 and "NaN" in found.broken[0][1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone"], "gone does not exist"),
        (["r.toml", "photos"], "A recipe is checked alone"),
        (["photos", "--set", "a.b=1"], "Overrides change a recipe"),
        (["photos", "--within", "0.1"], "within is a distance by a model"),
        (["photos", "--output", "x.csv"], "must end in .json"),
        (["photos", "--output", "gone/x.json"], "cannot be written"),
        (["photos", "--model", "photos"], "photos"),
        (["broken"], "None of the 1 items can be read"),
    ],
)
def test_mistakes_are_sentences(arguments, sentence, photos, cli):
    Path("broken").mkdir()
    Path("broken", "a.jpg").touch()
    done = cli("data", "check", *arguments)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err


def test_a_bomb_is_a_broken_image_and_the_others_are_checked(photos):
    Image.new("1", (8000, 8000)).save(photos / "test" / "c5" / "bomb.png")
    found = check_data(photos, progress=False)
    assert len(found.broken) == 1 and "pixels" in found.broken[0][1] and not found.same


def test_items_of_arrays_have_no_bytes(monkeypatch, tmp_path):
    from retrieval.data.splits import make_splits
    from retrieval.recipe.tables import Split

    from retrieval_lab.checked_items import of_dataset

    digits = (load_digits().images[:40] * 15.9).astype(np.uint8)
    dataset = ArrayDataset(digits, [str(i % 4) for i in range(40)])
    subjects = of_dataset(dataset, make_splits(dataset, Split(by="class", validation=0.5)))
    assert {item.side for item in subjects.items} == {"train", "validation", "test"}
    own, item = subjects.open(3)
    assert own is None and np.array_equal(np.asarray(item), digits[3])
    with pytest.raises(DataError, match="No data are named"):
        check_data([], progress=False)


def test_clean_digits_raise_no_alarm(tmp_path):
    digits = (load_digits().images * 15.9).astype(np.uint8)
    np.savez(tmp_path / "x.npz", features=digits.reshape(len(digits), -1).astype(np.float32))
    pictures = np.stack([fingerprint(Image.fromarray(digit)).picture for digit in digits])
    assert len(near_pairs.near_pairs(pictures, PICTURES).first) == 0
    copies = 0
    for digit, own in zip(digits[:200], pictures, strict=False):
        Image.fromarray(digit).save(tmp_path / "copy.jpg", quality=70)
        with Image.open(tmp_path / "copy.jpg") as copy:
            again = fingerprint(copy).picture
        assert again is not None
        copies += float(np.linalg.norm(again - own)) <= PICTURES
    assert copies >= 180  # of 200; JPEG changes such small images most
    same = check_data(tmp_path / "x.npz", progress=False)
    assert same.clean and len(same.subjects) == 1797
