"""Which files of the machine an index may show."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.host.trust import record_file
from retrieval.serving.index.build import write_index
from retrieval.serving.index.built import built_here
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.gallery import Gallery
from retrieval.serving.index.living import LivingIndex
from retrieval.serving.index.migrating import lift
from retrieval.serving.index.open import open_index
from retrieval.serving.index.seals import Seals
from retrieval.serving.store.contract import Item
from retrieval.serving.store.record import Record


@pytest.fixture
def stranger(index_path, makers, tmp_path):
    """An index that someone else made, of pictures of this machine that are nobody's business."""
    makers.write_digits(tmp_path / "private", 3)
    content = json.loads((index_path / "index.json").read_text())
    made = Path(shutil.copytree(index_path, tmp_path / "i"))
    secret = next((tmp_path / "private").rglob("*.png"))
    row = f"'k', null, '{{}}', cast('{secret}' as blob), {secret.stat().st_size}, 8, 8"
    last = content["count"] - 1
    makers.put_items(
        made / "items.sqlite",
        makers.ITEMS
        + f"with recursive n(i) as (select 0 union all select i + 1 from n where i < {last}) insert into items select i, {row} from n",
    )
    return makers.summed(made)


def image_urls(server):
    answer = server.client.post("/v1/search", json={"vector": [0.0] * 16, "k": 200})
    return {hit["image_url"] for hit in answer.json()["results"]}


def test_a_strangers_index_shows_no_file_of_this_machine(stranger, served, tmp_path):
    server = served(stranger)
    answer = server.client.get("/v1/items/0/image")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "The image of item 0 is in no folder that may be shown."
    assert image_urls(server) == {None}
    server.process.send_signal(signal.SIGTERM)
    told = server.process.communicate(timeout=20)[1]
    assert "Items' images are not shown" in told and "--images FOLDER" in told
    for folder, status in (("private", 200), ("other", 404)):
        (tmp_path / folder).mkdir(exist_ok=True)
        server = served(stranger, "--images", str(tmp_path / folder))
        assert server.client.get("/v1/items/0/image").status_code == status
        assert "/v1/items/0/image" in image_urls(server)  # which file it leads to, only the disk knows


def test_what_this_user_built_is_shown(index_path, served):
    server = served(index_path)
    assert server.client.get("/v1/items/0/image").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert "--images" not in server.process.communicate(timeout=20)[1]


def test_links_lead_to_what_they_lead_to(stranger, tmp_path):
    private = tmp_path / "private"
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "link").symlink_to(private)
    with open_index(stranger, threads=1) as index:
        inside = next(private.rglob("*.png"))
        shown = tmp_path / "shown" / "link" / inside.relative_to(private)
        gallery = Gallery(index, [tmp_path / "shown"])
        assert gallery.original(shown) is None
        assert gallery.original(tmp_path / "shown" / ".." / "private" / inside.name) is None
        assert gallery.original(Path("/etc/passwd")) is None
        assert Gallery(index, [tmp_path / "shown" / "link"]).original(inside) == inside.resolve()
        with pytest.raises(StoreError, match=r"There is no folder .*nowhere"):
            Gallery(index, [tmp_path / "nowhere"])


