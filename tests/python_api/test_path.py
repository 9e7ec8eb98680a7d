"""What can be encoded, added and searched; results and their representations; progress."""

import contextlib
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import retrieval
import torch
from PIL import Image
from refusals import refusal

from .conftest import SMALL


def test_results_describe_themselves(trained, bundle, index, photos, monkeypatch):
    texts = [repr(trained), repr(bundle), repr(index)]
    assert index.summary is not None and index.summary.count == len(index) == 60
    parts = "core.digits, core.convnet, pml.triplet_margin"
    assert parts in texts[0] and str(trained.path) in texts[0]
    assert "images of 1 × 8 × 8 to vectors of 16, Euclidean distance" in texts[1]
    assert "60 items" in texts[2] and "vectors of 16, Euclidean distance" in texts[2]
    assert all(text.count("\n") <= 1 and len(text) < 300 for text in texts)
    (epoch,) = trained.history
    assert epoch["epoch"] == 1 and 0 < epoch["validation_map_at_r"] < 1
    assert f"<td>{epoch['loss']:.4g}</td>" in trained._repr_html_()
    assert repr(trained.evaluate(progress=False)).splitlines()[1].startswith("recall_at_1   0.")
    hits = index.search(next(photos.glob("0/*.png")), k=2)
    assert repr(hits).splitlines()[0].split() == ["distance", "label", "id"]
    assert len(repr(hits).splitlines()) == 3 and hits._repr_html_().count("<tr>") == 3
    monkeypatch.setattr(retrieval.Run, "history", [{"phase": "<b>", "lr": {"head": 0.1}}])
    assert "<tr><th>phase</th></tr><tr><td>&lt;b&gt;</td></tr>" in trained._repr_html_()


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_paths(kind, trained, photos, tmp_path):
    run, quiet = retrieval.load(kind(trained.path)), {"progress": False}
    assert isinstance(run, retrieval.Run)
    bundle = kind(run.export(kind(tmp_path / "bundle"), **quiet).path)
    assert retrieval.load(bundle).bundle.manifest.vector == 16
    retrieval.Index.create(kind(tmp_path / "i"), kind(photos), model=bundle, **quiet).close()
    with retrieval.Index.open(kind(tmp_path / "i")) as index:
        assert len(index) == 60
    run.evaluate(bundle=bundle, **quiet)
    run.verify(draw=40, **quiet)


def test_an_image_has_one_embedding_in_every_form(trained, bundle, photos):
    files = sorted(photos.glob("*/*.png"))[:3]
    pictures = [Image.open(file) for file in files]
    arrays = [np.array(picture) for picture in pictures]
    tensor = torch.from_numpy(np.stack(arrays))[:, None]
    for encoder in (trained, bundle):
        expected = encoder.encode(files, progress=False)
        assert expected.shape == (3, 16) and expected.dtype == np.float32
        for images in (
            list(map(str, files)),
            [file.read_bytes() for file in files],
            pictures,
            arrays,
            [array / 255 for array in arrays],
            np.stack(arrays)[..., None],
            np.stack(arrays)[[0, 1, 2, 2]],
            torch.from_numpy(np.stack(arrays)[[0, 1, 2, 2]]),
            tensor,
            list(tensor.float() / 255),
        ):
            assert np.array_equal(encoder.encode(images, progress=False)[:3], expected)
        for image in (files[0], pictures[0], arrays[0], tensor[0]):
            assert encoder.encode(image, progress=False) == pytest.approx(expected[:1], abs=1e-6)
    assert bundle.encode(files, progress=False) == pytest.approx(expected, abs=1e-5)
    assert bundle.bundle.encode_images(np.stack(arrays)[[0, 1]], progress=False).shape == (2, 16)


AMBIGUOUS = [
    np.zeros((3, 8, 8), np.uint8),  # three in grey, or one with channels first
    torch.zeros(3, 8, 8),
    torch.zeros(8, 8, 3),  # eight in grey, or one with channels last
]


@pytest.mark.parametrize("images", AMBIGUOUS)
def test_a_stack_that_may_be_one_image_is_refused(images, trained, bundle, index):
    says = (
        r"Pixels of shape \(., 8, .\) may be several grey images or one colour image\. Pass a list"
    )
    for take in (trained.encode, bundle.encode, bundle.bundle.encode_images, index.search):
        with pytest.raises(retrieval.errors.DataError, match=says):
            take(images)
    with pytest.raises(retrieval.errors.DataError, match=says):
        index.add(images=images, ids=list(map(str, range(len(images)))))
    assert len(bundle.encode(list(images), progress=False)) == len(images)
    assert len(bundle.encode([torch.zeros(3, 8, 8)], progress=False)) == 1


