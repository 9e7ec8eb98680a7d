"""Photos in a bucket of S3, on a server of moto on this machine."""

from __future__ import annotations

import pytest
from retrieval.errors import DataError, ServerError
from retrieval.images.decoding import Limits, decode
from retrieval.index.write_embeddings import EmbeddingOptions, embed_sources

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
pytest.importorskip("s3fs", reason="s3fs is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
server = pytest.importorskip("moto.server", reason="moto[server] is not installed")

# s3fs leaves connections open, and botocore uses what Python will remove
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}Warning")
    for kind in ("Resource", "Deprecation", "pytest.PytestUnraisableException")
]


@pytest.fixture
def bucket(photos, monkeypatch):
    """An S3 file system with the photos at `s3://photos/album`."""
    started = server.ThreadedMotoServer(port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    system = fsspec.filesystem("s3")
    try:
        system.mkdir("photos")
        for path in sorted(photos.rglob("*.png")):
            name = path.relative_to(photos).as_posix()
            system.pipe(f"photos/album/{name}", path.read_bytes())
        yield system
    finally:
        # moto keeps its buckets when a server stops
        fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}").rm("photos", recursive=True)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        started.stop()


def test_a_bucket_is_embedded_like_a_folder(bucket, photos, bundle_path, tmp_path):
    bucket.pipe("photos/album/1/empty.png", b"")
    bucket.pipe("photos/album/1/large.png", bytes(3000))
    (tmp_path / "album").symlink_to(photos)
    options = EmbeddingOptions(limits=Limits(bytes=2000))
    here = embed_sources(
        bundle_path, tmp_path / "album", tmp_path / "here", options, progress=False
    )
    there = embed_sources(
        bundle_path, "s3://photos/album", tmp_path / "there", options, progress=False
    )
    assert (there.items, there.bad) == (here.items, 2)
    bad = (tmp_path / "there" / "bad.jsonl").read_text()
    assert "s3://photos/album/1/empty.png is empty (0 bytes)." in bad
    assert "large.png has 3,000 bytes; the limit is 2,000." in bad
    columns = ["key", "label", "vector", "bytes", "width", "height"]
    tables = [
        pq.read_table(part, columns=columns).replace_schema_metadata()
        for part in sorted(tmp_path.glob("*here/part-*.parquet"))
    ]
    assert tables[0].equals(tables[1])
    again = embed_sources(
        bundle_path, "s3://photos/album", tmp_path / "there", options, progress=False
    )
    assert again.resumed == again.items + again.bad
    bucket.pipe("photos/album/1/large.png", bytes(100))
    with pytest.raises(DataError, match="differs in the sources"):
        embed_sources(bundle_path, "s3://photos/album", tmp_path / "there", options, progress=False)


def test_what_is_not_there_is_a_sentence(bucket, monkeypatch):
    for address in ("s3://photos/nowhere.png", "s3://nowhere/x.png"):
        with pytest.raises(DataError, match=f"^{address} does not exist"):
            decode(address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    type(bucket).clear_instance_cache()
    with pytest.raises(ServerError, match=r"^s3://photos/x\.png cannot be read: Could not"):
        decode("s3://photos/x.png")
