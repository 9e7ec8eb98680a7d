"""`retrieval compare --ray` on a cluster of this machine, interrupted in the middle."""

from __future__ import annotations

from functools import partial

import pytest
from retrieval.errors import DataError, Interrupted
from retrieval.run.folder import is_complete
from retrieval.training.comparison.compare import compare

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

# Ray warns of its own future, and leaves files open
KINDS = ["Resource", "Future", "Deprecation", "pytest.PytestUnraisableException"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in KINDS)),
]


@pytest.fixture
def paths(write):
    own = {"data": {"name": "core.digits"}, "train": {"epochs": 2, "device": "cpu"}}
    own |= dict.fromkeys(("plugins", "optimizer", "search"))
    return [write(name, **own) for name in ("triplet", "proxy")]


@pytest.fixture(scope="module")
def address():
    """A cluster of one core, which is joined here, so that its one process imports torch once."""
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


def test_a_missing_cluster_is_a_sentence(paths, tmp_path):
    assert not ray.is_initialized(), "run this test first: a joined cluster would be used"
    says = r"The Ray cluster at 127\.0\.0\.1:9 cannot be joined: .*refused"
    with pytest.raises(DataError, match=says):
        compare(paths, tmp_path / "out", ray="127.0.0.1:9", progress=False)


def test_a_cluster_gives_the_same_result_and_resumes_after_an_interruption(
    paths, address, tmp_path
):
    go = partial(compare, paths, seeds=2, pretrained="none", progress=False)

    def stop(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    alone = go(tmp_path / "alone")
    out = tmp_path / "out"
    with pytest.raises(Interrupted, match="The same command goes on"):
        go(out, ray=address, progress=stop)
    files = [*out.glob("baselines/*.json"), *out.glob("results/*/*.json")]
    finished = {file: file.stat().st_mtime_ns for file in files}
    assert 3 <= len(finished) <= 6 and not (out / "comparison.md").exists()
    on_ray = go(out, ray=address)
    assert all(file.stat().st_mtime_ns == before for file, before in finished.items())
    assert sum(is_complete(run) for run in out.glob("runs/*/*")) == 4
    for row, reference in zip(on_ray.contestants, alone.contestants, strict=True):
        for metrics, values in zip(row.metrics, reference.metrics, strict=True):
            assert metrics == pytest.approx(values, abs=1e-6)
    with pytest.raises(DataError, match="not both"):
        go(out, ray=address, workers=2)
