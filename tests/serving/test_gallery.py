"""Which files of the machine an index may show."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from retrieval.errors import StoreError
from retrieval.host.trust import record_file
from retrieval.serving.index.build import write_index
from retrieval.serving.index.built import built_here
from retrieval.serving.index.gallery import Gallery
from retrieval.serving.index.open import open_index


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
    assert answer.json() == {"error": "The image of item 0 is in no folder that may be shown."}
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
