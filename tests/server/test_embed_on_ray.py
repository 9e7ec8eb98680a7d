"""`retrieval embed --ray` on a cluster of this machine, one of whose processes is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from retrieval.errors import DataError
from retrieval.index import write_embeddings
from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

from retrieval_ray.cluster import RayCluster

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")

# Ray warns of its own future, and leaves files open
KINDS = ["Resource", "Future", "Deprecation", "User", "pytest.PytestUnraisableException"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in KINDS)),
]


@pytest.fixture(scope="module")
def address():
    """A cluster of two nodes with a core each, so that two processes embed."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        started.add_node(**node)
        ray.init(address=started.address, log_to_driver=False)
        yield str(started.address)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(write_embeddings, "_SMALLEST_PART", 10)


def embedders() -> list[int]:
    """Return the ids of the processes of this process's clusters that embed."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            number = int(folder.name)
            parents[number] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[number] = (folder / "cmdline").read_text(errors="replace")

    def is_own(number: int) -> bool:
        return number == os.getpid() or (number in parents and is_own(parents[number]))

    return [n for n, title in titles.items() if "MapWorker" in title and is_own(n)]


def test_a_folder_begun_here_is_completed_on_a_cluster_and_a_killed_process_costs_nothing(
    photos, makers, address, tmp_path
):
    bundle = makers.make_bundle(tmp_path / "b")
    album = tmp_path / "album"
    album.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.png"))[:100]):
        (album / f"{number}.png").symlink_to(path)
    (album / "broken.png").write_bytes(b"no image")
    killed: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    def kill(what: str, done: int, total: int) -> None:
        if 40 <= done < total and not killed:
            killed.append(embedders()[0])
            os.kill(killed[0], signal.SIGKILL)

    alone = embed_sources(
        bundle, album, tmp_path / "alone", EmbeddingOptions(batch_size=4), progress=False
    )
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        embed_sources(bundle, album, out, EmbeddingOptions(batch_size=4), progress=stop)
    done = embed_sources(
        bundle, album, out, EmbeddingOptions(batch_size=4, ray=address), progress=kill
    )
    assert (
        killed
        and killed[0] not in embedders()
        and done.resumed == 30
        and (done.items, done.bad) == (alone.items, 1)
    )
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (tmp_path / "alone").iterdir()
    )
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "alone" / path.name).read_bytes()


def test_an_error_on_a_node_is_a_sentence(photos, makers, address, tmp_path, monkeypatch):
    bundle = makers.make_bundle(tmp_path / "b")
    monkeypatch.setattr(write_embeddings, "installed_version", lambda: "9.9")
    with pytest.raises(DataError, match=r"^Node .* needs version 9\.9 of embedding-retrieval"):
        embed_sources(
            bundle, photos, tmp_path / "out", EmbeddingOptions(ray=address), progress=False
        )


def test_an_item_that_crashes_its_process_ends_the_work(address):
    def start():
        return lambda item: os._exit(1) if item == 3 else item

    with (
        RayCluster(address) as cluster,
        pytest.raises(DataError, match=r"^The Ray cluster lost its work: .* The same command"),
    ):
        list(cluster.map(start, range(6), gpu=False))
