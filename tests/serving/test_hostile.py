"""Bundles and indexes made by someone who means harm: each is refused in a sentence, soon, and without much memory."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from retrieval.errors import BundleError, RetrievalError, StoreError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.index import items
from retrieval.serving.index.open import open_index

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["parts"][0].update(stop=17), "columns 0 to 17 of 16"),
        (lambda c: c["parts"][0].update(start=3), "contradicts itself"),
        (lambda c: c["parts"][0].update(start=9, stop=3), "columns 9 to 3"),
        (lambda c: c["parts"].append(c["parts"][0]), "two parts are one file"),
        (
            lambda c: c["parts"].append({"file": "vectors.npy", "start": 0, "stop": 16}),
            "two parts are one file",
        ),
        (lambda c: c.update(parts=[]), "parts"),
        (lambda c: c.update(count=10**9), "vectors.npy holds float32"),
        (lambda c: c.update(count=10**30), "index.json"),
        (lambda c: c.update(vector=10**9), "vector"),
        (lambda c: c.update(vector=8), "contradicts itself|columns"),
        (lambda c: c.update(code=16), "does not list codes.npy"),
        (lambda c: c.update(recall_at_10=float("nan")), "recall_at_10"),
        (
            lambda c: c["backend"].update(name="flat", options={}),
            "is a IndexIVFFlat, which this back end does not write",
        ),
        (lambda c: c["backend"].update(name="../x"), "no index back end|Plugin|plugin"),
        (lambda c: c["backend"].update(options={"lists": "x"}), "lists"),
        (lambda c: c["backend"].update(options={"lists": -1}), "lists"),
        (lambda c: c["parts"][0].update(file="../bundle/encoder.onnx"), "not the plain name"),
        (lambda c: c["parts"][0].update(file="\x1b[2Jx"), "not the plain name"),
        (lambda c: c["bundle"].update(variant="../int8"), "no variant"),
        (lambda c: c["bundle"].update(sha256="0" * 64), "contradicts itself"),
    ],
)
def test_an_index_json_that_lies(change, says, index, makers):
    makers.change_index(index, change)
    with pytest.raises(RetrievalError, match=says):
        open_index(index)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "a": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        ('{"format": 1, "format": 1}', "'format' is there twice"),
        ('{"format": 1, "count": ' + "9" * 5000 + "}", "not JSON"),
        ('{"format": ' + "9" * 400 + "}", "reads format 1"),
        ("\x00" * 100, "not JSON"),
        ("{" + " " * 5_000_000 + "}", "bytes"),
    ],
)
def test_json_that_is_meant_to_break_its_reader(text, says, index, makers):
    for name, error in (("index.json", StoreError), ("bundle/manifest.json", (BundleError, StoreError))):
        kept = (index / name).read_text()
        (index / name).write_text(text)
        with pytest.raises(error, match=says if len(text) < 4_000_000 else "."):
            open_index(makers.summed(index))
        (index / name).write_text(kept)
    (index / "bundle" / "manifest.json").write_text(text)
    from retrieval.serving.bundle import Bundle

    with pytest.raises(BundleError, match=says):
        Bundle.open(index / "bundle")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(vector=10**9), "vector"),
        (lambda c: c["input"].update(shape=[1, 10**5, 10**5]), "numbers|takes uint8"),
        (lambda c: c["input"]["preprocessing"].update(resize=10**9), "are possible"),
        (lambda c: c["input"]["preprocessing"].update(mean=["x"]), "mean"),
        (lambda c: c.update(subspaces=[{"name": "a", "start": 0, "stop": 8}]), "contradicts itself"),
        (lambda c: c["files"].update({"../../x": {"sha256": "0" * 64, "bytes": 1}}), "not the plain name"),
        (lambda c: c["files"].update({"x\n\x1b]0;": {"sha256": "0" * 64, "bytes": 1}}), "not the plain name"),
        (
            lambda c: c["files"]["encoder.onnx"].update(bytes=10**18),
            "is not what the bundle's manifest says|bytes instead",
        ),
        (lambda c: c["versions"].update(x=[1]), "versions"),
        (lambda c: c.update(name={"a": 1}), "name"),
        (lambda c: c.update(evaluation={"a": "b"}), "evaluation"),
    ],
)
def test_a_manifest_that_lies(change, says, index, makers):
    makers.change_manifest(index, change)
    with pytest.raises(RetrievalError, match=says):
        open_index(index)


LISTS = {
    "absolute": "0" * 64 + "  /etc/passwd\n",
    "above": "0" * 64 + "  ../x\n",
    "deep": "0" * 64 + "  a/b/c\n",
    "empty name": "0" * 64 + "  \n",
    "escape": "0" * 64 + "  a\x1b[0m\n",
    "a folder": "0" * 64 + "  bundle\n",
    "many": "".join(f"{'0' * 64}  {n}\n" for n in range(10_000)),
    "huge": "0" * 2_000_000,
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_checksums_that_names_what_it_should_not(name, index, makers):
    with (index / "SHA256SUMS").open("a") as file:
        file.write(LISTS[name])
    with pytest.raises(StoreError, match=r"is damaged|is not an index"):
        open_index(index)


def test_vectors_that_are_none(index, makers):
    path = index / "vectors.npy"
    good = np.load(path)

    def header(text: str) -> bytes:
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()

    nan = good.copy()
    nan[3, 3] = np.nan
    cases = {
        "NaN or infinity": nan,
        "holds float64": good.astype(np.float64),
        r"\(19, 8\)": good[:, :8],
        "cannot be read": header("{'descr': 'O', 'fortran_order': False, 'shape': (1,), }"),
        "cannot be read ": header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9, 10**9), }"),
        "cannot be read  ": header("(" * 9000),
        " cannot be read": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 16), }"),
        " cannot be read ": b"",
        " cannot be  read": b"\x80\x04cos\nsystem\n.",
    }
    for says, content in cases.items():
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        with pytest.raises(StoreError, match=" ".join(says.split())):
            open_index(makers.summed(index))
    np.save(path, np.asfortranarray(good))
    with pytest.raises(StoreError, match=r"vectors\.npy"):
        open_index(makers.summed(index))


ITEMS = items._SCHEMA + ";"
COUNT = "with recursive n(i) as (select 0 union all select i + 1 from n where i < 19) "


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (
            "create view items as with recursive n(i) as (select 0 union all select i + 1 from n) "
            "select i id, 'k' key, null label, '{}' metadata, null path, 1 bytes, 1 width, 1 height from n",
            "the one table",
        ),
        ("create table items (id)", "the one table"),
        ("create table other (id)", "the one table"),
        (ITEMS + "create trigger t after insert on items begin select 1; end", "the one table"),
        (ITEMS + "create view v as select 1", "the one table"),
        (ITEMS, "contradicts itself"),
        (
            ITEMS + COUNT + "insert into items select i * 2, 'k', null, '{}', null, 1, 1, 1 from n",
            "contradicts",
        ),
        ("create virtual table items using fts5(key)", "the one table|no such module"),
    ],
)
def test_items_that_are_no_items(statements, says, index, makers):
    makers.put_items(index / "items.sqlite", statements)
    with pytest.raises(StoreError, match=says):
        open_index(makers.summed(index))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("'k', null, '" + "[" * 5000 + "', null, 1, 1, 1", "too deeply"),
        ("'k', null, '" + "[" * 500 + "]" * 500 + "', null, 1, 1, 1", "too deeply"),
        ("'k', null, '[1]', null, 1, 1, 1", "no JSON object"),
        ("'k', null, '{\"a\": NaN}', null, 1, 1, 1", "NaN"),
        ("'k', null, '{\"a\": 1e999}', null, 1, 1, 1", "not a number"),
        ("'k', null, '{\"a\": 1, \"a\": 2}', null, 1, 1, 1", "twice"),
        ("'k', null, '{}', x'2f00', 1, 1, 1", "another type"),
        ("'k', null, '{}', null, -1, 1, 1", "another type"),
        ("cast(x'ff' as text), null, '{}', null, 1, 1, 1", "cannot be read"),
        ("hex(zeroblob(2100000)), null, '{}', null, 1, 1, 1", "too big"),
    ],
)
def test_an_item_that_is_none(row, says, index, makers):
    last = json.loads((index / "index.json").read_text())["count"] - 1
    makers.put_items(
        index / "items.sqlite",
        ITEMS + COUNT.replace("19", str(last)) + f"insert into items select i, {row} from n",
    )
    with open_index(makers.summed(index), threads=1) as opened, pytest.raises(StoreError, match=says):
        opened.search(opened.vector(0), 3)


def test_a_table_that_goes_round_in_circles_has_a_deadline(index, makers):
    """Pages that name each other: SQLite finds out, or is stopped."""
    path = index / "items.sqlite"
    makers.put_items(
        path,
        ITEMS
        + COUNT.replace("19", "19999")
        + "insert into items select i, 'k', null, '{}', null, 1, 1, 1 from n",
    )
    good = path.read_bytes()
    for seed in range(10):
        content = bytearray(good)
        random = np.random.default_rng(seed)
        for page in random.integers(1, len(content) // 4096, 20):
            content[page * 4096 : page * 4096 + 12] = good[4096 + 0 : 4096 + 12]
        path.write_bytes(content)
        with pytest.raises(StoreError):
            open_index(makers.summed(index)).search(np.zeros((1, 16), np.float32), 3)


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, '{"a": ' * 65 + "1" + "}" * 65, '["\\"[", ' + "[" * 64 + "]" * 64 + "]", '"' + '\\"[' * 200_000 + "\\" ],
)  # fmt: skip
def test_depth_is_bounded_whatever_python_s_own_limit_is(text):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 100_000)  # as some libraries do
    try:
        with pytest.raises(ValueError, match="nested too deeply" if text[0] != '"' else "Unterminated"):
            strict_loads(text)
    finally:
        sys.setrecursionlimit(before)
    assert (
        strict_loads('["' + "[" * 200 + '"' + ", []" * 100 + "]")[100] == []
    )  # neither text nor width is depth
