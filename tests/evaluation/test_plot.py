"""`retrieval.plot`: what the pictures show, and sentences for what they cannot show."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import retrieval
from matplotlib.figure import Figure
from PIL import Image
from retrieval.errors import DataError, MissingDependency
from retrieval.index.index import create_index, open_index
from sklearn.datasets import load_iris

EPOCHS = [
    {"phase": phase, "loss": loss, "validation_map_at_r": score, "best": best, **more}
    for phase, loss, score, best, more in (
        ("first", 1.5, 0.2, True, {}),
        ("first", 0.9, 0.6, True, {"gamma_max": 0.3}),
        ("second", 0.7, 0.6, False, {"generator_loss": 3.0, "validation_recall_at_1": 0.8}),
    )
]


@pytest.fixture(scope="module")
def made(makers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plot")
    makers.write_digits(folder / "digits", 60)
    bundle = makers.make_bundle(folder / "bundle")
    create_index(folder / "index", bundle, [folder / "digits"], progress=False)
    return folder


@pytest.fixture
def index(made):
    with open_index(made / "index") as opened:
        yield opened


def titles(figure: Figure) -> list[str]:
    return [cell.get_title() for cell in figure.axes if cell.get_visible()]


def drawn(cell: Any) -> np.ndarray[Any, Any]:
    (image,) = cell.get_images()
    return np.asarray(image.get_array())


def test_neighbours_shows_each_query_and_what_the_index_finds(made, index):
    queries = [made / "digits" / "3" / "0003.png", made / "digits" / "7" / "0007.png"]
    figure = retrieval.plot.neighbours(index, queries, 4, labels=["3", "8"])
    assert isinstance(figure, Figure) and len(figure.axes) == 2 * 5
    for row, (query, label) in enumerate(zip(queries, ("3", "8"), strict=True)):
        cells = figure.axes[5 * row : 5 * row + 5]
        assert cells[0].get_title() == f"query: {label}"
        np.testing.assert_array_equal(drawn(cells[0]), np.asarray(Image.open(query)))
        hits = index.search(index.bundle.encode_image(query), k=4)[0]
        assert hits[0].path == query  # it is indexed, so it finds itself
        for cell, hit in zip(cells[1:], hits, strict=True):
            mark = "✓" if hit.label == label else "✗"
            assert cell.get_title() == f"{hit.label} {mark} {hit.distance:.2f}"
            assert hit.path is not None
            np.testing.assert_array_equal(drawn(cell), np.asarray(Image.open(hit.path)))
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    right, wrong = figure.axes[1], figure.axes[6]
    assert right.spines["top"].get_edgecolor() != wrong.spines["top"].get_edgecolor()


def test_queries_may_be_bytes_arrays_and_colour_images(made, index):
    path = made / "digits" / "5" / "0005.png"
    colour = Image.new("RGB", (600, 300), (255, 0, 0))
    queries = [path.read_bytes(), np.asarray(Image.open(path)), colour, str(path)]
    figure = retrieval.plot.neighbours(index, queries, 2)
    assert titles(figure)[::3] == ["query"] * 4 and not set("✓✗") & set("".join(titles(figure)))
    np.testing.assert_array_equal(drawn(figure.axes[0]), drawn(figure.axes[3]))
    shown = drawn(figure.axes[6])
    assert shown.shape == (128, 256, 3) and (shown == (255, 0, 0)).all()


def test_a_file_that_is_gone_is_an_empty_cell(made, makers, tmp_path):
    shutil.copytree(made / "digits", tmp_path / "digits")
    create_index(tmp_path / "index", made / "bundle", [tmp_path / "digits"], progress=False)
    gone = tmp_path / "digits" / "3" / "0003.png"
    query = gone.read_bytes()
    gone.unlink()
    with open_index(tmp_path / "index") as opened:
        figure = retrieval.plot.neighbours(opened, query, 2)
    assert not figure.axes[1].get_images() and "0003.png" in figure.axes[1].texts[0].get_text()
    assert figure.axes[2].get_images()


def test_neighbours_that_cannot_be_drawn_are_refused(made, index, makers, tmp_path):
    image = made / "digits" / "3" / "0003.png"
    (tmp_path / "text.png").write_text("no image")
    for queries, options, says in (
        ([], {}, "1 to 50 queries, not 0"),
        ([image] * 51, {}, "1 to 50 queries, not 51"),
        (image, {"labels": ["3", "4"]}, "2 labels for 1 queries"),
        (image, {"labels": [float("nan")]}, "1 of 1 labels is missing"),
        (image, {"k": 0}, "k must be at least 1"),
        (tmp_path / "text.png", {}, r"text\.png"),
    ):
        with pytest.raises(DataError, match=says):
            retrieval.plot.neighbours(index, queries, **options)
    np.savez(tmp_path / "f.npz", features=np.eye(20), labels=np.arange(20))
    bundle = makers.make_bundle(tmp_path / "b", kind="features", features=20)
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    says = "holds vectors, not images"
    with open_index(tmp_path / "i") as vectors, pytest.raises(DataError, match=says):
        retrieval.plot.neighbours(vectors, image)


def test_curves_shows_each_epoch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EPOCHS))
    losses, validation = retrieval.plot.curves(tmp_path).axes
    drawn = (*losses.lines, *validation.lines)
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn}
    assert lines["loss"] == [[1, 1.5], [2, 0.9], [3, 0.7]]
    assert lines["generator loss"] == [[3, 3.0]]
    assert lines["map at r"] == [[1, 0.2], [2, 0.6], [3, 0.6]]
    assert "gamma max" not in lines
    (best,) = [line for line in validation.lines if line.get_linestyle() == ":"]
    assert list(best.get_xdata()) == [2, 2]  # of equally good ones the first is kept


def test_curves_without_validation_has_one_panel(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    assert len(retrieval.plot.curves(str(tmp_path)).axes) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "Give the folder of a run"),
        ("{", "must have a JSON object"),
        ("", "must have a JSON object"),
        ('{"loss": "x"}\n', "must have a JSON object"),
        ("3\n", "must have a JSON object"),
    ],
)
def test_a_folder_without_curves_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match=said) as refused:
        retrieval.plot.curves(tmp_path)
    assert str(tmp_path / "metrics.jsonl") in str(refused.value)


@pytest.mark.parametrize("method", ["pca", "tsne", "umap"])
def test_map_places_every_item_beside_its_class_and_the_same_again(method):
    if method == "umap":
        pytest.importorskip("umap", reason="umap-learn is not installed")
    codes, labels = load_iris(return_X_y=True)
    codes, names = codes[::3], [f"class {n}" for n in labels[::3]]
    panels = [retrieval.plot.map(codes, names, method=method).axes[0] for _ in range(2)]
    first, second = (
        {group.get_label(): np.asarray(group.get_offsets()) for group in panel.collections}
        for panel in panels
    )
    counts = {name: len(points) for name, points in first.items()}
    assert counts == {name: names.count(name) for name in ("class 0", "class 1", "class 2")}
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert "50 items of 3 classes" in panels[0].get_title()
    centres = np.array([points.mean(axis=0) for points in first.values()])
    own = np.linalg.norm(first["class 0"] - centres[0], axis=1).max()
    # setosa is apart by every method
    assert own < np.linalg.norm(centres[0] - centres[1:], axis=1).min()


def test_a_map_by_pca_is_the_projection_and_says_how_much_it_keeps():
    codes, labels = load_iris(return_X_y=True)
    (panel,) = retrieval.plot.map(codes, labels).axes
    points = np.concatenate([np.asarray(group.get_offsets()) for group in panel.collections])
    centred = codes - codes.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    np.testing.assert_allclose(np.sort((points**2).sum(axis=0))[::-1], values[:2], rtol=1e-8)
    assert f"{100 * values[:2].sum() / values.sum():.0f} % of the variance" in panel.get_title()


def test_a_map_of_many_classes_colours_without_a_legend():
    random = np.random.default_rng(0)
    (panel,) = retrieval.plot.map(random.normal(size=(40, 3)), np.arange(40) % 20).axes
    assert panel.get_legend() is None and len(set(panel.collections[0].get_array())) == 20


@pytest.mark.parametrize(
    ("codes", "labels", "method", "said"),
    [
        (np.zeros(3), [0, 1, 2], "pca", "not of shape"),
        (np.zeros((3, 1)), [0, 1, 2], "pca", "not of shape"),
        (np.full((3, 2), np.nan), [0, 1, 2], "pca", "NaN or infinity"),
        (np.ones((3, 2)), [0, 1], "pca", "one label"),
        (np.ones((3, 2)), [0, 1, 2], "unap", "'pca', 'tsne' or 'umap', not 'unap'"),
    ],
)
def test_a_map_that_cannot_be_drawn_is_refused(codes, labels, method, said):
    with pytest.raises(DataError, match=said):
        retrieval.plot.map(codes, labels, method=method)


def test_a_map_by_umap_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[umap\]"):
        retrieval.plot.map(np.eye(3), [0, 1, 2], method="umap")


def test_no_picture_touches_pyplot(process):
    drawing = "import retrieval.plot, sys; retrieval.plot.map([[0, 1], [1, 0]], [0, 1]);"
    done = process("-c", f"{drawing} print('matplotlib.pyplot' in sys.modules)")
    assert done.out.strip() == "False", done.err
    assert "plot" in dir(retrieval) and sys.modules["retrieval.plot"] is retrieval.plot


ODD = ["cheap $5 and $6", "$\\frac$", "a_{b $x", "_hidden", "100 % {{7*7}}", "line\nfeed"]


def test_labels_are_drawn_as_they_are(made, tmp_path):
    from retrieval.evaluation.plot import svg

    codes = np.random.default_rng(0).normal(size=(12, 3))
    image = np.zeros((8, 8), np.uint8)
    with retrieval.Index.create(tmp_path / "i", model=made / "bundle", progress=False) as index:
        ids = [f"$id_{number}$" for number in range(6)]
        index.add(images=[image] * 6, ids=ids, labels=ODD, progress=False)
        near = retrieval.plot.neighbours(index, image, 6)
    figures = [retrieval.plot.map(codes, ODD * 2), near]
    for figure in figures:
        figure.savefig(tmp_path / "a.png")
    legend = figures[0].axes[0].get_legend()
    assert sorted(text.get_text().strip() for text in legend.get_texts()) == sorted(ODD)
    drawn = svg(figures[0]).decode()
    assert "cheap $5 and $6" in drawn and "_hidden" in drawn and "frac$" in drawn