def test_the_record_of_what_was_built(bundle_path, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_DATA", str(tmp_path / "data"))
    write_index(bundle_path, [photos / "1"], tmp_path / "i", progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert built_here() == [index.sha256]
        record = record_file().with_name("indexes.json")
        assert record.stat().st_mode & 0o077 == 0
        for content in ("[" * 100_000, "{}", "[1, {}]", "\xff"):
            record.write_text(content)
            assert built_here() == []
        record.write_text(json.dumps([index.sha256]))
        record.chmod(0o666)  # anyone may have written that
        assert not Gallery(index).own
    monkeypatch.setenv(
        "RETRIEVAL_DATA", "/dev/null/data"
    )  # nowhere to keep it: the index is built all the same
    write_index(bundle_path, [photos / "1"], tmp_path / "j", progress=False)


@pytest.fixture
def own(bundle_path, photos, tmp_path):
    """A living index that this user created, of one folder."""
    create_index(tmp_path / "own", bundle_path, [photos / "1"], progress=False)
    return tmp_path / "own"


@pytest.fixture
def private(makers, tmp_path):
    """A picture of this machine that is nobody's business."""
    return makers.write_digits(tmp_path / "private", 1)[0]


def shown(folder):
    """Return the ids of a living index's items whose originals may be shown."""
    with LivingIndex.open(folder, threads=1) as index:
        gallery = Gallery(index)
        hits = index.search(np.zeros(16), 1000)
        offered = {hit.id for hit in hits if gallery.shows(hit)}
        assert offered == {hit.id for hit in hits if hit.path and gallery.original(hit.path, hit.stamp)}
        return offered


def forge(folder, sql, *values):
    """Change the record of an index, as whoever holds a copy of it can."""
    record = Record(folder)
    with record.writing() as connection:
        connection.execute("update state set value = value + 1 where key = 'seq'")
        connection.execute(sql, values)
    record.close()


def test_a_forged_copy_of_ones_own_index_shows_nothing_new(own, private, served, tmp_path):
    """A stranger has a copy, with its id and all seals, and has this user put it in the place of the original."""
    all_ = shown(own)
    assert len(all_) > 10
    copy = tmp_path / "copy"
    shutil.copytree(own, copy)
    first, second, third, *_ = sorted(all_)
    secret = str(private).encode()
    forge(copy, "update items set path = ?, bytes = null where id = ?", secret, first)
    forge(copy, "update items set path = ?, stamp = null, bytes = null where id = ?", secret, second)
    forge(copy, "update items set path = ?, stamp = 'x sealed ' || substr(stamp, -32) where id = ?", secret, third)  # fmt: skip
    shutil.rmtree(own)
    copy.rename(own)
    assert shown(own) == all_ - {first, second, third}
    server = served(own)
    for id in (first, second, third):
        answer = server.client.get(f"/v1/items/{id}/image")
        assert answer.status_code == 404 and "no folder that may be shown" in answer.json()["detail"]
    hits = server.client.post("/v1/search", json={"vector": [0.0] * 16, "k": 1000}).json()["results"]
    assert {hit["id"] for hit in hits if hit["image_url"]} == all_ - {first, second, third}


def test_a_seal_is_worth_nothing_elsewhere(own, private, bundle_path, photos, tmp_path, monkeypatch):
    with LivingIndex.open(own, threads=1) as index:
        id = index.scan(limit=1)[0].id
        item = index.get(id, arrays=True)[id]
    assert Seals(index.sha256).hold(item.stamp, item.path)
    assert not Seals(index.sha256).hold(item.stamp, private)  # of another file
    create_index(tmp_path / "other", bundle_path, progress=False)
    with LivingIndex.open(tmp_path / "other", threads=1) as other:
        assert not Seals(other.sha256).hold(item.stamp, item.path)  # in another index
        other.store.upsert([item], other.bundle.sha256)
    assert shown(tmp_path / "other") == set()
    monkeypatch.setenv("RETRIEVAL_DATA", str(tmp_path / "another user"))
    assert shown(own) == set()


def test_adding_to_a_strangers_index_shows_what_was_added(own, private, photos, tmp_path, monkeypatch):
    theirs = shown(own)
    monkeypatch.setenv("RETRIEVAL_DATA", str(tmp_path / "me"))
    forge(own, "update items set path = ?, bytes = null where id = (select max(id) from items)", str(private).encode())  # fmt: skip
    assert shown(own) == set()
    with LivingIndex.open(own, threads=1) as index:
        index.add([photos / "2"], progress=False)
        added = {item.id for item in index.scan()} - theirs
        assert shown(own) == added and added
        known = index.get(theirs, arrays=True)  # reading and writing back names no file
        index.upsert([Item(item.id, "new", path=item.path, arrays=item.arrays) for item in known.values()])
        assert shown(own) == added
        index.add(
            [photos / "1"], progress=False
        )  # they are this user's photos, too: the forged one is mended
        assert shown(own) == added | theirs
        assert private not in {item.path for item in index.scan()}


def test_seals_go_with_copies_snapshots_and_migrations(own, makers, photos, tmp_path):
    all_ = shown(own)
    bundle = makers.make_bundle(tmp_path / "b", seed=5)
    with LivingIndex.open(own, threads=1) as index:
        index.snapshot(tmp_path / "snapshot")
        index.migrate(bundle, progress=False)
        assert index.add([photos / "1"], progress=False).changed == 0
        index.compact() if hasattr(index, "compact") else index.store.compact()
    from retrieval.serving.index.restoring import restore

    restore(tmp_path / "snapshot", tmp_path / "restored")
    shutil.copytree(own, tmp_path / "copy")
    for folder in (own, tmp_path / "snapshot", tmp_path / "restored", tmp_path / "copy"):
        assert shown(folder) == all_


def test_lifting_seals_what_this_user_built(bundle_path, photos, stranger, tmp_path):
    write_index(bundle_path, [photos / "1"], tmp_path / "mine", progress=False)
    for folder, own in ((tmp_path / "mine", True), (stranger, False)):
        lift(folder, progress=False)
        assert bool(shown(folder)) == own


def test_a_key_that_others_can_read_is_not_believed(own, tmp_path, bundle_path, photos, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_DATA", str(tmp_path / "data"))
    create_index(tmp_path / "i", bundle_path, [photos / "1"], progress=False)
    key = record_file().with_name("seals.key")
    assert key.stat().st_mode & 0o077 == 0 and len(key.read_bytes()) == 32 and shown(tmp_path / "i")
    for mode in (0o640, 0o604, 0o620):
        key.chmod(mode)
        with LivingIndex.open(tmp_path / "i", threads=1) as index:
            item = index.scan(limit=1)[0]
            assert not Seals(index.sha256).hold(item.stamp, item.path)
    monkeypatch.setenv("RETRIEVAL_DATA", "/dev/null/data")  # nowhere to keep one: made all the same
    create_index(tmp_path / "j", bundle_path, [photos / "1"], progress=False)
    assert shown(tmp_path / "j") == set()
    with LivingIndex.open(tmp_path / "j", threads=1) as index:
        assert index.add([photos / "1"], progress=False).changed == 0
        assert "--images FOLDER" in (Gallery(index).note() or "")
