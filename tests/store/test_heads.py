"""Migrations of an index that stores features: a new head needs no original image."""

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from makers import read_manifest
from onnx import numpy_helper
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import write_manifest
from retrieval.errors import BundleError, DataError, StoreError
from retrieval.index import migrating
from retrieval.index.index import Index, create_index
from retrieval.index.integrity import check_index
from retrieval.store import local
from retrieval.store.local import LocalStore

QUIET: dict[str, Any] = {"progress": False}
COUNT = 60


@pytest.fixture
def split(makers, tmp_path):
    """Make a split bundle; all of them have the same backbone."""

    def make(name, **options):
        path: Path = makers.cut_in_two(makers.make_bundle(tmp_path / name, **options))
        return path

    return make


@pytest.fixture
def photos(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", COUNT)
    return tmp_path / "photos"


@pytest.fixture
def path(split, photos, tmp_path):
    """An index of photos that keeps features."""
    create_index(tmp_path / "i", split("old"), photos, keep_features=True, **QUIET)
    return tmp_path / "i"


def opened(path: Path) -> Index:
    return Index.open(path, threads=1)


def is_of(index: Index, bundle: Path, photos: Path, without: set[str] = frozenset()) -> None:
    """Compare every vector, code and feature with those that a bundle computes."""
    encoder = Bundle.open(bundle, threads=1)
    items = index.get([item.id for item in index.scan()], arrays=True)
    assert len(items) == len(index)
    for id, item in items.items():
        if id in without:
            assert not item.arrays
            continue
        pixels = encoder.preprocess(photos.joinpath(*Path(id).parts[-2:]))[None]
        encoded = encoder.encode(pixels)
        assert np.allclose(item.vector, encoded.vector[0], atol=1e-5)
        if encoded.code is not None:
            assert np.allclose(item.arrays["code"], encoded.code[0], atol=1e-5)
        if "features" in index.generation.widths:
            assert np.allclose(item.arrays["features"], encoder.features(pixels)[0], atol=1e-6)
    hit = index.search(min(photos.glob("*/*.png")), 1)[0]
    if not encoder.manifest.query_vectors:
        assert hit.distance == pytest.approx(0, abs=1e-3)


def with_another_backbone(bundle: Path) -> Path:
    """Change a bundle's preprocessing, which makes its backbone another."""
    manifest = read_manifest(bundle)
    preprocessing = replace(manifest.input.preprocessing, mean=(0.5,))
    shaped = manifest.input.model_copy(update={"preprocessing": preprocessing})
    write_manifest(bundle, manifest.model_copy(update={"input": shaped}))
    return bundle


def no_originals(photos: Path) -> Path:
    """Move the originals away; return their folder."""
    return photos.rename(photos.with_name("elsewhere"))


@pytest.mark.parametrize(
    "options", [{}, {"rescorer": True}, {"query_vectors": True}, {"subspaces": True}]
)
def test_another_head_takes_kept_features_and_no_original(path, split, photos, options):
    new = split("new", seed=1, **options)
    with opened(path) as index:
        assert dict(index.generation.widths) == {"vector": 16, "features": 64}
        is_of(index, path.parent / "old", photos)
        away = no_originals(photos)
        done = index.migrate(new, **QUIET)
        assert (done.embedded, done.from_features, done.skipped) == (COUNT, COUNT, ())
        assert index.bundle.sha256 == Bundle.open(new).sha256
        is_of(index, new, away)
        assert len(index.search(sorted(away.glob("*/*.png"))[:3], 10)[2]) == 10
        away.rename(photos)
        entry = sorted(photos.glob("*/*.png"))[0]
        entry.write_bytes(sorted(photos.glob("*/*.png"))[-1].read_bytes())
        assert index.add(photos, **QUIET).changed == 1
        is_of(index, new, photos)
        away = no_originals(photos)
        back = index.rollback(**QUIET)
        assert (back.embedded, back.from_features) == (1, 1)
        is_of(index, path.parent / "old", away)
    assert check_index(path) == ([], [])


def test_a_bundle_of_features_serves_behind_the_backbone_that_gave_them(
    path, makers, split, photos, tmp_path
):
    options = {"rescorer": True, "variant": True, "seed": 3}
    head = makers.make_bundle(tmp_path / "head", kind="features", **options)
    same = split("same", seed=3, rescorer=True)
    with opened(path) as index:
        away = no_originals(photos)
        assert index.migrate(head, **QUIET).from_features == COUNT
        is_of(index, same, away)
        served = index.bundle
        assert served.backbone_sha256 == Bundle.open(path.parent / "old").backbone_sha256
        assert served.manifest.rescorer is not None and served.sha256 != Bundle.open(head).sha256
        again = index.migrate(head, **QUIET)
        assert again.embedded == 0 and len(index.store.generations()) == 2
        away.rename(photos)
        (photos / "0" / "more.png").write_bytes(min(photos.glob("*/*.png")).read_bytes())
        assert index.add(photos, **QUIET).added == 1
        is_of(index, same, photos)
        wider = makers.make_bundle(tmp_path / "wide", kind="features", features=65)
        says = r"takes 65 features, and the index .* keeps 64 features per item"
        with pytest.raises(BundleError, match=says):
            index.migrate(wider, **QUIET)
        assert index.rollback(**QUIET).from_features == 1
        is_of(index, path.parent / "old", photos)


def test_an_index_of_features_keeps_them_for_the_next_head(makers, tmp_path):
    first, second = (
        makers.make_bundle(tmp_path / str(seed), kind="features", seed=seed) for seed in (0, 1)
    )
    features = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    np.savez(tmp_path / "f.npz", features=features)
    create_index(tmp_path / "i", first, tmp_path / "f.npz", keep_features=True, **QUIET)
    (tmp_path / "f.npz").unlink()
    with opened(tmp_path / "i") as index:
        assert index.migrate(second, **QUIET).from_features == 50
        items = index.get([item.id for item in index.scan()], arrays=True)
        vectors = Bundle.open(second).encode(features).vector
        for item in items.values():
            (row,) = np.flatnonzero((features == item.arrays["features"]).all(axis=1))
            assert np.allclose(item.vector, vectors[row], atol=1e-6)


def test_another_backbone_takes_originals_and_keeps_its_own_features(
    path, makers, split, photos, tmp_path
):
    new = split("new", seed=1)
    model = onnx.load(new / "backbone.onnx")
    full = next(constant for constant in model.graph.initializer if constant.name == "full")
    full.CopyFrom(numpy_helper.from_array(np.float32(120), "full"))
    onnx.save(model, new / "backbone.onnx")
    write_manifest(new, read_manifest(new))
    whole = makers.make_bundle(tmp_path / "whole", seed=2)
    with opened(path) as index:
        done = index.migrate(new, **QUIET)
        assert (done.embedded, done.from_features) == (COUNT, 0)
        is_of(index, new, photos)
        assert index.migrate(whole, **QUIET).from_features == 0
        assert "features" not in index.generation.widths
        is_of(index, whole, photos)
        assert index.rollback(**QUIET).embedded == 0
        is_of(index, new, photos)


def test_an_index_without_features_says_what_is_needed(makers, split, photos, tmp_path, cli):
    whole = makers.make_bundle(tmp_path / "whole", variant=True)
    head = makers.make_bundle(tmp_path / "head", kind="features")
    path = tmp_path / "i"
    ran = cli("index", "create", path, photos, "--bundle", whole, "--keep-features")
    assert ran.code == 2 and "--split" in ran.err
    assert not path.exists() and not (tmp_path / "i.partial").exists()
    both = split("both", variant=True)
    with pytest.raises(BundleError, match=r"runs its variant 'fp16'.*Leave the variant out"):
        create_index(path, both, photos, variant="fp16", keep_features=True, **QUIET)
    create_index(path, both, photos, **QUIET)
    ran = cli("index", "migrate", path, head)
    assert ran.code == 2 and "keeps none" in ran.err
    with opened(path) as index:
        assert len(index.store.generations()) == 1


def test_an_item_that_an_older_generation_left_out_stays_out(path, split, photos, tmp_path):
    gone = sorted(photos.glob("*/*.png"))[3]
    aside = gone.rename(tmp_path / "aside.png")
    other, last = (with_another_backbone(split(f"of {seed}", seed=seed)) for seed in (5, 6))
    with opened(path) as index:
        with pytest.raises(DataError, match="is gone"):
            index.migrate(other, **QUIET)
        assert len(index.migrate(other, skip_bad=True, **QUIET).skipped) == 1
        out = next(item.id for item in index.scan() if item.path == gone)
        done = index.migrate(last, **QUIET)
        assert done.from_features == COUNT - 1
        assert len(done.skipped) == 1 and "keeps no features" in done.skipped[0]
        aside.rename(gone)
        is_of(index, last, photos, without={out})
        assert out not in {hit.id for hit in index.search(gone, COUNT)}
    assert check_index(path) == ([], [])


def test_writes_and_merges_while_a_head_is_applied(path, split, photos, monkeypatch):
    new = split("new", seed=1)
    with opened(path) as index:
        ids = [item.id for item in index.scan()]
        whole = index.get(ids, arrays=True)
        index.upsert([replace(item, id=f"{id}-twin") for id, item in list(whole.items())[:7]])
        created, genuine = [], migrating._apply_head

        def applied(*arguments):
            if not created:
                index.delete(ids[:5])
                index.upsert([replace(whole[ids[9]], id=f"late-{ids[9]}"), whole[ids[10]]])
                index.store.compact()
            created.append(1)
            return genuine(*arguments)

        monkeypatch.setattr(migrating, "_apply_head", applied)
        done = index.migrate(new, **QUIET)
        assert len(created) >= 2 and done.embedded == done.from_features
        monkeypatch.undo()
        head = Bundle.open(new, threads=1)
        items = index.get([item.id for item in index.scan()], arrays=True)
        assert len(items) == COUNT + 7 - 5 + 1
        for item in items.values():
            expected = head.encode_features(item.arrays["features"][None]).vector[0]
            assert np.allclose(item.vector, expected, atol=1e-6)
        hits = index.search(np.zeros(16, np.float32), 200)
        assert sorted(hit.id for hit in hits) == sorted(items)
    assert check_index(path) == ([], [])


def test_another_generation_that_is_served_meanwhile_ends_it(path, split, photos, monkeypatch):
    genuine = migrating._apply_head
    with opened(path) as index:
        other = split("other", seed=4)

        def applied(*arguments):
            monkeypatch.setattr(migrating, "_apply_head", genuine)
            migrating.migrate(index, other, **QUIET)
            return genuine(*arguments)

        monkeypatch.setattr(migrating, "_apply_head", applied)
        with pytest.raises(StoreError, match="Another generation is served by now"):
            index.migrate(split("new", seed=1), **QUIET)
        is_of(index, other, photos)


def test_altered_features_are_not_taken(path, split, photos):
    (kept,) = (path / "arrays").glob("*.features")
    content = bytearray(kept.read_bytes())
    content[4096 + 70] ^= 4
    kept.write_bytes(content)
    new = split("new", seed=1)
    assert any(".features was altered" in fault for fault in check_index(path)[0])
    with opened(path) as index:
        assert len(index.search(sorted(photos.glob("*/*.png"))[0], 3)) == 3
        with pytest.raises(StoreError, match="was altered"):
            index.migrate(new, **QUIET)
        with pytest.raises(StoreError, match="was altered"):
            index.get([index.scan()[0].id], arrays=True)
        assert index.bundle.sha256 == Bundle.open(path.parent / "old").sha256
    kept.unlink()
    assert any(".features is missing" in fault for fault in check_index(path)[0])


@pytest.mark.parametrize("point", ["applied", "switch"])
def test_after_a_kill_the_same_call_goes_on(path, split, photos, point, killed, monkeypatch):
    new = split("new", seed=1)

    def migrate():
        with opened(path) as index:
            index.migrate(new, **QUIET)

    with monkeypatch.context() as patch:
        where = (local, "append_rows") if point == "applied" else (LocalStore, "switch")
        patch.setattr(*where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed(migrate)
    with opened(path) as index:
        is_of(index, path.parent / "old", photos)
        done = index.migrate(new, **QUIET)
        assert done.embedded == (0 if point == "switch" else COUNT)
        is_of(index, new, photos)
        with LocalStore(path) as store:
            assert [entry.state for entry in store.generations()] == ["kept", "served"]
    assert check_index(path) == ([], [])
    assert len(list((path / "arrays").iterdir())) == 4


def test_the_backbone_runs_once_for_an_item(photos, split, tmp_path, monkeypatch):
    counts = Counter()
    for name in ("features", "encode"):
        genuine = getattr(Bundle, name)

        def counted(self, inputs, name=name, genuine=genuine, **more):
            counts[name] += len(inputs)
            return genuine(self, inputs, **more)

        monkeypatch.setattr(Bundle, name, counted)
    create_index(tmp_path / "i", split("b"), photos, keep_features=True, **QUIET)
    assert counts == {"features": COUNT}
