"""`retrieval embed`: the folder of embeddings, an index of it, and resuming after a kill."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from retrieval.base.files import hold
from retrieval.base.runtime import installed_version
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError
from retrieval.host.processes import Cluster, refuse_node
from retrieval.index import write_embeddings
from retrieval.index.index import create_index, open_index
from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(write_embeddings, "_SMALLEST_PART", 30)


def embedded(bundle: Path, sources: list[Path], folder: Path, progress=False, **options):
    settings = EmbeddingOptions(**{"batch_size": 8, **options})
    return embed_sources(bundle, sources, folder, settings, progress=progress)


def whole(folder: Path) -> dict[str, list]:
    """Return all rows of a folder as columns."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]
    return pa.concat_tables([table.replace_schema_metadata() for table in tables]).to_pydict()


def refuses(says: str, work, *words, **options) -> None:
    with pytest.raises(DataError, match=says):
        work(*words, **options)


@pytest.mark.parametrize("kind", ["plain", "rescorer", "features"])
def test_an_index_of_the_folder_is_the_index_of_the_sources(kind, photos, makers, tmp_path):
    features = kind == "features"
    options = {"kind": "features"} if features else {"rescorer": kind == "rescorer"}
    bundle = makers.make_bundle(tmp_path / "b", **options)
    paths = sorted(photos.rglob("*.png"))[:100]
    if features:
        source, rng = tmp_path / "f.npz", np.random.default_rng(0)
        rows = rng.normal(size=(100, 64)).astype(np.float32)
        np.savez(source, features=rows, labels=np.arange(100) % 7)
    else:
        source = tmp_path / "m.csv"
        lines = [f"{path},{number}" for number, path in enumerate(paths)]
        source.write_text("\n".join(["path,price", *lines]))
    done = embedded(bundle, [source], tmp_path / "v", features=features)
    assert (done.items, done.bad, done.parts) == (100, 0, 4)
    keep = {"progress": False, "keep_features": features}
    create_index(tmp_path / "i", bundle, [tmp_path / "v"], **keep)
    create_index(tmp_path / "j", bundle, [source], batch_size=8, **keep)
    with (
        open_index(tmp_path / "i", threads=1) as ours,
        open_index(tmp_path / "j", threads=1) as theirs,
    ):
        facts = attrgetter(*["id", "label", "metadata", "path", "bytes", "width", "height"])
        assert list(map(facts, ours.scan())) == list(map(facts, theirs.scan()))
        keys = [item.id for item in ours.scan()]
        mine, other = ours.get(keys, arrays=True), theirs.get(keys, arrays=True)
        assert len(keys) == len(set(whole(tmp_path / "v")["key"])) == 100
        for key in keys:
            own, arrays = mine[key].arrays, other[key].arrays
            assert set(own) == set(arrays)
            assert all(np.allclose(own[name], arrays[name], atol=1e-6) for name in own)
        if not features:
            hits = [[hit.id for hit in index.search(paths[3], k=5)] for index in (ours, theirs)]
            assert hits[0] == hits[1]
        # An index of the images takes the folder's items for unchanged
        again = theirs.add(tmp_path / "v", progress=False)
        assert (again.added, again.changed, again.unchanged) == (0, 0, 100)


def test_an_index_refuses_vectors_of_another_bundle_and_incomplete_folders(
    photos, makers, empty, bundle_path, tmp_path
):
    other = makers.make_bundle(tmp_path / "other", seed=4)
    embedded(other, [photos / "1"], tmp_path / "v")
    embedded(bundle_path, [photos / "1"], tmp_path / "w")
    differs = (
        r"holds vectors of the bundle .*; this index has the bundle .* with the index's bundle"
    )
    with open_index(empty) as index:
        for says, source, options in (
            (differs, tmp_path / "v", {}),
            ("Add the folders in one call", [tmp_path / "w", photos], {}),
            ("holds no originals", tmp_path / "w", {"keep": "copy"}),
        ):
            refuses(says, index.add, source, progress=False, **options)
        file = tmp_path / "w" / "embedding.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "complete": False}))
        refuses("is not complete", index.add, tmp_path / "w", progress=False)
        assert len(index) == 0


