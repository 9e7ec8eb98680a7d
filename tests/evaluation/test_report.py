"""`retrieval report`: metrics, mistakes, refusals, and the page in Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.plugin import Combiner
from retrieval.recipe.read import check_recipe
from retrieval.recipe.tables import Evaluate
from retrieval.run.open import Run
from retrieval.training.trainer import train_run

from retrieval_lab.report import measured, write
from retrieval_lab.report.write import SIDE, Section, Thumbnails, page

PLUGIN = '''
"""Digits whose labels are markup, one of them wrong."""
import numpy as np
from retrieval.plugin import hookimpl
from retrieval.data.datasets import ArrayDataset

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">'
    b'<circle cx="4" cy="4" r="3"/></svg>'
)


def digits():
    """Load 20 of each digit."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = np.concatenate([np.flatnonzero(data.target == k)[:20] for k in range(10)])
    labels = [f"<b>{k}</b>" for k in data.target[rows]]
    labels[-1] = "<b>8</b>"
    keys = [f"</script>{i}" for i in range(len(rows))]
    metadata = []
    for i, k in enumerate(data.target[rows]):
        tags = f"{'low' if k < 7 else 'high'};{k % 3}" if i % 7 else ""
        metadata.append({"part": k // 7, "parity": k % 2, "tags": tags})
    images = (data.images[rows] * 15.9).astype(np.uint8)
    return ArrayDataset(images, labels, keys, metadata=metadata)


@hookimpl
def retrieval_datasets():
    """Digits."""
    return {"digits": digits}


@hookimpl
def retrieval_report_panels(run):
    """A drawing."""
    return {"A <panel> of mine": SVG}
'''


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of digits with 100 test items of five classes, which tests do not change."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.py").write_text(PLUGIN, encoding="utf-8")
    table = {
        "plugins": [str(folder / "mine.py")],
        "data": {"name": "mine.digits"},
        "split": {"by": "class", "validation": 0.0},
        "sampler": {"classes": 4, "items": 4, "batches": 4},
        "backbone": {"name": "core.convnet", "size": 8, "width": 8, "depth": 1},
        "loss": {"name": "pml.contrastive"},
        "train": {"epochs": 2, "device": "cpu"},
    }
    train_run(folder / "run", check_recipe(table))
    return folder / "run"


@pytest.fixture(scope="module")
def found(run_folder):
    return measured.measure(Run.open(run_folder), sample=100)


@pytest.fixture(scope="module")
def file(run_folder):
    output = run_folder.parent / "out" / "report.html"
    return write.report([run_folder], output, map="pca", progress=False)


def test_metrics_equal_those_of_evaluate(found, run_folder):
    names = ["recall_at_1", "recall_at_8", "r_precision", "map_at_r"]
    theirs = evaluate(Run.open(run_folder), metrics=names, progress=False).metrics["trained"]
    assert len(found.query) == 100
    for name in names:
        mean, low, high = found.intervals[name]
        assert mean == pytest.approx(theirs[name], abs=1e-9) and low < mean < high


def test_a_combiner_measures_each_pair_of_items_once(run_folder, monkeypatch):
    run, pairs = Run.open(run_folder), []

    class Counting(Combiner):
        def compute_mat(self, query_emb, ref_emb):
            pairs.append(len(query_emb) * len(ref_emb))
            return torch.cdist(query_emb.double(), ref_emb.double())

    expected = measured.measure(run, 10)
    run.model.combiner = Counting()
    result = measured.measure(run, 10)
    assert sum(pairs) == 100 * 100 + 10 * 10  # all test items, and the sample of pairs
    assert np.array_equal(result.neighbours, expected.neighbours)


def test_an_interval_draws_whole_classes():
    sizes = [10, 30, 20, 40]
    values, classes = np.repeat([0.0, 1.0, 1.0, 0.0], sizes), np.repeat([5, 6, 7, 8], sizes)
    random = np.random.default_rng(1)
    mean, low, high = measured.interval(values, classes, np.random.default_rng(0))
    drawn = []
    for _ in range(4000):
        parts = [values[classes == c] for c in random.choice([5, 6, 7, 8], 4)]
        drawn.append(np.concatenate(parts).mean())
    assert mean == 0.5
    assert (low, high) == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=0.06)
    assert measured.interval(np.array([0.0, 1.0]), np.array([3, 3]), random) == (0.5, 0.5, 0.5)


def test_thresholds_hold_their_rates_by_plain_loops(found):
    pairs, points = found.pairs, measured.thresholds(found.pairs)
    rates = [f"FAR of {rate} % at most" for rate in ("10", "1", "0.1")]
    assert [name for name, *_ in points] == ["equal error rate", *rates]
    for (_, at, far, frr), most in zip(points, (1.0, 0.1, 0.01, 0.001), strict=True):
        accepted = [apart <= at for apart in pairs.distance]
        false = [a for a, same in zip(accepted, pairs.same, strict=True) if not same]
        right = [a for a, same in zip(accepted, pairs.same, strict=True) if same]
        assert far == pytest.approx(sum(false) / len(false))
        assert frr == pytest.approx(1 - sum(right) / len(right))
        assert far <= most
    assert abs(points[0][2] - points[0][3]) < 0.02
    close, far_apart = measured.hardest(found)
    assert close[0][2] == min(pairs.distance[~pairs.same])
    assert far_apart[0][2] == max(pairs.distance[pairs.same])


def test_a_wrong_label_and_the_class_that_it_is_taken_for_are_found(tmp_path):
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 12)
    vectors = (np.eye(8)[labels] * 10 + random.normal(size=(96, 8)) * 0.1).astype(np.float32)
    labels[-1] = 6  # one of the last class's
    np.savez(tmp_path / "v.npz", features=vectors, labels=labels)
    table = {
        "data": {"name": "core.features", "file": str(tmp_path / "v.npz")},
        "split": {"by": "class"},
        "backbone": {"name": "core.features"},
        "head": {"identity": True},
        "loss": {"name": "pml.contrastive"},
        "train": {"device": "cpu"},
    }
    train_run(tmp_path / "run", check_recipe(table))
    result = measured.measure(Run.open(tmp_path / "run"), 48)
    assert [int(result.query[row]) for row in measured.suspects(result)] == [95]
    page = write.report([tmp_path / "run"], tmp_path / "r.html", map="tsne", progress=False)
    text = page.read_text()
    assert "Labels that are likely wrong" in text
    assert "t-SNE by the learned distance" in text
    assert 'alt="" src=' not in text
    names, columns, counts, total = measured.confusion_matrix(result)
    assert names == columns == ["4", "5", "6", "7"] and total == 4
    assert counts == [[12, 0, 0, 0], [0, 12, 0, 0], [0, 0, 12, 1], [0, 0, 0, 11]]
    names, columns, counts, total = measured.confusion_matrix(result, most=1)
    assert (names, columns, counts, total) == (["6"], ["6", "other classes"], [[12, 1]], 4)
    assert len(measured.measure(Run.open(tmp_path / "run"), 20).pairs.items) == 20


def test_the_file_is_self_contained_bounded_and_escapes_names(file, run_folder, monkeypatch):
    text = file.read_text(encoding="utf-8")
    queries = ["Best queries", "Worst queries", "Random queries", "<h3>Confusion matrix"]
    for part in (*queries, "Curves of training", "PCA: ", "A &lt;panel&gt; of mine"):
        assert part in text
    assert "&lt;b&gt;8&lt;/b&gt;" in text
    assert "<b>" not in text and text.count("</script>") == 2, "one of data, one of the script"
    assert not re.search(r"(src|href)=\"(?!data:|#)", text) and "url(" not in text
    options = {"map": "pca", "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(write, "THUMBNAILS", 5)
        few = write.report([run_folder], file.with_name("few.html"), **options)
    pictures = set(re.findall(r"data:image/png;base64,[^\"]+", few.read_text(encoding="utf-8")))
    assert len(pictures) == 5 and few.stat().st_size < file.stat().st_size
    assert write.report([run_folder], file, **options).read_text(encoding="utf-8") == text


def test_runs_are_side_by_side_with_recipes_seeds_versions_and_sizes(
    run_folder, file, tmp_path, monkeypatch
):
    recipe = Run.open(run_folder).recipe.model_copy(update={"seed": 3, "name": "other"})
    train_run(tmp_path / "second", recipe)
    runs = [run_folder, tmp_path / "second"]
    monkeypatch.setattr(write, "THUMBNAILS", 50)
    two = write.report(runs, tmp_path / "two.html", map="none", progress=False)
    text = two.read_text(encoding="utf-8")
    side = text[text.index("<h2>Side by side") : text.index('<section id="run0"')]
    lines = re.findall(r"(run|second): MAP@R (\d\.\d+)</p><ul class=\"sheet\">(.*?)</ul>", side)
    assert [name for name, *_ in lines] == ["run", "second"] * 6
    queries = [re.search(r'title="(.*?)"', items) for *_, items in lines]
    assert all(a and b and a[1] == b[1] for a, b in zip(queries[::2], queries[1::2], strict=True))
    gaps = [abs(float(a[1]) - float(b[1])) for a, b in zip(lines[::2], lines[1::2], strict=True)]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0
    rows = dict(re.findall(r'<tr><th scope="row">([\w.]+)</th>(.*?)</tr>', text))
    assert rows["seed"] == "<td>0</td><td>3</td>" and "embedding-retrieval" in rows["versions"]
    count = sum(p.numel() for p in Run.open(run_folder).model.parameters())
    assert rows["parameters"] == f"<td>{count:,}</td>" * 2 and "loss.name" not in rows
    assert "[backbone]" in text and "has its largest number of thumbnails" in text
    assert "largest number of thumbnails" not in file.read_text(encoding="utf-8")
    assert text.index('<th scope="col">MAP@R') < text.index('<th scope="col">Recall@1')
    alone = file.read_text(encoding="utf-8")
    assert "Side by side" not in alone and "100 of 100 test items, of 5 classes" in alone


def test_classes_have_the_names_of_a_column_and_a_sample_is_filled(run_folder, monkeypatch):
    run = Run.open(run_folder)
    monkeypatch.setattr(measured, "PER_CLASS", 4)  # five classes, and so less than the sample
    result = measured.measure(run, 60, label_column="parity")
    assert {result.name(int(item)) for item in result.query} == {"0", "1"}
    assert len(result.pairs.items) == 60
    with pytest.raises(DataError, match=r"label_column party: .*Did you mean 'parity'"):
        measured.measure(run, 60, label_column="party")


def test_thumbnails_of_large_and_damaged_images(tmp_path):
    from PIL import Image
    from retrieval.data.datasets import FileDataset

    noise = np.random.default_rng(0).integers(0, 256, (900, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    thumbnails = Thumbnails(FileDataset([tmp_path / "a.png", tmp_path / "b.png"], ["a", "b"]), 9)
    assert thumbnails(0).startswith("data:image/jpeg") and len(thumbnails(0)) < 16_000
    assert thumbnails(1) == "" and SIDE == 96


def test_wrong_arguments_are_refused_before_anything_is_written(run_folder, tmp_path):
    runs = [tmp_path / "gone", run_folder, tmp_path / "other"]
    for options, says in (
        ({"runs": runs}, r"gone is not a run(.|\n)*other is not a run"),
        ({"output": tmp_path}, "is a folder"),
        ({"map": "lle"}, "tsne, pca, none"),
        ({"sample": 9}, "from 10"),
        ({"runs": [run_folder] * 11}, "1 to 10 runs"),
    ):
        words = {"runs": [run_folder], "output": tmp_path / "r.html", "progress": False, **options}
        with pytest.raises(DataError, match=says):
            write.report(**words)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ('{"x": "text"}', "panel 'x' must be the bytes of an SVG or PNG"),
        ("[1]", "returned list, not a mapping"),
        ("1 / 0", "ZeroDivisionError"),
        ('{"x": b"<svg" + bytes(5 << 20)}', "at most 4 MB"),
    ],
)
def test_a_panel_that_is_no_picture_is_refused(run_folder, given, sentence):
    from retrieval.host.hookspecs import hookimpl

    class Bad:
        @hookimpl
        def retrieval_report_panels(self, run: Run) -> Any:
            return eval(given)

    run = Run.open(run_folder)
    run.plugins.manager.register(Bad())
    with pytest.raises(PluginError, match=sentence):
        write.panels(run)


def test_in_a_browser_it_loads_nothing_fits_a_phone_and_axe_finds_nothing(page, file):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    ).Axe()
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(file.as_uri())
    assert {url.partition(":")[0] for url in page.asked} <= {"file", "data"} and not page.faults
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    whole = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
    assert page.evaluate(f"() => {whole}")
    page.fill("input[type=search]", "<b>8")
    assert page.inner_text("[role=status]") == "21 items"
    bright = "[...document.querySelectorAll('circle')].filter(dot => dot.style.opacity === '1')"
    assert page.evaluate(f"() => {bright}.length") == 21
    assert "<b>8</b>" in page.inner_text(".shown")
    page.click(".legend button:last-child")
    assert page.inner_text("[role=status]") == "20 items"  # not the item with the wrong label
    page.click(".legend button:last-child")
    page.click(".map circle >> nth=0", force=True)
    assert page.locator(".shown > img").bounding_box()["width"] == 192
    assert page.locator(".shown li.item img").count() == 5
    page.click("button.in")
    assert page.get_attribute(".map", "viewBox").split()[2] == "62.4"
    page.click("button.whole")
    assert page.get_attribute(".map", "viewBox") == "-2 -2 104 104"
    page.set_viewport_size({"width": 1280, "height": 900})
    wide = (
        "() => [...document.querySelectorAll('.wide')].filter(t => t.scrollWidth > t.clientWidth)"
    )
    assert page.evaluate(f"{wide}.length") == 0
    sheet, body = (page.locator(name).first.bounding_box()["width"] for name in (".sheet", "main"))
    assert page.locator("li.item").first.bounding_box()["width"] > sheet / 10 and sheet == body
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        result = axe.run(page)
        assert result.violations_count == 0, result.generate_report()
    page.evaluate("() => document.querySelector('img.drawing').removeAttribute('alt')")
    assert axe.run(page).violations_count > 0  # axe does look


def protocol(folder: Path, **evaluate: Any) -> Run:
    """Open a run with another `[evaluate]`."""
    run = Run.open(folder)
    run.recipe = run.recipe.model_copy(update={"evaluate": Evaluate(**evaluate)})
    return run


NAMES = ["recall_at_1", "recall_at_8", "r_precision", "map_at_r", "ndcg_at_8"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"gallery_items": 2, "repetitions": 3},
            "The gallery is 2 items of each class, drawn at random",
        ),
        ({"gallery_items": 1, "repetitions": 2, "levels": ["part"]}, "label, part"),
        (
            {"levels": ["part", "parity"]},
            "by the finest level that it shares with the query: label, part, parity",
        ),
        ({"tags": "tags"}, "An item is right if it shares one of the query’s tags"),
        ({"tags": "tags", "exclude": "parity", "by": "part"}, "ignores [evaluate] by"),
    ],
)
def test_metrics_of_each_protocol_equal_those_of_evaluate(run_folder, given, sentence):
    run = protocol(run_folder, **given)
    result = measured.measure(run, sample=100)
    theirs = evaluate(run, metrics=NAMES, progress=False).metrics["trained"]
    graded = "levels" in given or "tags" in given
    assert ("ndcg_at_8" in result.intervals) == graded
    for name in NAMES[: None if graded else -1]:
        assert result.intervals[name][0] == pytest.approx(theirs[name], abs=1e-9), name
    text = page([Section("run", result, Thumbnails(run.dataset, 0), None, {})])
    assert sentence in text
    if given.get("gallery_items") == 2:
        assert result.rounds == 3 and result.gallery == 2 * 5 and len(result.query) == 100 - 10
    if len(given.get("levels", [])) == 2:
        assert "<br>same part" in text and "<br>same parity" in text
    rows = run.dataset.metadata
    assert rows is not None
    if "tags" in given:
        assert "Labels that are likely wrong" not in text
        tags = [set(row["tags"].split(";")) for row in rows]
        for query, near, grades in zip(result.query, result.neighbours, result.grades, strict=True):
            want = [len(tags[query] & tags[item]) if item >= 0 else 0 for item in near]
            assert grades.tolist() == want
        pairs = result.pairs
        sides = (pairs.items[pairs.first], pairs.items[pairs.second])
        one, other = ([tags[item] - {""} for item in side] for side in sides)
        assert pairs.same.tolist() == [bool(a & b) for a, b in zip(one, other, strict=True)]


def test_a_protocol_that_does_not_fit_the_data_is_refused(run_folder):
    for given, sentence in (
        ({"tags": "tag"}, "no metadata column 'tag'"),
        ({"gallery_items": 99}, "no class has more test items"),
    ):
        with pytest.raises((DataError, RecipeError), match=sentence):
            measured.measure(protocol(run_folder, **given), 20)
