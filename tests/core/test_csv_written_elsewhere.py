"""CSV files as pandas, Excel and Windows write them, read alike for training and for an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import retrieval
from PIL import Image
from retrieval.errors import DataError
from retrieval.serving.files.csv_table import typed
from retrieval.serving.index.locations import Source
from retrieval.serving.index.sources import collect

PATHS = [f"photos/{label}/{number}.png" for label in "abc" for number in range(2)]
Read = Callable[[Path], list[tuple[str, str | None]]]


@pytest.fixture
def folder(tmp_path):
    for name in PATHS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


def written(folder: Path, header: str, line: Callable[[int, str, str], str]) -> Path:
    """A CSV file with a line of each image, made of its number, path and label."""
    lines = [line(number, path, path.split("/")[1]) for number, path in enumerate(PATHS)]
    (folder / "m.csv").write_text("\n".join([header, *lines, ""]))
    return folder / "m.csv"


def dataset(file: Path) -> retrieval.plugin.Dataset:
    built: retrieval.plugin.Dataset = retrieval.create("dataset", "core.csv", manifest=str(file))
    return built


def trained(file: Path) -> list[tuple[str, str | None]]:
    data = dataset(file)
    return list(zip(data.keys, data.labels, strict=True))


def items(file: Path) -> list[Source]:
    return collect([file], "image").items


def indexed(file: Path) -> list[tuple[str, str | None]]:
    return [(item.key, item.label) for item in items(file)]


PLAIN = [(path, path.split("/")[1]) for path in PATHS]
readers = pytest.mark.parametrize("read", [trained, indexed])


@readers
def test_capitals_blanks_and_backslashes_are_read(read, folder):
    assert read(written(folder, "path,label", lambda n, path, label: f"{path},{label}")) == PLAIN
    assert (
        read(written(folder, "Path, LABEL", lambda n, path, label: f" {path} ,{label} ")) == PLAIN
    )
    windows = written(
        folder, "path,label", lambda n, path, label: path.replace("/", "\\") + f",{label}"
    )
    assert read(windows) == PLAIN


@readers
def test_a_backslash_in_a_files_own_name_stays(read, folder):
    (folder / "photos/a/0.png").rename(folder / "odd\\0.png")
    (folder / "m.csv").write_text("path,label\nodd\\0.png,a\n")
    assert read(folder / "m.csv") == [("odd\\0.png", "a")]


@readers
def test_a_column_without_a_name_says_how_to_write_the_file(read, folder):
    with pytest.raises(
        DataError, match=r"line 1: .*without a name.*row numbers.*to_csv\(…, index=False\)"
    ):
        read(written(folder, ",path,label", lambda n, path, label: f"{n},{path},{label}"))
    with pytest.raises(DataError, match=r"line 1: .*without a name.*a comma at the line.s end"):
        read(written(folder, "path,label,", lambda n, path, label: f"{path},{label},"))
    with pytest.raises(
        DataError, match="line 2: it ends with a comma, so that it has 3 values; the header names 2"
    ):
        read(written(folder, "path,label", lambda n, path, label: f"{path},{label},"))


@readers
def test_a_column_of_another_name_is_to_be_renamed(read, folder):
    with pytest.raises(
        DataError, match=r"no column 'path' \(it has: paths, label\)\. Rename 'paths'"
    ):
        read(written(folder, "paths,label", lambda n, path, label: f"{path},{label}"))
    with pytest.raises(DataError, match="names 'path' twice"):
        read(written(folder, "Path,PATH,label", lambda n, path, label: f"{path},{path},{label}"))


@readers
@pytest.mark.parametrize(
    ("start", "cause"),
    [
        ("https://example.com/", "path is an address.*Download them"),
        ("C:\\data\\", "path begins with a Windows drive"),
    ],
)
def test_the_cause_is_told_once(read, folder, start, cause):
    with pytest.raises(
        DataError, match=rf"m\.csv: line 2: {cause}.*\(and 5 more lines\)$"
    ) as error:
        read(written(folder, "path,label", lambda n, path, label: f"{start}{path},{label}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "<NA>"])
def test_a_missing_label_is_no_class(folder, missing):
    file = written(folder, "path,label", lambda n, path, label: f"{path},{label if n else missing}")
    with pytest.raises(DataError, match=r"line 2: photos/a/0\.png has no label"):
        trained(file)
    assert indexed(file) == [(PATHS[0], None), *PLAIN[1:]]


def test_sides_and_roles_by_their_usual_names(folder):
    sides = ["Train", "val", "VALID", "validation", "TEST", "test"]
    data = dataset(
        written(
            folder,
            "path,label,Split,Role",
            lambda n, path, label: f"{path},{label},{sides[n]},{'Query' if n == 5 else ''}",
        )
    )
    assert list(data.splits or ()) == ["train", *["validation"] * 3, "test", "test"]
    assert list(data.roles or ()) == [*[""] * 5, "query"] and data.metadata is None


def test_true_and_false_of_excel_and_pandas():
    values = ["TRUE", "False", "", "true"]
    assert [row["x"] for row in typed([{"x": value} for value in values])] == [
        True,
        False,
        None,
        True,
    ]
    assert typed([{"x": "TRUE"}, {"x": "yes"}]) == [{"x": "TRUE"}, {"x": "yes"}]


def test_the_column_id_is_an_items_id(folder):
    actual = items(
        written(folder, "Id,path,label,price", lambda n, path, label: f"p{n},{path},{label},{n}")
    )
    assert [item.key for item in actual] == [f"p{n}" for n in range(6)]
    assert actual[3].metadata == {"price": 3}
    both = items(written(folder, "id,key,path", lambda n, path, label: f"p{n},k{n},{path}"))
    assert both[1].key == "k1" and both[1].metadata == {"id": "p1"}


def test_one_number_in_several_forms_is_likely_one_class(folder):
    forms = ["1", "1.0", "01", "2", "2", "-1"]
    file = written(folder, "path,label", lambda n, path, label: f"{path},{forms[n]}")
    actual = retrieval.check_data(file, progress=False)
    assert list(actual.spelt) == [("1", "1.0", "01")] and not actual.clean
    assert "1 group of labels is likely one class" in actual.text()