def test_bad_jsonl_lists_the_bad_items(photos, bundle_path, tmp_path, capfd):
    folder, out = tmp_path / "p", tmp_path / "v"
    folder.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.png"))[:50]):
        content = b"\x89PNG\r\n\x1a\nno" if number % 10 == 3 else path.read_bytes()
        (folder / path.name).write_bytes(content)
    done = embedded(bundle_path, [folder], out, progress=True)
    output = capfd.readouterr().err
    bad = [json.loads(line) for line in (out / "bad.jsonl").read_text().splitlines()]
    assert (done.items, done.bad, len(bad)) == (45, 5, 5)
    assert all(set(item) == {"key", "source", "fault"} for item in bad)
    assert all(len(item["fault"]) <= 500 and output.count(item["fault"]) == 1 for item in bad)
    columns = whole(out)
    assert not {item["key"] for item in bad} & set(columns["key"])
    sound = [folder / key for key in columns["key"]]
    vectors = Bundle.open(bundle_path, threads=1).encode_images(sound, progress=False)
    assert np.allclose(columns["vector"], vectors, atol=1e-6)
    assert embedded(bundle_path, [folder], out).bad == 5


def test_an_item_with_an_infinite_vector_is_bad(makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    rows = np.random.default_rng(0).normal(size=(40, 64))
    rows[7] = 3e38 * np.sign(makers.weights()[:, 0])  # its vector is beyond float32
    np.savez(tmp_path / "f.npz", features=rows)
    done = embedded(bundle, [tmp_path / "f.npz"], tmp_path / "v")
    (bad,) = map(json.loads, (tmp_path / "v" / "bad.jsonl").read_text().splitlines())
    assert (done.items, done.bad) == (39, 1)
    assert bad["key"] == "f/7" and "NaN or infinity" in bad["fault"]


def test_names_in_bad_jsonl_are_printable_and_the_output_is_utf8(photos, bundle_path, tmp_path):
    (tmp_path / "p").mkdir()
    shutil.copy(next(photos.rglob("*.png")), tmp_path / "p")
    (tmp_path / "p" / "x\u2028\udcff.png").write_bytes(b"no image")
    assert embedded(bundle_path, [tmp_path / "p"], tmp_path / "v").bad == 1
    (line,) = (tmp_path / "v" / "bad.jsonl").read_text(encoding="utf-8").splitlines()
    assert line.isprintable() and json.loads(line)["key"] == "x\u2028\\xff.png"
    with pytest.raises(DataError, match="is not valid UTF-8"):
        embedded(bundle_path, [tmp_path / "p"], tmp_path / "\udcff")


def test_a_folder_with_another_embedding_is_refused(photos, makers, bundle_path, tmp_path):
    out, ones = tmp_path / "v", [photos / "1"]
    embedded(bundle_path, ones, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = makers.make_bundle(tmp_path / "other", seed=3)
    refuses("differs in the bundle", embedded, other, ones, out)
    refuses("differs in the sources", embedded, bundle_path, [photos / "2"], out)
    refuses("differs in --batch-size", embedded, bundle_path, ones, out, batch_size=4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    says = "is not empty, and holds no embedding"
    refuses(says, embedded, bundle_path, ones, tmp_path / "full")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


SMALL_PARTS = """
from retrieval.host.processes import Cluster, refuse_node
from retrieval.index import write_embeddings
write_embeddings._SMALLEST_PART = 30
from retrieval.cli.app import main
main()
"""


def test_a_killed_command_resumes_with_equal_parts(photos, bundle_path, tmp_path):
    embedded(bundle_path, [photos], tmp_path / "whole")
    words = ["embed", bundle_path, photos, "--output", tmp_path / "v", "--batch-size", "8"]
    command = [sys.executable, "-c", SMALL_PARTS, *map(str, words)]
    options = {"stderr": subprocess.PIPE, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command, cwd=tmp_path, **options)
    end = time.monotonic() + 60
    while len(list((tmp_path / "v").glob("part-*.parquet"))) < 3 and process.poll() is None:
        assert time.monotonic() < end
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "v").glob("part-*.parquet")}
    next((tmp_path / "v").glob("part-*.parquet")).write_bytes(b"PAR1")  # is embedded again
    done = embedded(bundle_path, [photos], tmp_path / "v")
    assert 0 < done.resumed < 200
    for path in sorted((tmp_path / "whole").glob("part-*.parquet")):
        assert path.read_bytes() == (tmp_path / "v" / path.name).read_bytes()
    again = {name: (tmp_path / "v" / name).stat().st_mtime_ns for name in kept}
    assert sum(kept[name] != again[name] for name in kept) == 1  # the damaged one


def test_a_run_trains_on_the_folder(bundle_path, photos, tmp_path):
    from retrieval.training.train import train

    embedded(bundle_path, [photos], tmp_path / "v")
    recipe = {
        "data": {"name": "core.parquet", "path": str(tmp_path / "v")},
        "split": {"by": "item", "test": 0.3, "validation": 0.2},
        "backbone": {"name": "core.features"},
        "learner": {"name": "core.lda"},
    }
    (tmp_path / "r.toml").write_text(tomli_w.dumps(recipe))
    run = train(tmp_path / "r.toml", tmp_path / "run", progress=False)
    assert run.dataset.kind == "features" and len(run.dataset.labels) == 200


ALONE = """
import sys
sys.modules[{hidden!r}] = None
sys.argv = ["retrieval", "embed", *{words}]
from retrieval.cli.app import main
main()
"""


@pytest.mark.parametrize(
    ("hidden", "code", "sentence"),
    [("torch", 0, "Embedded"), ("pyarrow", 2, "pip install 'embedding-retrieval[parquet]'")],
)
def test_without_torch_or_pyarrow(hidden, code, sentence, photos, bundle_path, tmp_path, process):
    words = [
        str(bundle_path),
        str(photos / "1"),
        "--output",
        str(tmp_path / "v"),
        "--batch-size",
        "8",
    ]
    done = process("-c", ALONE.format(hidden=hidden, words=words), cwd=tmp_path)
    assert done.code == code and sentence in done.out + done.err and "Traceback" not in done.err
    assert (tmp_path / "v").exists() == (code == 0)


def test_hostile_parts_are_sentences(photos, empty, bundle_path, tmp_path):
    embedded(bundle_path, [photos / "1"], tmp_path / "v")
    part = tmp_path / "v" / "part-000000.parquet"
    sound = pq.read_table(part)
    width, rows = len(sound["vector"][0]), len(sound)

    def column(name: str, value, *kind) -> pa.Table:
        values = pa.array([value] * rows, *kind)
        return sound.set_column(sound.schema.get_field_index(name), name, values)

    with open_index(empty) as index:
        nan = column("vector", [float("nan")] * width, pa.list_(pa.float32(), width))
        for table, says in (
            (column("vector", [0.5] * width, pa.list_(pa.float32())), "has other columns than"),
            (nan, "holds NaN or infinity"),
            (column("bundle", "0" * 64), "vectors of another bundle"),
            (column("metadata", "[" * 100_000), "does not describe an item"),
            (column("key", "\0"), "NUL"),
        ):
            pq.write_table(table, part)
            refuses(says, index.add, tmp_path / "v", progress=False)
        pq.write_table(sound, part)
        part.unlink()
        refuses("cannot be read", index.add, tmp_path / "v", progress=False)
        (tmp_path / "v" / "embedding.json").write_bytes(b" " * 2_000_000)
        refuses("damaged: not JSON", index.add, tmp_path / "v", progress=False)
        assert len(index) == 0


def test_a_second_command_on_the_same_folder_is_refused(photos, bundle_path, tmp_path):
    embedded(bundle_path, [photos], tmp_path / "v")
    with hold(tmp_path / "v", "embedding into this folder", DataError):
        refuses("embedding into this folder", embedded, bundle_path, [photos], tmp_path / "v")
    assert embedded(bundle_path, [photos], tmp_path / "v").resumed > 0


class OneProcess(Cluster):
    """A cluster that is this process; it embeds the parts from the last to the first."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self):
        if self.address != "here:1":
            raise DataError(f"The cluster at {self.address} cannot be joined.")
        return self

    def __exit__(self, *_: object) -> None:
        self.address = ""

    def submit(self, function, *arguments, gpu):
        raise NotImplementedError

    def map(self, start, items, *, gpu):
        work = pickle.loads(pickle.dumps(start))()
        for item in reversed(items):
            yield work(pickle.loads(pickle.dumps(item)))

    def stop(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["plain", "features"])
def test_a_cluster_writes_the_same_files(kind, photos, makers, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval_ray.cluster.RayCluster", OneProcess)
    if kind == "plain":
        bundle, source = makers.make_bundle(tmp_path / "b"), photos
    else:
        bundle, source = makers.make_bundle(tmp_path / "b", kind="features"), tmp_path / "f.npz"
        rows = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
        np.savez(source, features=rows)
    refuses("cannot be joined", embedded, bundle, source, tmp_path / "c", ray="there:1")
    embedded(bundle, source, tmp_path / "a")
    done = embedded(bundle, source, tmp_path / "c", ray="here:1")
    assert done.parts > 2
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes(), path
    # of a complete folder nothing is left to embed, so no cluster is joined
    assert embedded(bundle, source, tmp_path / "c", ray="there:1").resumed == done.items


def test_a_node_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refuse_node(installed_version(), tmp_path / "file")
    for version, shared in (("9.9", "file"), (installed_version(), "missing")):
        refuses("all nodes must share the output", refuse_node, version, tmp_path / shared)
