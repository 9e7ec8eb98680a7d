"""Feedback, and a switch to an adapter, at the sizes where the product changes its way."""

import time

import apsw
import numpy as np
import pytest
from retrieval import Index
from retrieval.bundle.bundle import Bundle
from retrieval.feedback.feedback_record import (
    CLICKED,
    LIKED,
    FeedbackRecord,
    JudgedSearch,
    NoRoom,
    Search,
)
from retrieval.index.adapter_bundles import make_adapter_bundle

from retrieval_engines.testing.small_bundles import linear_head, make_bundle
from retrieval_feedback.triplets import preferences

pytestmark = pytest.mark.scale

COUNT = 60_000
FEATURES = 16
WIDTH = 64


def searched(number: int, hits: tuple[str, ...] = ("a", "b"), at: float = 0.0) -> Search:
    return Search(f"s{number}", at, "v", "base", "served", None, f"q{number}", hits)


def test_a_voter_and_an_item_teach_500_preferences():
    searches = [JudgedSearch(n, searched(n), {"v": {"b": CLICKED}}) for n in range(600)]
    assert len(preferences(searches)) == 500
    searches = [JudgedSearch(n, searched(n), {f"v{n}": {"b": CLICKED}}) for n in range(600)]
    assert len(preferences(searches)) == 500


def test_a_million_searches_without_a_mark_are_kept_and_expire(tmp_path):
    path = tmp_path / "feedback.sqlite"
    now = time.time()
    with FeedbackRecord.open(path, create=True) as record:
        for start in range(0, 1_050_000, 50_000):
            record.note_searches(searched(start + n, at=now) for n in range(50_000))
        assert record.counts()["searches"] == 1_000_000
        assert not record.knows("s0") and record.knows("s1049999")
        # The count says so; writing as many marks would take minutes.
        with apsw.Connection(str(path), vfs="cksmvfs") as connection:
            connection.execute("update counts set count = 4999999")
        assert record.add("s1049999", "v", {"a": LIKED}) == 1
        with pytest.raises(NoRoom, match="5,000,000 marks"):
            record.add("s1049999", "v", {"b": LIKED})
        assert record.expire(searches_seconds=-60) == 999_999
        assert record.counts()["searches"] == 1


def test_an_index_moves_to_an_adapter_in_several_blocks(tmp_path):
    features = np.random.default_rng(0).integers(-9, 10, (COUNT, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "items.npz", features=features)
    base = Bundle.open(make_bundle(tmp_path / "base", width=WIDTH, features=FEATURES))
    head = linear_head(WIDTH, WIDTH, 1)
    adapter = Bundle.open(make_adapter_bundle(base, head, tmp_path / "adapter"))
    with Index.create(tmp_path / "i", tmp_path / "items.npz", model=base, progress=False) as index:
        before = index.search(features[7], 3)
        done = index.migrate(adapter.path, progress=False)
        assert done.from_vectors == COUNT
        ids = [item.id for item in index.scan(limit=3)]
        items = index.get(ids, arrays=True)
        stored = np.stack([items[id].vector for id in ids])
        bases = np.stack([items[id].arrays["base"] for id in ids])
        assert np.allclose(stored, adapter.adapt(bases).vector, atol=1e-3)
        assert index.search(features[7], 1)[0].distance == pytest.approx(0, abs=1e-2)
        assert index.rollback(progress=False).generation.number == 1
        assert index.search(features[7], 3) == before
