"""Mistakes of somebody who works in Python: one sentence each, and what to do in Python."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import retrieval
from retrieval.errors import DataError, PluginError, StoreError

from .conftest import SMALL, Net


@pytest.fixture
def index(bundle, photos, tmp_path):
    with retrieval.Index.create(tmp_path / "index", photos, model=bundle, progress=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("k", "said"),
    [
        (0, "k must be at least 1, not 0"),
        (2.5, "k must be a whole number, not '2.5'"),
        ("3", "k must be a whole number, not '3'"),
    ],
)
def test_k_is_a_whole_number(index, photos, k, said):
    query = next(photos.glob("*/*.png"))
    with pytest.raises(DataError, match=said):
        index.search(query, k=k)
    with pytest.raises(DataError, match="number of candidates must be a whole number"):
        index.search(query, candidates="all")
    assert len(index.search(query, k=np.int64(2))) == 2


def test_a_closed_index_says_so(index, photos):
    query = next(photos.glob("*/*.png"))
    index.close()
    for use in (
        lambda: index.search(query),
        lambda: index.get("0"),
        lambda: index.vector("0"),
        lambda: retrieval.serve(index, port=0, wait=False),
        lambda: retrieval.plot.neighbours(index, query),
    ):
        with pytest.raises(
            StoreError, match=r"was closed. Open it again with retrieval\.Index\.open"
        ):
            use()


@pytest.mark.parametrize("port", [99999, -1, "8000"])
def test_a_port_that_is_none_is_refused(index, port):
    with pytest.raises(StoreError, match=r"port must be a whole number from 0 .* to 65535, not"):
        retrieval.serve(index, port=port, wait=False)


def test_a_side_that_a_run_does_not_have(trained):
    for measure in (trained.evaluate, trained.verify):
        with pytest.raises(DataError, match='"test" or "validation" side, not on \'tst\''):
            measure(side="tst", progress=False)
    with pytest.raises(DataError, match="There is no side 'tst'"):
        trained.labels("tst")
    assert not list(trained.path.glob("*tst*"))


def test_one_name_stands_for_a_list_of_one(trained, tmp_path):
    found = trained.evaluate(metrics="recall_at_1", progress=False)
    assert list(found.metrics["trained"]) == ["recall_at_1"]
    made = trained.export(tmp_path / "bundle", variants="fp16", progress=False)
    assert list(made.bundle.manifest.variants) == ["fp16"]


def test_what_cannot_be_indexed_encoded_or_drawn(bundle, photos, tmp_path):
    from PIL import Image

    query = next(photos.glob("*/*.png"))
    for sources, batch, said in (
        ([Image.new("L", (8, 8))], 32, "is the path of .* not an object of type Image"),
        (photos, 0, "batch must be at least 1, not 0"),
    ):
        with pytest.raises(DataError, match=said):
            retrieval.Index.create(
                tmp_path / "index", sources, model=bundle, batch=batch, progress=False
            )
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="For images, call `encode_images`"):
        bundle.bundle.encode([query])
    with pytest.raises(DataError, match=r"retrieval\.Index\.open\(path\), queries"):
        retrieval.plot.neighbours(str(tmp_path), query)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backbone": Net}, r"The backbone is a class, Net; pass an object of it: Net\(…\)"),
        (
            {"loss": "pml.triplet_margin"},
            r'as loss=\{"name": …\}, or pass what retrieval\.create\("loss", …\) returns',
        ),
        ({"dataset": "photos"}, r'as data=\{"name": …\}'),
        ({"miner": {"name": "pml.multi_similarity"}}, "is text or a table, but must be an object"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path, given, said):
    with pytest.raises(PluginError, match=said):
        retrieval.train(SMALL, tmp_path / "run", progress=False, **given)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_is_answered_in_python(trained, index, bundle, photos):
    with pytest.raises(
        DataError, match=r"larger train\.epochs.* in Python resume=True.* in Python replace=True"
    ):
        retrieval.train(SMALL, trained.path, progress=False)
    with pytest.raises(retrieval.errors.BundleError, match="in Python replace=True"):
        trained.export(bundle.path, progress=False)
    with pytest.raises(StoreError, match="in Python replace=True"):
        retrieval.Index.create(index.path, photos, model=bundle, progress=False)
    with pytest.raises(StoreError, match=r"in Python retrieval\.Index\.create"):
        retrieval.Index.open(bundle.path)


def test_what_cannot_be_loaded_is_said(index, bundle, tmp_path):
    for source, said in (
        (tmp_path, "neither a run, nor a bundle, nor the name of a backbone"),
        (index.path, "is an index. Open it with retrieval.Index.open"),
        ("gone", "neither a run, nor a bundle, nor the name of a backbone"),
        ("http://127.0.0.1:8000", r"^http://127.*neither.*server with retrieval\.client\.Client"),
    ):
        with pytest.raises(DataError, match=said):
            retrieval.load(str(source))
    with pytest.raises(StoreError, match=r"retrieval\.client\.Client"):
        retrieval.Index.open("http://127.0.0.1:8000")
    with pytest.raises(PluginError, match=r"Did you mean 'core.convnet'\? Nor is there a folder"):
        retrieval.load("core.convnt")
    with pytest.raises(DataError, match="is not a run, so dataset cannot belong to it"):
        retrieval.load(bundle.path, dataset=[])
    with pytest.raises(
        retrieval.errors.BundleError, match=r"The weights of core\.convnet are random"
    ):
        retrieval.load("core.convnet")


def test_no_sentence_that_python_raises_names_only_an_option_of_the_command_line():
    package = Path(retrieval.__file__).parent
    floors = ("data", "evaluation", "export", "model", "recipe", "run", "serving", "training")
    only_commands = {"distill.py", "embedded.py", "proposal.py", "tables.py"}
    wrong = []
    for file in (file for floor in floors for file in (package / floor).rglob("*.py")):
        if file.name in only_commands or {"http", "embedding"} & {*file.parts}:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        whole = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        pieces = {id(part) for parts in whole for part in parts}
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        whole += [[n] for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        for parts in whole:
            if len(parts) == 1 and id(parts[0]) in pieces | docs:
                continue
            text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            option = re.search(r"(?<![\w-])--[a-z]", text)
            if option and not {"Python", "pip"} & {*re.findall(r"\w+", text)}:
                wrong.append(f"{file.relative_to(package)}: {text}")
    assert not wrong, "\n".join(wrong)