@pytest.mark.parametrize("channels", [2, 4])
def test_pixels_with_transparency_are_no_stack_of_narrow_images(channels, trained, bundle, index):
    pixels = np.zeros((16, 16, channels), np.uint8)
    for take in (trained.encode, bundle.encode, bundle.bundle.encode_images, index.search):
        with pytest.raises(retrieval.errors.DataError, match=rf"not uint8 \(16, 16, {channels}\)"):
            take(pixels)


def test_a_search_for_no_images_has_no_hits(index):
    assert index.search(np.zeros((0, 8, 8), np.uint8)) == []


def test_a_stack_of_grey_images_is_added_and_searched(bundle, photos, tmp_path):
    files = sorted(photos.glob("*/*.png"))[:5]
    stack = np.stack([np.asarray(Image.open(file)) for file in files])
    ids = [str(number) for number in range(5)]
    with retrieval.Index.create(tmp_path / "i", model=bundle.path, progress=False) as index:
        assert index.add(images=stack, ids=ids, progress=False).added == 5
        for queries in (stack, torch.from_numpy(stack), stack / 255):
            assert [hits[0].id for hits in index.search(queries, k=1)] == ids
        assert index.search(stack[:1], k=1)[0].id == "0"


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (5, "an image is .* not an object of type int"),
        (np.full((8, 8), 2.0), "Pixels that are real numbers must be from 0 to 1"),
        (np.full((8, 8), np.nan), "Pixels that are real numbers must be from 0 to 1"),
        (np.zeros((8, 8), np.int64), "Pixels must be uint8 of shape"),
        ("gone.png", "gone.png cannot be read"),
    ],
)
def test_an_object_that_is_no_image_is_named(trained, bundle, photos, image, words):
    file = next(photos.glob("*/*.png"))
    place, item = r"images\[1\]", "images item 1"
    for encoder, name in ((trained, place if isinstance(image, int) else item), (bundle, place)):
        with pytest.raises(retrieval.errors.DataError, match=f"{name}: {words}"):
            encoder.encode([file, image], progress=False)


def test_a_side_is_encoded_in_the_order_of_its_labels(trained):
    for side in ("train", "validation", "test", "gallery"):
        codes, labels = trained.encode(side, progress=False), trained.labels(side)
        assert len(codes) == len(labels) > 0
    items = trained.splits.query[:4]
    labels = [trained.dataset.labels[item] for item in items]
    assert trained.labels("gallery")[:4].tolist() == labels
    images = [trained.dataset[int(item)] for item in items]
    assert trained.encode(images, progress=False) == pytest.approx(codes[:4], abs=1e-6)


def test_a_folder_is_encoded_in_the_order_of_its_files(trained, bundle, photos, tmp_path, caplog):
    folder = tmp_path / "test"  # also the name of a side
    for number in (2, 0, 1):
        (folder / str(number)).mkdir(parents=True)
        shutil.copy(next(photos.glob(f"{number}/*.png")), folder / str(number) / "a.png")
    (folder / "notes.txt").write_text("no image")
    files = [folder / str(number) / "a.png" for number in range(3)]
    for encoder in (trained, bundle):
        expected = encoder.encode(files, progress=False)
        for path in (folder, f"{folder}/"):
            assert np.array_equal(encoder.encode(path, progress=False), expected)
        assert "1 file is left out (not an image): notes.txt" in caplog.text
        caplog.clear()
        text = refusal(retrieval.errors.DataError, encoder.encode, tmp_path / "none")
        assert "none cannot be read" in text
    with contextlib.chdir(tmp_path):
        sides = trained.encode("test", progress=False)
        assert len(sides) == len(trained.labels("test")) > 3
        assert np.array_equal(trained.encode(Path("test"), progress=False), trained.encode(files))


def test_an_index_is_read_as_a_dictionary(index, photos):
    ids = sorted(f"{file.parent.name}/{file.name}" for file in photos.glob("*/*.png"))
    assert list(index) == ids and len(index) == 60 and bool(index)
    assert index[ids[3]] == index.get(ids[3])[ids[3]] and index[ids[3]].label == ids[3][0]
    assert ids[3] in index and "none" not in index and 3 not in index
    for id, words in (("none", "has no item 'none'"), (3, "has no item 3")):
        with pytest.raises(KeyError, match=words) as raised:
            index[id]
        assert isinstance(raised.value, retrieval.errors.DataError)
        assert str(raised.value) == f"The index {index.path} {words}."
    assert "was read without its vector. Call index.vector(id)" in refusal(
        retrieval.errors.DataError, lambda: index[ids[3]].vector
    )
    index.delete(ids[3])
    assert ids[3] not in index and list(index) == ids[:3] + ids[4:]


