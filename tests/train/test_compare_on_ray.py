"""`retrieval compare --ray` on a cluster of this machine, interrupted in the middle."""

from __future__ import annotations

from functools import partial

import pytest
from retrieval.errors import DataError, Interrupted
from retrieval.run.folder import is_complete
from retrieval.training.comparison.compare import compare

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

# what Ray itself leaves open, and says of its next versions
KINDS = ["Resource", "Future", "Deprecation", "pytest.PytestUnraisableException"]
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in KINDS))


@pytest.fixture
def paths(write):
    own = {"data": {"name": "core.digits"}, "train": {"epochs": 2, "device": "cpu"}}
    own |= dict.fromkeys(("plugins", "optimizer", "search"))
    return [write(name, **own) for name in ("triplet", "proxy")]


@pytest.fixture(scope="module")
def address():
    """A cluster of one node with one core, joined already: so its one process imports torch once
    for all.
    """
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=node)
    try:
        ray.init(address=started.address, log_to_driver=False)
        yield str(started.address)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()


def test_a_cluster_that_is_not_there_is_a_sentence(paths, tmp_path):
    assert not ray.is_initialized(), "it is the first test: one that is joined is taken"
    with pytest.raises(
        DataError, match=r"The Ray cluster at 127\.0\.0\.1:9 cannot be joined: .*refused"
    ):
        compare(paths, tmp_path / "out", ray="127.0.0.1:9", progress=False)


def test_a_cluster_finds_the_same_and_goes_on_where_it_was_interrupted(paths, address, tmp_path):
    go = partial(compare, paths, seeds=2, pretrained="none", progress=False)

    def stop(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    alone = go(tmp_path / "alone")
    out = tmp_path / "out"
    with pytest.raises(Interrupted, match="The same command goes on"):
        go(out, ray=address, progress=stop)
    done = [*out.glob("baselines/*.json"), *out.glob("results/*/*.json")]
    kept = {file: file.stat().st_mtime_ns for file in done}
    assert 3 <= len(kept) <= 6 and not (out / "comparison.md").exists()
    on_ray = go(out, ray=address)
    # what was done is not done again
    assert all(file.stat().st_mtime_ns == at for file, at in kept.items())
    assert sum(is_complete(run) for run in out.glob("runs/*/*")) == 4
    for one, other in zip(alone.contestants, on_ray.contestants, strict=True):
        for mine, theirs in zip(one.metrics, other.metrics, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
    with pytest.raises(DataError, match="not both"):
        go(out, ray=address, workers=2)
