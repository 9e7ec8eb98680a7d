"""`retrieval evaluate --protocol verification` on real runs."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest
import torch
from retrieval.bundle.bundle import Bundle
from retrieval.data.encode import encode
from retrieval.errors import DataError
from retrieval.evaluation import verify_run as verification_run
from retrieval.evaluation.verification import verification
from retrieval.evaluation.verify_run import verify
from retrieval.recipe.read import check_recipe
from retrieval.run.open import Run
from retrieval.training.trainer import train_run

TOOLBOX = str(Path(__file__).parents[1] / "training" / "toolbox.py")
RECIPE: dict[str, Any] = {
    "name": "test",
    "plugins": [TOOLBOX],
    "data": {"name": "toolbox.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 4, "batches": 3},
    "backbone": {"name": "toolbox.net"},
    "head": {"embedding_size": 16},
    "loss": {"name": "toolbox.deadly"},
    "train": {"epochs": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A quick run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    learner = {"learner": {"name": "core.pca", "n_components": 8}}
    learner |= {"backbone": {"name": "toolbox.net", "frozen": True}}
    learner |= dict.fromkeys(("loss", "sampler", "head", "train"))
    kinds = {"plain": {}, "combiner": {"combiner": {"name": "toolbox.local"}}, "learner": learner}
    for name, tables in kinds.items():
        made = {k: v for k, v in {**RECIPE, **tables}.items() if v is not None}
        train_run(folder / name, check_recipe(made))
    return {name: folder / name for name in kinds}


@pytest.fixture
def fresh(runs, tmp_path):
    """Function that copies a run."""

    def copy(name: str) -> Path:
        shutil.copytree(runs[name], tmp_path / name)
        return tmp_path / name

    return copy


def written_pairs(folder: Path) -> list[dict[str, str]]:
    with (folder / "verification-test-pairs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def by_matrix(run: Run, rows: list[dict[str, str]]) -> list[float]:
    """Return the pairs' distances from the whole matrix of the model's distances."""
    codes = encode(run.model, run.dataset, np.arange(len(run.dataset)))
    with torch.inference_mode():
        matrix = run.model.distances(codes, codes).double().numpy()
    place = {key: i for i, key in enumerate(run.dataset.keys)}
    return [float(matrix[place[row["first"]], place[row["second"]]]) for row in rows]


@pytest.mark.parametrize("kind", ["plain", "combiner", "learner"])
def test_metrics_of_the_models_distances_and_of_raw_pixels(fresh, kind, monkeypatch):
    run = Run.open(fresh(kind))
    monkeypatch.setattr(verification_run, "_NUMBERS_PER_CALL", 160)  # a few pairs at a time
    results = verify(run, baseline=True)
    rows = written_pairs(run.path)
    distances = by_matrix(run, rows)
    written = [float(row["distance"]) for row in rows]
    np.testing.assert_allclose(written, distances, rtol=2e-5, atol=1e-6)
    labels = dict(zip(run.dataset.keys, run.dataset.labels, strict=True))
    images = {key: run.dataset[i] for i, key in enumerate(run.dataset.keys)}
    held, raw = {run.dataset.keys[i] for i in run.splits.query}, []
    for row in rows:
        assert (labels[row["first"]] == labels[row["second"]]) == (row["same"] == "1")
        assert {row["first"], row["second"]} <= held
        x, y = (np.asarray(images[row[name]], float).ravel() for name in ("first", "second"))
        raw.append(float(np.linalg.norm(x / np.linalg.norm(x) - y / np.linalg.norm(y))))
    same, folds = [row["same"] == "1" for row in rows], [int(row["fold"]) for row in rows]
    expected = verification(written, same, folds)
    assert results.metrics["trained"] == expected.values
    assert list(results.folds["trained"]["accuracy"].values()) == expected.accuracy.tolist()
    expected = verification(raw, same, folds)
    assert results.metrics["raw pixels"] == pytest.approx(expected.values, abs=1e-9)
    assert results.pairs["folds"] == 10
    assert results.pairs["same"] == results.pairs["different"] == 270 and results.notes == []


def test_the_files_that_are_written(fresh):
    run = Run.open(fresh("plain"))
    results = verify(run, draw=400, seed=3, baseline=True)
    kept = json.loads((run.path / "verification-test.json").read_text(encoding="utf-8"))
    assert kept == results.as_dict()
    assert not list(run.path.glob("*.tmp"))
    with (run.path / "verification-test-roc.csv").open(encoding="utf-8", newline="") as file:
        points = [row for row in csv.DictReader(file) if row["contestant"] == "raw pixels"]
    far, tar = ([float(point[name]) for point in points] for name in ("far", "tar"))
    assert (far[0], tar[0], far[-1], tar[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(tar, far) == pytest.approx(kept["metrics"]["raw pixels"]["auc"], abs=1e-12)
    picture = (run.path / "verification-test-roc.svg").read_text(encoding="utf-8")
    assert picture.rstrip().endswith("</svg>")
    assert f"raw pixels (AUC {kept['metrics']['raw pixels']['auc']:.4f})" in picture
    text = results.table()
    assert text.splitlines()[0].split() == ["trained", "raw", "pixels"]
    assert "200 same and 200 different pairs" in text
    assert "drawn from the test items, in 10 folds" in text
    # the pairs that were written are a list that can be read, for this run or another one
    again = verify(run, pairs=run.path / "verification-test-pairs.csv")
    assert again.metrics["trained"] == kept["metrics"]["trained"]
    assert again.pairs["file"].endswith("pairs.csv")


def test_notes_count_pairs_with_training_items_and_contradictions(fresh, tmp_path):
    run = Run.open(fresh("plain"))
    names: dict[str, list[str]] = {}
    for key, label in zip(run.dataset.keys, run.dataset.labels, strict=True):
        names.setdefault(label, []).append(key)
    lines = ["first,second,same,fold"]
    for fold, (a, b) in {"seen": ("0", "1"), "new": ("8", "9"), "both": ("1", "9")}.items():
        for i in range(0, 12, 2):
            lines.append(f"{names[a][i]},{names[a][i + 1]},1,{fold}")
            lines.append(f"{names[a][i]},{names[b][i]},0,{fold}")
    lines[-1] = lines[-1].replace(",0,", ",1,")  # a 1 and a 9, called the same
    path = tmp_path / "list.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    results = verify(run, pairs=path)
    assert results.notes == [
        "The list contradicts the data's labels for 1 of 36 pairs.",
        (
            "24 of 36 pairs have an item by which this model was trained or chosen, so these are"
            " not metrics of held-out items; folds without such pairs: new."
        ),
    ]
    assert set(results.folds["trained"]["accuracy"]) == {"seen", "new", "both"}
    assert all(note in results.table() for note in results.notes)


def test_names_that_are_not_utf8_or_begin_like_formulas(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    makers.write_digits(tmp_path / "photos", 60)
    for folder in (tmp_path / "photos").iterdir():
        for number, file in enumerate(sorted(folder.iterdir())):
            head = ("\udcff", "=1+", "-", "")[number % 4]
            file.rename(folder / f"{head}{file.name}")
        folder.rename(folder.with_name(f"=\udce9{folder.name}"))
    recipe = {name: RECIPE[name] for name in ("name", "train")} | {
        "data": {"name": "core.image_folder", "folder": str(tmp_path / "photos")},
        "split": {"by": "item", "test": 0.5},
        "sampler": {"classes": 4, "items": 2, "batches": 1},
        "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 2, "layers": 1},
        "loss": {"name": "pml.triplet_margin"},
    }
    run = tmp_path / "\udcfcrun"
    train_run(run, check_recipe(recipe))
    first = verify(Run.open(run))
    pairs = run / "verification-test-pairs.csv"
    cells = [cell for row in written_pairs(run) for cell in (row["first"], row["second"])]
    assert not [cell for cell in cells if cell.startswith("=")]
    assert any("'=\\xe9" in cell for cell in cells) and any("\\xff" in cell for cell in cells)
    shutil.copy(pairs, tmp_path / "pairs.csv")
    again = verify(Run.open(run), pairs=tmp_path / "pairs.csv")
    assert again.metrics["trained"] == first.metrics["trained"]

    assert cli("report", run, "--output", "report.html", "--map", "none").code == 0
    assert "=\\xe9" in Path("report.html").read_text(encoding="utf-8")
    assert cli("export", run, "--output", "\udcffbundle").code == 0
    assert Bundle.open(tmp_path / "\udcffbundle").manifest.name == "\\xfcrun"
    (tmp_path / "photos" / "\udcffbad.png").write_bytes(b"no image")
    assert cli("data", "check", "photos", "--output", "\udcffout.json").code == 1
    assert "bad.png" in str(json.loads(Path("\udcffout.json").read_text(encoding="utf-8")))


def test_a_full_disk_and_a_run_without_validation_items(fresh, monkeypatch):
    run = Run.open(fresh("plain"))
    before = sorted(path.name for path in run.path.iterdir())

    def full(self: Path, data: bytes) -> int:
        if self.name.endswith("pairs.csv.tmp"):
            raise OSError(28, "No space left on device")
        with self.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match="No space left on device"):
        verify(run, draw=200)
    assert sorted(path.name for path in run.path.iterdir()) == before
    run.splits.__dict__["validation"] = np.empty(0, np.int64)
    with pytest.raises(DataError, match="has no validation items"):
        verify(run, side="validation")


def test_the_command(cli, fresh, tmp_path, monkeypatch):
    fresh("plain")
    monkeypatch.chdir(tmp_path)
    evaluate = ("evaluate", "plain", "--protocol", "verification")
    done = cli(*evaluate, "--baseline", "--draw", 400)
    assert done.code == 0
    assert "tar_at_far_0.01" in done.out and "tar_at_far_0.001" not in done.out
    assert done.out.splitlines()[-1] == "ROC curve: plain/verification-test-roc.svg"
    found = json.loads(cli(*evaluate, "--split", "validation", "--json").out)
    assert found["split"] == "validation" and 0 < found["metrics"]["trained"]["eer"] < 1
    assert Path("plain/verification-validation.json").is_file()

    Path("wrong.csv").write_text("first,second,same\ndigits/1,digits/1,1\n")
    for wrong, says in {
        ("--pairs", "wrong.csv"): "wrong.csv has 2 problems: - line 2: 'digits/1' is paired with",
        ("--pairs", "x.csv", "--draw", "20"): "leave out x.csv or the number to draw",
        ("--metric", "map", "--clusters"): "Leave --metric and --clusters out",
        ("--bundle", "b"): "Leave --bundle out with --protocol verification",
        ("--pairs", "gone.csv"): "gone.csv does not exist",
        ("--draw", "3"): "3 is not in the range x>=4",
    }.items():
        done = cli(*evaluate, *wrong)
        assert done.code == 2 and says in " ".join(done.err.split()) and "Traceback" not in done.err
    done = cli("evaluate", "plain", "--draw", 20, "--seed", 1)
    says = "Leave --draw and --seed out with --protocol retrieval"
    assert done.code == 2 and says in " ".join(done.err.split())