def test_hits_and_encoders_are_pickled(trained, bundle, index, photos, tmp_path):
    file = next(photos.glob("3/*.png"))
    hits = index.search(file, k=3)
    again = pickle.loads(pickle.dumps(hits))
    assert again == hits and type(again) is type(hits) and repr(again) == repr(hits)
    picture = again.image(again[0])
    assert picture is not None and picture.tobytes() == Image.open(file).tobytes()
    parameters = {"size": 8, "width": 8, "depth": 2, "layers": 1}
    backbone = retrieval.load("core.convnet", parameters=parameters, random_weights=True)
    for encoder in (trained, bundle, backbone, bundle.bundle):
        other = pickle.loads(pickle.dumps(encoder))
        encode = [getattr(each, "encode_images", each.encode) for each in (encoder, other)]
        assert np.array_equal(*(each(file, progress=False) for each in encode))
    moved = retrieval.load(shutil.copytree(bundle.path, tmp_path / "bundle"))
    pickled = pickle.dumps(moved)
    backbone.export(tmp_path / "bundle", replace=True, progress=False)
    with pytest.raises(retrieval.errors.BundleError, match="now holds another bundle"):
        pickle.loads(pickled)


def test_results_are_tables_in_a_notebook(trained, tmp_path):
    evaluation = trained.evaluate(metrics="recall_at_1", baseline=True, progress=False)
    html = evaluation._repr_html_()
    assert "<tr><th></th><th>trained</th><th>raw pixels</th></tr>" in html
    assert f"<td>recall_at_1</td><td>{evaluation.values['recall_at_1']:.4f}</td>" in html
    assert "items (test)</pre>" in html
    assert "same and" in trained.verify(draw=40, progress=False)._repr_html_()
    metrics = {"<b>\x1b": retrieval.create("metric", "core.recall_at")}
    html = retrieval.evaluate(np.eye(4), ["a", "a", "b", "c"], metrics=metrics)._repr_html_()
    assert "<td>&lt;b&gt;\\x1b</td><td>1.0000</td>" in html and "2 left out: no other" in html


def test_a_pretrained_backbone_encodes_and_is_exported(photos, tmp_path):
    files = sorted(photos.glob("*/*.png"))[:3]
    parameters = {"size": 8, "width": 8, "depth": 2, "layers": 1}
    encoder = retrieval.load("core.convnet", parameters=parameters, random_weights=True)
    codes = encoder.encode(files, progress=False)
    assert f"images of 1 × 8 × 8 to vectors of {codes.shape[1]}" in repr(encoder)
    bundle = encoder.export(tmp_path / "bundle", progress=False)
    assert bundle.encode(files, progress=False) == pytest.approx(codes, abs=1e-4)
    with retrieval.Index.create(tmp_path / "i", files, model=encoder, progress=False) as index:
        assert len(index) == 3  # exported for the index, which keeps its own bundle


def test_an_index_is_created_by_the_name_of_a_backbone(photos, tmp_path):
    files = sorted(photos.glob("*/*.png"))[:3]
    with retrieval.Index.create(
        tmp_path / "i", files, model="core.pixels", progress=False
    ) as index:
        assert len(index) == 3 and index.bundle.manifest.name == "core.pixels"
        assert index.search(files[0], k=1)[0].distance == pytest.approx(0, abs=1e-5)
    for model, error, says in (
        ("core.pixel", retrieval.errors.PluginError, "Did you mean 'core.pixels'"),
        (str(tmp_path / "none"), retrieval.errors.BundleError, "there is no such folder"),
    ):
        with pytest.raises(error, match=says):
            retrieval.Index.create(tmp_path / "j", files, model=model, progress=False)


def test_images_from_memory_are_added(index, photos):
    pixels = np.array(Image.open(next(photos.glob("3/*.png"))))
    images, quiet = [pixels, 255 - pixels], {"progress": False}
    described = {"labels": np.array([3, 4]), "metadata": [{"hue": 1}, {}], "keep": "copy"}
    added = index.add(images=images, ids=["a", "b"], **described, **quiet)
    assert (added.added, added.changed, len(index)) == (2, 0, 62)
    hit = index.search(255 - pixels, k=1)[0]
    assert (hit.id, hit.label) == ("b", "4") and hit.distance == pytest.approx(0, abs=1e-5)
    assert index.get("a")["a"].metadata == {"hue": 1} and index.store.original("a") is not None
    assert index.add(images=255 - pixels, ids=["a"], **quiet).changed == 1
    with pytest.raises(retrieval.errors.DataError, match="2 images need as many ids, not 1"):
        index.add(images=[pixels, pixels], ids=["c"])
    with pytest.raises(retrieval.errors.DataError, match=r"^1 image needs as many ids, not 0: "):
        index.add(images=pixels)
    says = r"1 of 2 items .*\n.*images\[1\]: an image"
    with pytest.raises(retrieval.errors.DataError, match=says):
        index.add(images=[pixels, 5], ids=["c", "d"], **quiet)
    assert len(index) == 63


