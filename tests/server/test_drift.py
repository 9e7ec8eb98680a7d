"""Drift: nearest distances of searches by image, against those of known items."""

import asyncio
import math

import httpx
import makers
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from retrieval.index.index import Index, create_index
from retrieval.index.queries_and_hits import Hit

from retrieval_server.app import Application
from retrieval_server.drift import Drift, known_distances, read_calibration

QUIET = {"progress": False}


def hits(*distances):
    return [[Hit("a", None, distance, {})] for distance in distances]


@pytest.fixture
def index(living):
    with Index.open(living, threads=1) as opened:
        yield opened


def known_by_loops(index):
    """The distance of each item to its nearest other item."""
    items = index.get(list(index), arrays=True).values()
    vectors = np.stack([item.vector for item in items]).astype(np.float64)
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=2)
    np.fill_diagonal(distances, np.inf)
    return dict(zip([item.id for item in items], distances.min(axis=1).tolist(), strict=True))


def test_known_distances_equal_loops(index):
    assert len(known_distances(read_calibration(index))) == 0
    index.calibrate(**QUIET)
    known = known_distances(read_calibration(index))
    assert len(known) == 110  # ten classes in eleven draws
    expected = np.array(list(known_by_loops(index).values()))
    assert all(np.abs(expected - distance).min() < 1e-6 for distance in known)


def test_a_warning_needs_a_share_of_many_searches(index):
    sha256 = index.bundle.sha256
    drift = Drift(index, {})
    drift.note(sha256, hits(*[9.0] * 200))
    assert drift.state(sha256, read_calibration(index)) is None
    index.calibrate(**QUIET)
    known = known_distances(read_calibration(index))
    limit = float(np.quantile(known, 0.95))
    drift = Drift(index, {})
    assert drift.state(sha256, read_calibration(index)) == {
        "searches": 0,
        "median": None,
        "expected": float(np.median(known)),
        "warning": None,
    }
    drift.note(sha256, [*hits(*[limit + 1] * 16, *[limit / 2] * 83), []])
    state = drift.state(sha256, read_calibration(index))
    assert (state["searches"], state["median"], state["warning"]) == (99, limit / 2, None)
    drift.note(sha256, hits(limit))
    state = drift.state(sha256, read_calibration(index))
    assert state["searches"] == 100
    assert state["warning"].startswith("Of the last 100 searches by image, 16% are farther than")
    drift.note(sha256, hits(*[limit] * 20))
    assert drift.state(sha256, read_calibration(index))["warning"] is None
    # The memory is bounded, and another model's distances do not count.
    drift.note(sha256, hits(*[0.0] * 5000))
    assert drift.state(sha256, read_calibration(index))["searches"] == 1000
    drift.note("another", hits(*[limit + 1] * 900))
    state = drift.state(sha256, read_calibration(index))
    assert (state["searches"], state["warning"]) == (100, None)


def test_buckets_are_quantiles_of_known_items(index):
    plain = Drift(index, {}).histogram
    assert plain._upper_bounds == [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, math.inf]
    index.calibrate(**QUIET)
    bounds = Drift(index, {}).histogram._upper_bounds
    expected = np.quantile(
        known_distances(read_calibration(index)), [0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
    )
    assert bounds == pytest.approx([*expected, math.inf], rel=0.006)


def buckets(app):
    """Return the samples of the histogram: by their labels, without the name of the metric."""
    text = app._metrics.text().decode()
    (family,) = [
        family
        for family in text_string_to_metric_families(text)
        if family.name == "retrieval_index_nearest_distance"
    ]
    return {
        (sample.name.rpartition("_")[2], *sample.labels.values()): sample.value
        for sample in family.samples
    }


async def ask(app, photos):
    """Search by image with and without a filter, by id and for several images."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        files = sorted(photos.glob("3/*.png"))[:3]
        for file in files:
            answer = await client.post(
                "/v1/indexes/one/search",
                content=file.read_bytes(),
                headers={"content-type": "image/png"},
            )
            assert answer.status_code == 200, answer.text
        images = [("image", file.read_bytes()) for file in files]
        answer = await client.post("/v1/indexes/one/search/batch", files=images)
        assert answer.status_code == 200, answer.text
        filtered = {"image": files[0].read_bytes()}
        await client.post("/v1/indexes/one/search", files=filtered, data={"filter": "label = '4'"})
        picture = {"content-type": "image/png"}
        for options in (
            "max_distance=5",
            "offset=1",
            "like=3/0013.png",
            "scores=true&facets=label",
        ):
            answer = await client.post(
                f"/v1/indexes/one/search?{options}", content=files[0].read_bytes(), headers=picture
            )
            assert answer.status_code == 200, answer.text
        examples = [("image", files[0].read_bytes()), ("like", files[1].read_bytes())]
        answer = await client.post("/v1/indexes/one/search", files=examples)
        assert answer.status_code == 200, answer.text
        answer = await client.post(
            "/v1/indexes/one/identify?far=0.5", content=files[0].read_bytes(), headers=picture
        )
        assert answer.status_code == 200, answer.text
        await client.post("/v1/indexes/one/search", json={"id": "3/0003.png"})
        await client.post("/v1/indexes/one/search", json={"vector": [9.0] * 16})
        described = [
            (await client.get(f"/v1/indexes/{name}")) for name in ("one/index", "other/index")
        ]
        return [answer.json() for answer in described]


async def probed(app, photos):
    # The server's own searches do not count.
    await app.readiness["one"].probe()
    assert app.readiness["one"].reason() is None
    return await ask(app, photos)


def test_searches_by_image_are_counted(index, photos, tmp_path):
    index.calibrate(**QUIET)
    bundle = makers.make_bundle(tmp_path / "bundle")
    create_index(tmp_path / "other", bundle, photos / "4", **QUIET)
    with Index.open(tmp_path / "other", threads=1) as other:
        app = Application({"one": index, "other": other})
        one, another = asyncio.run(probed(app, photos))
        counts = buckets(app)
        app.workers.close()
    assert one["drift"]["searches"] == 7 and one["drift"]["median"] == pytest.approx(0, abs=1e-3)
    assert one["drift"]["expected"] == pytest.approx(
        np.median(known_distances(read_calibration(index)))
    )
    assert another["drift"] is None
    assert (counts["count", "one"], counts["count", "other"]) == (7, 0)
    assert counts["bucket", "one", "+Inf"] == 7
    # Each index has its own buckets.
    assert counts["bucket", "other", "50.0"] == 0 and ("bucket", "one", "50.0") not in counts


def test_a_damaged_calibration_does_not_stop_the_server(index):
    index.calibrate(**QUIET)
    index.store.set_note(index.generation, "calibration", b"nonsense")
    assert len(known_distances(read_calibration(index))) == 0
    app = Application({"one": index})
    assert b"retrieval_index_drifts 0.0" in app._metrics.text()
    app.workers.close()
