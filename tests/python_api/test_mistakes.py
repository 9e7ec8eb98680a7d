"""Mistakes in Python end in one sentence, which says what to do in Python."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import retrieval
from refusals import refusal
from retrieval.errors import BundleError, DataError, PluginError, StoreError

from .conftest import SMALL, Net


def test_k_is_a_whole_number(index, photos):
    query = next(photos.glob("*/*.png"))
    assert "k must be at least 1, not 0" in refusal(DataError, index.search, query, k=0)
    assert "k must be a whole number, not '3'" in refusal(DataError, index.search, query, k="3")
    candidates = refusal(DataError, index.search, query, candidates="all")
    assert "number of candidates must be a whole number" in candidates
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
        text = refusal(StoreError, use)
        assert "was closed. Open it again with retrieval.Index.open" in text


@pytest.mark.parametrize("port", [99999, -1, "8000"])
def test_a_wrong_port_is_refused(index, port):
    text = refusal(StoreError, retrieval.serve, index, port=port, wait=False)
    assert "port must be a whole number from 0 " in text and f" to 65535, not {port!r}" in text


def test_a_side_that_a_run_does_not_have(trained):
    for measure in (trained.evaluate, trained.verify):
        text = refusal(DataError, measure, side="tst", progress=False)
        assert '"test" or "validation" side, not on \'tst\'' in text
    assert "There is no side 'tst'" in refusal(DataError, trained.labels, "tst")
    assert not list(trained.path.glob("*tst*"))


def test_one_name_stands_for_a_list_of_one(trained, tmp_path):
    evaluation = trained.evaluate(metrics="recall_at_1", progress=False)
    assert list(evaluation.metrics["trained"]) == ["recall_at_1"]
    recall = retrieval.evaluate(
        trained.encode("test", progress=False), trained.labels("test"), metrics="recall_at_1"
    )
    assert evaluation.values == pytest.approx(recall.values, abs=0.01)
    mine = trained.evaluate(metrics={"mine": retrieval.create("metric", "core.recall_at")})
    assert list(mine.values.values()) == list(evaluation.values.values())
    assert list(mine.values) == ["mine"]
    encoder = trained.export(tmp_path / "bundle", variants="fp16", progress=False)
    assert list(encoder.bundle.manifest.variants) == ["fp16"]


def test_wrong_sources_and_queries_are_refused(bundle, photos, tmp_path):
    from PIL import Image

    query = next(photos.glob("*/*.png"))
    for sources, batch, sentence in (
        ([Image.new("L", (8, 8))], 32, "not an object of type Image"),
        (photos, 0, "batch_size must be at least 1, not 0"),
    ):
        options = {"model": bundle, "batch_size": batch, "progress": False}
        create = retrieval.Index.create
        assert sentence in refusal(DataError, create, tmp_path / "index", sources, **options)
    assert not list(tmp_path.iterdir())
    assert "For images, call `encode_images`" in refusal(DataError, bundle.bundle.encode, [query])
    drawn = refusal(DataError, retrieval.plot.neighbours, str(tmp_path), query)
    assert "retrieval.Index.open(path), queries" in drawn


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"backbone": Net}, "The backbone is a class, Net; pass an object of it: Net(…)"),
        ({"loss": "pml.triplet_margin"}, 'or pass what retrieval.create("loss", …) returns'),
        ({"dataset": "photos"}, 'as data={"name": …}'),
        ({"miner": {"name": "pml.multi_similarity"}}, "is text or a table, but must be an object"),
    ],
)
def test_text_tables_and_classes_are_no_objects(tmp_path, part, sentence):
    text = refusal(PluginError, retrieval.train, SMALL, tmp_path / "run", progress=False, **part)
    assert sentence in text and not list(tmp_path.iterdir())


def test_existing_folders_are_answered_in_python(trained, index, bundle, photos):
    train = refusal(DataError, retrieval.train, SMALL, trained.path, progress=False)
    for words in ("larger train.epochs", "in Python resume=True", "in Python replace=True"):
        assert words in train
    export = refusal(BundleError, trained.export, bundle.path, progress=False)
    options = {"model": bundle, "progress": False}
    create = refusal(StoreError, retrieval.Index.create, index.path, photos, **options)
    assert "in Python replace=True" in export and "in Python replace=True" in create
    opened = refusal(StoreError, retrieval.Index.open, bundle.path)
    assert "in Python retrieval.Index.create" in opened


def test_wrong_sources_of_load_and_open(index, bundle, tmp_path):
    server = "http://127.0.0.1:8000"
    for error, source, sentence in (
        (DataError, tmp_path, "neither a run, nor a bundle, nor the name of a backbone"),
        (DataError, index.path, "is an index. Open it with retrieval.Index.open"),
        (DataError, "gone", "neither a run, nor a bundle, nor the name of a backbone"),
        (DataError, server, "a server with retrieval.client.Client"),
        (PluginError, "core.convnt", "Did you mean 'core.convnet'? Nor is there a folder"),
        (BundleError, "core.convnet", "The weights of core.convnet are random"),
    ):
        assert sentence in refusal(error, retrieval.load, str(source))
    assert "retrieval.client.Client" in refusal(StoreError, retrieval.Index.open, server)
    no_run = refusal(DataError, retrieval.load, bundle.path, dataset=[])
    assert "is not a run, so dataset cannot belong to it" in no_run


def test_no_sentence_that_python_raises_names_only_an_option_of_the_command_line():
    package = Path(retrieval.__file__).parent
    floors = ("base", "bundle", "data", "evaluation", "export", "images", "index", "model")
    floors += ("recipe", "run", "store", "training")
    only_commands = {"read_embeddings.py", "write_embeddings.py", "tables.py"}
    wrong = []
    for file in (file for floor in floors for file in (package / floor).rglob("*.py")):
        if file.name in only_commands:
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
            if option and not {"Python", "pip", "ray"} & {*re.findall(r"\w+", text)}:
                wrong.append(f"{file.relative_to(package)}: {text}")
    assert not wrong, "\n".join(wrong)