def whole_path(folder: Path, photos: Path, progress, **options) -> None:
    """Train, evaluate, verify, encode, export and index."""
    run = retrieval.train(SMALL, folder / "run", progress=progress, **options)
    run.evaluate(progress=progress)
    run.verify(draw=40, progress=progress)
    run.encode("test", progress=progress)
    bundle = run.export(progress=progress)
    retrieval.Index.create(folder / "index", photos, model=bundle, progress=progress).close()


def test_progress_off_prints_nothing_and_lines_go_to_report(photos, tmp_path, capfd):
    lines = []
    whole_path(tmp_path, photos, False, report=lines.append)
    assert capfd.readouterr() == ("", "")
    assert any(line.startswith("epoch 1: loss") for line in lines)


def test_a_function_gets_the_progress_of_each_step(photos, trained, tmp_path):
    for step, options in (
        (trained.evaluate, {}),
        (trained.verify, {"draw": 40}),
        (trained.encode, {"images": "test"}),
    ):
        calls: list[tuple[str, int, int]] = []
        step(progress=lambda *call, calls=calls: calls.append(call), **options)
        assert any(done == total > 0 for _, done, total in calls), step
    calls = []
    whole_path(tmp_path, photos, lambda *call: calls.append(call))
    assert ("training", 10, 10) in calls and ("encoding", 60, 60) in calls
    assert any("bundle" in what for what, _, _ in calls)


def test_a_query_is_whatever_encode_takes(index, photos):
    file = next(photos.glob("3/*.png"))
    pixels = np.array(Image.open(file))
    nearest = index.search(file, k=1)[0].id
    tensor = torch.from_numpy(pixels)[None]
    vector = torch.from_numpy(index.bundle.encode_image(file).vector[0])
    for query in (pixels / 255, tensor, tensor.float() / 255, vector):
        assert index.search(query, k=1)[0].id == nearest
    for queries in ([tensor, pixels], tensor[None].expand(2, -1, -1, -1), pixels[None, ..., None]):
        answers = index.search(queries, k=1)
        assert len(answers) == len(queries) and {hits[0].id for hits in answers} == {nearest}
        assert all(isinstance(hits, retrieval.results.Hits) for hits in answers)


def test_a_vector_of_another_width_is_no_picture(index):
    for vectors in (np.zeros((1, 15)), np.zeros(15), [[0.5] * 15]):
        with pytest.raises(retrieval.errors.RetrievalError, match="15"):
            index.search(vectors)


def test_hits_show_pictures_and_numbers_of_four_digits(index, photos, tmp_path):
    pixels = np.array(Image.open(next(photos.glob("3/*.png"))))
    added = index.add(images=[255 - pixels], ids=["kept"], keep="copy", progress=False)
    lost = index.add(images=[pixels], ids=["lost"], progress=False)
    hits = index.search(255 - pixels, k=len(index))
    assert repr(hits[0]) == "Hit(id='kept', distance=0.0000)"
    assert np.array_equal(np.asarray(hits.image(hits[0])), 255 - pixels)
    assert hits.image(next(hit for hit in hits if hit.id == "lost")) is None
    assert 1 < hits._repr_html_().count("<img src=") <= 50
    figure = retrieval.plot.neighbours(index, (255 - pixels) / 255, k=1)
    assert np.array_equal(figure.axes[1].get_images()[0].get_array(), 255 - pixels)
    assert "." not in repr(lost).partition("seconds=")[0] and len(repr(added)) < 100


def test_scalars_of_numpy_in_metadata_are_numbers(bundle, photos, tmp_path):
    file = next(photos.glob("*/*.png"))
    scalars = {"count": np.int64(7), "price": np.float32(0.1), "tags": [np.bool_(True), None]}
    plain = {"count": 7, "price": float(np.float32(0.1)), "tags": [True, None]}
    with retrieval.Index.create(tmp_path / "i", model=bundle.path, progress=False) as index:
        index.add(images=[file], ids=["a"], metadata=[scalars], progress=False)
        assert index.get(["a"])["a"].metadata == plain
        assert [hit.id for hit in index.search(file, k=1, filter="count = 7 and price < 0.2")] == [
            "a"
        ]
        when = {"when": np.datetime64("2026-01-01T00:00:00")}
        with pytest.raises(retrieval.errors.DataError, match=r"metadata\.when is a datetime"):
            index.add(images=[file], ids=["b"], metadata=[when], progress=False)
