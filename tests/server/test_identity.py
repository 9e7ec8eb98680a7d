"""The identity of an embedding: Parquet files and answers carry it, and readers refuse strangers.

The code of `docs/identity.md` is the reader of another program: it imports nothing of ours.
"""

import base64
import json
import re
import shutil
from pathlib import Path

import makers
import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.identity import embedding_identity
from retrieval.bundle.manifest import write_manifest
from retrieval.bundle.probe import probe_of
from retrieval.client import Client, NewItem
from retrieval.errors import ServerError
from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "identity.md"


def page_code(name):
    """Return the functions that a file shown on the page defines, and its lines of code."""
    body = re.search(rf":caption: {name}\n\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)[1]
    names = {}
    exec(compile(body, name, "exec"), names)
    return names, [line for line in body.splitlines() if line]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A bundle with a probe and a variant, as an export writes it."""
    folder = makers.make_bundle(tmp_path_factory.mktemp("probed") / "bundle", variant=True)
    opened = {
        variant: Bundle.open(folder, variant=variant, threads=1) for variant in (None, "fp16")
    }
    probe = probe_of(opened, (0.0, 1.0))
    write_manifest(folder, opened[None].manifest.model_copy(update={"probe": probe}))
    return folder


@pytest.fixture(scope="module")
def vectors(probed, photos, tmp_path_factory):
    """A Parquet file of vectors of `probed`, and of its variant."""
    folder = tmp_path_factory.mktemp("vectors")
    for name, variant in (("plain", None), ("fp16", "fp16")):
        options = EmbeddingOptions(variant=variant, device="cpu")
        embed_sources(probed, photos, folder / name, options, progress=False)
    return {name: folder / name / "part-000000.parquet" for name in ("plain", "fp16")}


def test_a_reader_of_ten_lines_takes_its_own_vectors_and_refuses_strangers(
    probed, vectors, tmp_path
):
    names, lines = page_code("read_vectors.py")
    read = names["read_vectors"]
    assert len(lines) <= 10 and "retrieval" not in "".join(lines)
    keys, rows = read(vectors["plain"], probed)
    assert len(keys) == 200 and rows.shape == (200, makers.WIDTH)
    bundle = Bundle.open(probed, threads=1)
    assert np.allclose(rows[:5], bundle.encode(makers.digits()[0][_rows(keys[:5])][:, None]).vector)
    assert len(read(vectors["fp16"], probed, "fp16")[0]) == 200
    # the same vectors in the same file, but another manifest: another name
    stranger = Path(shutil.copytree(probed, tmp_path / "stranger"))
    text = (stranger / "manifest.json").read_text("utf-8")
    (stranger / "manifest.json").write_text(text.replace('"digits"', '"digits2"'))
    for file, folder, variant in (
        (vectors["plain"], stranger, None),
        (vectors["plain"], probed, "fp16"),
        (vectors["fp16"], probed, None),
    ):
        with pytest.raises(ValueError, match="holds vectors of"):
            read(file, folder, variant)


def test_the_reader_refuses_a_file_without_a_name(probed, vectors, tmp_path):
    table = pq.read_table(vectors["plain"]).replace_schema_metadata()
    pq.write_table(table, tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match="holds vectors of None"):
        page_code("read_vectors.py")[0]["read_vectors"](tmp_path / "bare.parquet", probed)


def _rows(keys):
    return [int(Path(key).stem) for key in keys]


def test_the_probe_tells_models_apart_without_a_name(probed, vectors, tmp_path):
    differs = page_code("check_probe.py")[0]["differs"]
    assert differs(vectors["plain"], probed / "encoder.onnx") < 1e-4
    assert differs(vectors["fp16"], probed / "encoder.fp16.onnx") < 1e-4
    other = makers.make_bundle(tmp_path / "other", seed=5)
    assert differs(vectors["plain"], other / "encoder.onnx") > 0.1


def test_a_parquet_file_says_all_that_the_page_lists(probed, vectors):
    said = json.loads(pq.read_schema(vectors["fp16"]).metadata[b"embedding"])
    bundle = Bundle.open(probed, variant="fp16", threads=1)
    assert said == embedding_identity(bundle)
    assert (said["bundle"], said["variant"]) == (bundle.sha256, "fp16")
    assert set(said) == {
        *("format", "bundle", "variant", "vector", "normalized", "distance", "probe")
    }
    stored = np.frombuffer(base64.b64decode(said["probe"]["vector"]), "<f4")
    assert stored.shape == (said["vector"],)
    page = PAGE.read_text("utf-8")
    assert all(f'"{name}"' in page or f"`{name}`" in page for name in said)


def test_a_bundle_without_a_probe_has_a_name_too(bundle_path):
    said = embedding_identity(Bundle.open(bundle_path, threads=1))
    assert said["probe"] is None and len(said["bundle"]) == 64


def test_answers_carry_the_name_and_the_server_refuses_vectors_of_another_bundle(living, served):
    url = served(living, "--open", "write").url
    with Client(url) as client:
        ours = client.index().bundle
        id = next(iter(client.items())).id
        item = client.get(id, vector=True)
        assert item.bundle == ours and client.get(id).bundle is None
        for answer in (
            client.search(vector=item.vector, bundle=ours),
            client.search(id=id, like=id),
            client.search_batch(ids=[id], bundle=ours),
        ):
            assert answer.bundle == ours
        theirs = "0" * 64
        refused = [
            lambda: client.search(vector=item.vector, bundle=theirs),
            lambda: client.search_batch(vectors=[item.vector], bundle=theirs),
            lambda: client.put("new", vector=item.vector, bundle=theirs),
            lambda: client.add([NewItem("new", vector=item.vector, bundle=theirs)]),
        ]
        for call in refused:
            with pytest.raises(ServerError, match="vectors of different bundles") as error:
                call()
            assert error.value.status == 409
        with pytest.raises(ServerError, match="64 hexadecimal digits"):
            client.search(vector=item.vector, bundle="latest")
        client.put("new", vector=item.vector, bundle=ours)
        assert client.search(id=id, k=1)[0].id == "new"
