"""Migrations to an adapter, to another and back: vectors come from stored ones."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError, StoreError
from retrieval.index.adapter_bundles import make_adapter_bundle, write_base
from retrieval.index.calibration import calibrate, read_calibration
from retrieval.index.golden import GoldenQuery
from retrieval.index.index import Index, create_index
from retrieval.index.integrity import check_index
from retrieval.index.migrating import join_backbone
from retrieval.store import local
from retrieval.store.local import LocalStore

from retrieval_engines.testing.small_bundles import linear_head

QUIET: dict[str, Any] = {"progress": False}
COUNT = 60
WIDTH = 16


@pytest.fixture
def photos(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", COUNT)
    return tmp_path / "photos"


@pytest.fixture
def base(makers, tmp_path):
    return makers.make_bundle(tmp_path / "base", variant=True)


@pytest.fixture
def path(base, photos, tmp_path):
    """An index of photos that keeps no features."""
    create_index(tmp_path / "i", base, photos, **QUIET)
    return tmp_path / "i"


@pytest.fixture
def adapter(base, tmp_path):
    """Make an adapter bundle over the base; the seed decides the head."""

    def make(seed: int, width: int = 5) -> Path:
        head = linear_head(WIDTH, width, seed)
        return make_adapter_bundle(Bundle.open(base), head, tmp_path / f"adapter {seed}")

    return make


def opened(path: Path, **options: Any) -> Index:
    return Index.open(path, threads=1, **options)


def is_of(index: Index, bundle: Path, photos: Path, variant: str | None = None) -> None:
    """Compare every array of every item with those that a bundle computes from the photos."""
    encoder = Bundle.open(bundle, variant=variant, threads=1)
    items = index.get([item.id for item in index.scan()], arrays=True)
    assert len(items) == len(index)
    for id, item in items.items():
        file = photos.joinpath(*Path(id).parts[-2:])
        encoded = encoder.encode(encoder.preprocess(file)[None])
        assert np.allclose(item.vector, encoded.vector[0], atol=1e-4)
        if encoded.base is None:
            assert set(item.arrays) == {"vector"}
        else:
            assert np.allclose(item.arrays["base"], encoded.base[0], atol=1e-6)
        assert index.search(file, 3)[0].distance == pytest.approx(0, abs=1e-3)


def test_there_and_further_and_back_without_originals(path, base, photos, adapter, cli):
    first, second = adapter(1), adapter(2, width=20)
    away = photos.rename(photos.with_name("elsewhere"))
    outcome = cli("index", "migrate", path, first)
    assert outcome.code == 0
    assert f"{COUNT} items embedded, {COUNT} from stored vectors; generation 2" in outcome.out
    with opened(path) as index:
        is_of(index, first, away)
        done = index.migrate(second, **QUIET)
        assert (done.embedded, done.from_vectors, done.from_features) == (COUNT, COUNT, 0)
        is_of(index, second, away)
        assert index.migrate(second, **QUIET).embedded == 0
        assert index.migrate(first, **QUIET).embedded == 0
        is_of(index, first, away)
        index.drop_old()
        # The base is in the adapter bundle, to the last byte.
        again = write_base(index.bundle, path.parent / "again")
        assert index.migrate(again, **QUIET).from_vectors == COUNT
        assert index.bundle.sha256 == Bundle.open(base).sha256
        is_of(index, base, away)
        # An adapter over the adapter that was served is one over the base.
        chained = make_adapter_bundle(
            Bundle.open(first), linear_head(WIDTH, 7, 3), path.parent / "chained"
        )
        assert index.migrate(chained, **QUIET).from_vectors == COUNT
        is_of(index, chained, away)
    assert check_index(path) == ([], [])


def test_rollback_computes_what_was_added_meanwhile(path, base, photos, adapter):
    with opened(path) as index:
        for seed in (1, 2):
            index.migrate(adapter(seed), **QUIET)
        for name in ("more", "another"):
            new = photos / "0" / f"{name}.png"
            new.write_bytes(min(photos.glob("*/*.png")).read_bytes())
            assert index.add(photos, **QUIET).added == 1
            if name == "more":
                back = index.rollback(**QUIET)
                assert (back.embedded, back.from_vectors) == (1, 1)
                is_of(index, photos.parent / "adapter 1", photos)
        index.drop_old()
        index.migrate(base, **QUIET)
        is_of(index, base, photos)
        assert index.rollback(**QUIET).embedded == 0
        is_of(index, photos.parent / "adapter 1", photos)
    assert check_index(path) == ([], [])


@pytest.mark.parametrize("how", ["path", "bundle"])
def test_a_variant_stays_the_variant(how, base, photos, adapter, tmp_path):
    create_index(tmp_path / "j", Bundle.open(base, variant="fp16"), photos, **QUIET)
    bundle = adapter(1)
    with opened(tmp_path / "j") as index:
        assert index.generation.variant == "fp16"
        if how == "path":
            assert index.migrate(bundle, **QUIET).from_vectors == COUNT
        else:
            assert index.migrate(Bundle.open(bundle, variant="fp16"), **QUIET).from_vectors == COUNT
        assert index.generation.variant == "fp16"
        is_of(index, bundle, photos, "fp16")
        # Without the variant, stored vectors are those of another encoder.
        done = index.migrate(Bundle.open(bundle), **QUIET)
        assert (done.from_vectors, done.embedded) == (0, COUNT)
        is_of(index, bundle, photos)


def test_kept_features_go_along(makers, photos, tmp_path):
    base = makers.cut_in_two(makers.make_bundle(tmp_path / "split"))
    create_index(tmp_path / "j", base, photos, keep_features=True, **QUIET)
    bundle = make_adapter_bundle(Bundle.open(base), linear_head(WIDTH, 5), tmp_path / "a")
    away = photos.rename(photos.with_name("elsewhere"))
    with opened(tmp_path / "j") as index:
        before = index.get([item.id for item in index.scan()], arrays=True)
        assert index.migrate(bundle, **QUIET).from_vectors == COUNT
        assert dict(index.generation.widths) == {"vector": 5, "base": WIDTH, "features": 64}
        after = index.get(before, arrays=True)
        for id, item in before.items():
            assert np.array_equal(after[id].arrays["features"], item.arrays["features"])
        # Another head needs features, and an adapter over that takes none.
        other = makers.cut_in_two(makers.make_bundle(tmp_path / "other", seed=5))
        done = index.migrate(other, **QUIET)
        assert (done.from_features, done.from_vectors) == (COUNT, 0)
        away.rename(photos)
        head = makers.make_bundle(tmp_path / "head", kind="features", seed=6)
        nested = make_adapter_bundle(Bundle.open(head), linear_head(WIDTH, 5), tmp_path / "n")
        with pytest.raises(BundleError, match="Make the adapter over the bundle of the index"):
            index.migrate(nested, **QUIET)
        joined = join_backbone(index.bundle, Bundle.open(head), _new(tmp_path / "joined"))
        index.migrate(joined, **QUIET)
        last = make_adapter_bundle(Bundle.open(joined), linear_head(WIDTH, 5), tmp_path / "l")
        assert index.migrate(last, **QUIET).from_vectors == COUNT


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_index_of_features_needs_none_kept(makers, tmp_path):
    base = makers.make_bundle(tmp_path / "base", kind="features")
    features = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    np.savez(tmp_path / "f.npz", features=features)
    create_index(tmp_path / "i", base, tmp_path / "f.npz", **QUIET)
    bundle = make_adapter_bundle(Bundle.open(base), linear_head(WIDTH, 5), tmp_path / "a")
    with opened(tmp_path / "i") as index:
        assert index.migrate(bundle, **QUIET).from_vectors == 50
        assert index.search(features[7], 1)[0].distance == pytest.approx(0, abs=1e-3)
        assert index.rollback(**QUIET).embedded == 0


def test_golden_queries_and_the_calibration_are_renewed(path, photos, adapter):
    with opened(path) as index:
        calibrate(index, draws=1)
        distances = read_calibration(index.store, index.generation).to_other
        ids = [item.id for item in index.scan()]
        golden = [
            GoldenQuery(ids[0], {ids[1]: 1.0}, ids[0]),
            GoldenQuery("a file", {ids[2]: 1.0}, sorted(photos.glob("*/*.png"))[4]),
        ]
        done = index.migrate(adapter(1), golden=golden, at_least={"mrr": 0.0}, **QUIET)
        assert done.golden is not None and done.golden.values["mrr"] > 0
        renewed = read_calibration(index.store, index.generation)
        assert renewed is not None and not np.array_equal(renewed.to_other, distances)


def test_altered_vectors_of_the_base_are_not_taken(path, photos, adapter):
    with opened(path) as index:
        index.migrate(adapter(1), **QUIET)
        index.drop_old()
        # Until then, the record has a copy of so few bytes, and repairs them.
        index.store.compact()
    (kept,) = (path / "arrays").glob("*.base")
    content = bytearray(kept.read_bytes())
    content[70] ^= 4
    kept.write_bytes(content)
    assert any(".base was altered" in fault for fault in check_index(path)[0])
    with opened(path) as index:
        # No search reads them.
        assert len(index.search(min(photos.glob("*/*.png")), 3)) == 3
        served = index.bundle.sha256
        with pytest.raises(StoreError, match="was altered"):
            index.migrate(adapter(2), **QUIET)
        assert index.follow().sha256 == served
    kept.unlink()
    assert any(".base is missing" in fault for fault in check_index(path)[0])


@pytest.mark.parametrize("point", ["first block", "third block", "switch"])
def test_after_a_kill_the_same_call_goes_on(
    path, photos, base, adapter, point, killed, monkeypatch
):
    bundle = adapter(1)
    monkeypatch.setattr(local, "_DERIVED_BYTES", 10 * 4 * (WIDTH + 5 + WIDTH))
    blocks = 0
    genuine = local.append_rows

    def append_rows(*arguments):
        nonlocal blocks
        blocks += 1
        if blocks == {"first block": 1, "third block": 3}.get(point):
            os.kill(os.getpid(), signal.SIGKILL)
        genuine(*arguments)

    def migrate():
        with opened(path) as index:
            index.migrate(bundle, **QUIET)

    with monkeypatch.context() as patch:
        patch.setattr(local, "append_rows", append_rows)
        if point == "switch":
            patch.setattr(LocalStore, "switch", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed(migrate)
    with opened(path) as index:
        is_of(index, base, photos)
        done = index.migrate(bundle, **QUIET)
        assert (
            done.embedded == {"first block": COUNT, "third block": COUNT - 20, "switch": 0}[point]
        )
        is_of(index, bundle, photos)
    assert check_index(path) == ([], [])


def test_kills_at_any_moment_lose_nothing(path, photos, base, adapter, killed, monkeypatch):
    """A process is killed after ever longer random times, until a call ends; searches go on."""
    monkeypatch.setattr(local, "_DERIVED_BYTES", 4 * (WIDTH + 5 + WIDTH))
    bundle = adapter(1)
    sha256 = {Bundle.open(place).sha256: place for place in (base, bundle)}
    moments = random.Random(0)

    def migrate():
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.02 * (calls + 1)))
        with opened(path) as index:
            index.migrate(bundle, **QUIET)
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    served = ""
    calls = 0
    began = time.monotonic()
    while served != Bundle.open(bundle).sha256:
        moments.random()
        killed(migrate)
        calls += 1
        assert check_index(path) == ([], [])
        with LocalStore(path, upkeep=False) as store:
            (served,) = (entry.bundle for entry in store.generations() if entry.state == "served")
            query = np.zeros((1, {base: WIDTH, bundle: 5}[sha256[served]]), np.float32)
            assert len(store.propose(query, COUNT, served)[0].items) == COUNT
        assert time.monotonic() - began < 60
    assert calls > 1
    with opened(path) as index:
        is_of(index, bundle, photos)
