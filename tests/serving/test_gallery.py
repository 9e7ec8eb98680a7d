"""Which files of the machine an index may show."""

from __future__ import annotations

from pathlib import Path

import pytest
from retrieval.errors import StoreError
from retrieval.serving.http.pictures import Gallery


def image_urls(server):
    answer = server.client.post("/v1/search", json={"vector": [0.0] * 16, "k": 200})
    return {hit["image_url"] for hit in answer.json()["results"]}


def test_no_file_of_the_machine_is_shown_unless_its_folder_is_named(index_path, photos, served, tmp_path):
    id = "1/0001.png"
    server = served(index_path)
    answer = server.client.get(f"/v1/items/{id}/image")
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"The image of item {id} is in no folder that may be shown."
    assert image_urls(server) == {None}
    (tmp_path / "other").mkdir()
    for folder, status in ((photos, 200), (tmp_path / "other", 404)):
        server = served(index_path, "--images", str(folder))
        assert server.client.get(f"/v1/items/{id}/image").status_code == status
        assert None not in image_urls(server)  # which file an address leads to, only the disk knows


def test_links_lead_to_what_they_lead_to(makers, tmp_path):
    private = tmp_path / "private"
    makers.write_digits(private, 3)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "link").symlink_to(private)
    inside = next(private.rglob("*.png"))
    gallery = Gallery([tmp_path / "shown"])
    assert gallery.original(tmp_path / "shown" / "link" / inside.relative_to(private)) is None
    assert gallery.original(tmp_path / "shown" / ".." / "private" / inside.name) is None
    assert gallery.original(Path("/etc/passwd")) is None
    assert Gallery([tmp_path / "shown" / "link"]).original(inside) == inside.resolve()
    with pytest.raises(StoreError, match=r"There is no folder .*nowhere"):
        Gallery([tmp_path / "nowhere"])
