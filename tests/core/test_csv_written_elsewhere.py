"""CSV files as pandas, Excel and Windows write them, read the same for training and indexing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import retrieval
from layouts import picture
from retrieval.base.csv_table import CsvTable, csv_text, typed
from retrieval.errors import DataError
from retrieval.index.sources import Source, collect

PATHS = [f"photos/{label}/{number}.png" for label in "abc" for number in range(2)]
Read = Callable[[Path], list[tuple[str, str | None]]]


@pytest.fixture
def folder(tmp_path):
    for name in PATHS:
        picture(tmp_path / name, 0)
    return tmp_path


def written(folder: Path, header: str, form: str, column: Sequence[str] = [""] * 6) -> Path:
    """Write a CSV file with a line per image: `form` with its n, path, label and `column` value."""
    rows = [
        form.format(n=n, path=path, label=path.split("/")[1], value=column[n])
        for n, path in enumerate(PATHS)
    ]
    (folder / "m.csv").write_text("\n".join([header, *rows, ""]))
    return folder / "m.csv"


def dataset(file: Path) -> retrieval.plugin.Dataset:
    return retrieval.create("dataset", "core.csv", manifest=str(file))


def trained(file: Path) -> list[tuple[str, str | None]]:
    data = dataset(file)
    return list(zip(data.keys, data.labels, strict=True))


def items(file: Path) -> list[Source]:
    return collect([file], "image").items


def indexed(file: Path) -> list[tuple[str, str | None]]:
    return [(item.id, item.label) for item in items(file)]


PLAIN = [(path, path.split("/")[1]) for path in PATHS]
readers = pytest.mark.parametrize("read", [trained, indexed])


@readers
def test_capitals_blanks_and_backslashes_are_accepted(read, folder):
    assert read(written(folder, "path,label", "{path},{label}")) == PLAIN
    assert read(written(folder, "Path, LABEL", " {path} ,{label} ")) == PLAIN
    windows = [path.replace("/", "\\") for path in PATHS]
    assert read(written(folder, "path,label", "{value},{label}", windows)) == PLAIN


@readers
def test_a_backslash_in_a_file_name_stays(read, folder):
    (folder / "photos/a/0.png").rename(folder / "odd\\0.png")
    (folder / "m.csv").write_text("path,label\nodd\\0.png,a\n")
    assert read(folder / "m.csv") == [("odd\\0.png", "a")]


@readers
@pytest.mark.parametrize(
    ("header", "form", "says"),
    [
        (
            ",path,label",
            "{n},{path},{label}",
            r"line 1: .*without a name.*row numbers.*to_csv\(…, index=False\)",
        ),
        ("path,label,", "{path},{label},", r"line 1: .*without a name.*a comma at the line.s end"),
        ("path,label", "{path},{label},", "line 2: .*with a comma.* 3 values; the header names 2"),
        ("paths,label", "{path},{label}", r"no column 'path' \(it has: paths, .* Rename 'paths'"),
        ("Path,PATH,label", "{path},{path},{label}", "names 'path' twice"),
    ],
    ids=["row numbers", "comma in the header", "comma in a line", "another name", "twice"],
)
def test_wrong_columns_are_refused(read, folder, header, form, says):
    with pytest.raises(DataError, match=says):
        read(written(folder, header, form))


@readers
@pytest.mark.parametrize(
    ("start", "cause"),
    [
        ("milvus://example.com/", "fsspec reads no photos at milvus://"),
        ("C:\\data\\", "path begins with a Windows drive"),
    ],
)
def test_a_cause_of_many_lines_is_reported_once(read, folder, start, cause):
    says = rf"m\.csv: line 2: {cause}.*\(and 5 more lines\)$"
    with pytest.raises(DataError, match=says) as error:
        read(written(folder, "path,label", start + "{path},{label}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "<NA>"])
def test_a_missing_label_is_no_class(folder, missing):
    labels = [missing, *(label for _, label in PLAIN[1:])]
    file = written(folder, "path,label", "{path},{value}", labels)
    with pytest.raises(DataError, match=r"line 2: photos/a/0\.png has no label"):
        trained(file)
    assert indexed(file) == [(PATHS[0], None), *PLAIN[1:]]


def test_sides_and_roles_by_their_usual_names(folder):
    sides = [f"{side}," for side in ("Train", "val", "VALID", "validation", "TEST")]
    file = written(
        folder, "path,label,Split,Role", "{path},{label},{value}", [*sides, "test,Query"]
    )
    data = dataset(file)
    assert list(data.splits or ()) == ["train", *["validation"] * 3, "test", "test"]
    assert list(data.roles or ()) == [*[""] * 5, "query"] and data.metadata is None


def test_the_column_id_is_an_items_id(folder):
    actual = items(written(folder, "Id,path,label,price", "p{n},{path},{label},{n}"))
    assert [item.id for item in actual] == [f"p{n}" for n in range(6)]
    assert actual[3].metadata == {"price": 3}
    both = items(written(folder, "id,key,path", "p{n},k{n},{path}"))
    assert both[1].id == "k1" and both[1].metadata == {"id": "p1"}


def test_several_spellings_of_a_number_are_reported(folder):
    file = written(folder, "path,label", "{path},{value}", ["1", "1.0", "01", "2", "2", "-1"])
    actual = retrieval.check_data(file, progress=False)
    assert list(actual.spelt) == [("1", "1.0", "01")] and not actual.clean
    assert "1 group of labels is likely one class" in actual.text()


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["12", "8", "-15", "0"], [12, 8, -15, 0]),
        (["12", "8.5", ""], [12.0, 8.5, None]),
        (["1e3", "-2.5E-1"], [1000.0, -0.25]),
        (["true", "FALSE", "", "True"], [True, False, None, True]),
        (["TRUE", "False"], [True, False]),
        (["TRUE", "yes"], ["TRUE", "yes"]),
        (["007", "12"], ["007", "12"]),  # codes, not numbers
        (["1234567890123456"], ["1234567890123456"]),
        (["1e999", "1"], ["1e999", "1"]),
        (["nan", "1"], ["nan", "1"]),
        (["1_000", "1"], ["1_000", "1"]),
        (["\u0663", "1"], ["\u0663", "1"]),  # digits of another script are text
        (["", ""], ["", ""]),
        (["12 cm", "3"], ["12 cm", "3"]),
    ],
)
def test_a_column_has_one_type(texts, values):
    rows = typed([{"a": text, "b": "x"} for text in texts])
    assert [row["a"] for row in rows] == values
    assert [type(row["a"]) for row in rows] == [type(value) for value in values]
    assert all(row["b"] == "x" for row in rows) and list(rows[0]) == ["a", "b"]
    json.dumps(rows, allow_nan=False)


def test_written_cells_are_no_formulas_and_are_read_as_they_were():
    formulas = ["=1+1", "+44 1", "-x", "@SUM(A1)", "\t=1", "\r=1", "＝1", "=cmd|' /C calc'!A0", "-"]
    others = ["-1", "-2.5e-7", "'", "'quoted'", "'-1", "''=x", "a=b", "", 'say "x", y', "a\nb"]
    cells = [*formulas, *others]
    text = csv_text([("path", "label"), *((cell, cell) for cell in cells), (-0.5, 7)])
    (_, *rows) = csv.reader(io.StringIO(text, newline=""))
    for cell, row in zip(formulas, rows, strict=False):
        assert row == [f"'{cell}"] * 2
    assert rows[len(formulas)] == ["-1", "-1"] and rows[-1] == ["-0.5", "7"]
    read = CsvTable("x.csv", ["path"], lambda: io.BytesIO(text.encode())).rows
    assert [row["label"] for _, row in read] == [*cells, "7"]


def test_no_rows():
    assert typed([]) == []
