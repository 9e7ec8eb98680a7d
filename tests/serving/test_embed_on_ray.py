"""`retrieval embed --ray` on real clusters of several nodes on this machine: nodes and processes
end in the middle, and nothing is lost or doubled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.serving.embedding.embedding import embed_sources
from retrieval.serving.index.index import create_index, open_index

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")

# what Ray itself leaves open, and says of its next versions
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_STORE = 100 * 2**20


def hands(started: Any) -> list[int]:
    """The processes of a cluster's workers, of its own and of no other's."""
    above = [
        str(each.process.pid)
        for node in started.list_all_nodes()
        for each in node.all_processes["raylet"]
    ]
    found = subprocess.run(
        ["pgrep", "-P", ",".join(above), "-f", "ray::_do"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    """A cluster of two nodes with two cores each; `add` brings another."""
    from ray.cluster_utils import Cluster

    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": _STORE, "include_dashboard": False},
    )
    try:
        started.add_node(num_cpus=2, object_store_memory=_STORE)
        yield SimpleNamespace(
            address=started.address,
            add=lambda: started.add_node(num_cpus=2, object_store_memory=_STORE),
            workers=lambda: hands(started),
            remove=lambda node: started.remove_node(node, allow_graceful=False),
        )
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()


def embedded(bundle: Path, sources: list[Path], folder: Path, **given):
    return embed_sources(
        bundle, sources, folder, **{"batch": 4, "part": 10, "progress": False, **given}
    )


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*.parquet")}


def keys(folder: Path) -> list[str]:
    return [
        key
        for path in sorted(folder.glob("part-*.parquet"))
        for key in pq.read_table(path)["key"].to_pylist()
    ]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """300 large pictures that take a while to decode, and one that does not decode."""
    folder = tmp_path_factory.mktemp("many") / "many"
    folder.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.png"))[:20]):
        with Image.open(path) as opened:
            opened.resize((1500, 1500)).save(folder / "0.jpg")
        for copy in range(15):
            (folder / f"{number:02}-{copy:02}.jpg").write_bytes((folder / "0.jpg").read_bytes())
    (folder / "0.jpg").write_bytes(b"\xff\xd8\xff no")
    return folder


@pytest.fixture(scope="module")
def wanted(
    many: Path, bundle_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What this machine makes of `many` without Ray."""
    folder = tmp_path_factory.mktemp("wanted") / "v"
    embedded(bundle_path, [many], folder)
    return parts(folder)


def test_the_same_bytes_as_without_ray_and_the_same_answers(
    cluster, many, wanted, photos, bundle_path, tmp_path
):
    done = embedded(bundle_path, [many], tmp_path / "v", ray=cluster.address)
    assert (done.items, done.bad, done.parts) == (300, 1, 31)
    assert parts(tmp_path / "v") == wanted
    create_index(tmp_path / "i", bundle_path, [tmp_path / "v"], progress=False)
    create_index(tmp_path / "j", bundle_path, [many], progress=False, skip_bad=True)
    with (
        open_index(tmp_path / "i", threads=1) as ours,
        open_index(tmp_path / "j", threads=1) as theirs,
    ):
        for query in sorted(photos.rglob("*.png"))[:3]:
            assert [(hit.id, hit.label) for hit in ours.search(query, k=10)] == [
                (hit.id, hit.label) for hit in theirs.search(query, k=10)
            ]


def test_a_node_and_a_worker_that_end_in_the_middle_cost_nothing(
    cluster, many, wanted, bundle_path, tmp_path
):
    node = cluster.add()
    seen: list[int] = []

    def break_things(what: str, done: int, total: int) -> None:
        seen.append(done)
        if what == "embedding" and len(seen) == 3:
            os.kill(cluster.workers()[0], signal.SIGKILL)
        if what == "embedding" and len(seen) == 6:
            cluster.remove(node)

    done = embedded(bundle_path, [many], tmp_path / "v", ray=cluster.address, progress=break_things)
    assert (done.items, done.bad) == (300, 1) and len(seen) == 31
    assert parts(tmp_path / "v") == wanted


def test_after_the_driver_is_killed_the_same_command_goes_on(
    cluster, many, wanted, bundle_path, tmp_path
):
    command = [
        sys.executable,
        "-m",
        "retrieval.cli",
        "embed",
        str(bundle_path),
        str(many),
        "--part",
        "10",
        "--batch",
        "4",
    ]
    command += ["--output", str(tmp_path / "v"), "--ray", cluster.address]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    end = time.monotonic() + 100
    while len(list((tmp_path / "v").glob("part-*.parquet"))) < 5:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "v").glob("part-*.parquet")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert parts(tmp_path / "v") == wanted
    assert all((tmp_path / "v" / name).stat().st_mtime_ns == when for name, when in left.items())
    found = keys(tmp_path / "v")
    assert len(found) == len(set(found)) == 300


def test_what_is_no_cluster_is_a_sentence_and_leaves_nothing(photos, bundle_path, tmp_path):
    for address, sentence in (
        ("127.0.0.1:1", "No Ray cluster answers"),
        ("ray://x", "is no address of a Ray cluster"),
    ):
        with pytest.raises(DataError, match=sentence):
            embedded(bundle_path, [photos / "1"], tmp_path / "v", ray=address)
    assert not (tmp_path / "v").exists()
