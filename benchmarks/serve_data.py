"""The indexes and requests of `serve.py`, made once in a cache folder."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import Item
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

from image_vectors import image_vectors

QUERIES = 200
STEP = 20_000
K = 10
BOUNDARY = "----q"


@dataclass(frozen=True)
class Work:
    """What is asked of every contestant.

    Attributes:
        folder: holds `index` (ours), `vectors.npy` (the same vectors, for FAISS) and `queries`.
        bundle: the folder of the encoder; None where queries are vectors.
        many: how many items.
    """

    folder: Path
    bundle: Path | None
    many: int

    def queries(self) -> list[bytes]:
        """Return the queries: encoded images, or vectors as JSON lists."""
        return [path.read_bytes() for path in sorted((self.folder / "queries").iterdir())]

    def request(self, shape: str) -> tuple[str, str, list[bytes]]:
        """Return path, content type and bodies as a server of a kind takes them: "ours", "flask" or "qdrant"."""
        found = self.queries()
        if self.bundle is None:
            name = {"ours": "vector", "flask": "embedding_input", "qdrant": "vector"}[shape]
            count = {"ours": "k", "flask": "num_images", "qdrant": "limit"}[shape]
            bodies = [b'{"%s":%s,"%s":%d}' % (name.encode(), one, count.encode(), K) for one in found]
            return _path(shape), "application/json", bodies
        if shape == "flask":
            said = [{"image": base64.b64encode(one).decode(), "num_images": K} for one in found]
            return _path(shape), "application/json", [json.dumps(one).encode() for one in said]
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="q"\r\n\r\n'.encode()
        end = f"\r\n--{BOUNDARY}--\r\n".encode()
        return (
            _path(shape),
            f"multipart/form-data; boundary={BOUNDARY}",
            [head + one + end for one in found],
        )


def _path(shape: str) -> str:
    return {
        "ours": "/v1/search",
        "flask": "/knn-service",
        "qdrant": "/collections/items/points/search",
        "bare": "/",
    }[shape]


def works(cache: Path, vectors: Path) -> dict[str, Callable[[], Work]]:
    """Return what makes each work, or opens it where it was made before, by its name.

    Args:
        cache: the folder for them.
        vectors: the folder of `image_vectors.py`.
    """
    return {
        "small net, PNG of 16 × 16": lambda: _demo(cache),
        "EfficientNet-Lite0, JPEG of 640 × 480": lambda: _photos(cache),
        "vector among 900 × 32": lambda: _small(cache),
        "vector among 100,000 × 128": lambda: _vectors(cache, vectors, 100_000),
        "vector among 1,000,000 × 128": lambda: _vectors(cache, vectors, 1_000_000),
    }


def _demo(cache: Path) -> Work:
    """Return the demo's small net over its 1,796 digits, asked with its own query images."""
    demo, folder = cache / "demo", cache / "small net"
    if not demo.is_dir():
        _command("demo", "--output", demo)
    work = Work(folder, demo / "bundle", 0)
    if not (folder / "vectors.npy").is_file():
        photos = sorted((demo / "queries").rglob("*.png"))[:QUERIES]
        _put(folder, demo / "bundle", sorted((demo / "images").rglob("*.png")), photos)
    return _counted(work)


def _photos(cache: Path) -> Work:
    """Return EfficientNet-Lite0 over crops of photographs, asked with JPEGs of 640 × 480."""
    folder, crops = cache / "lite0", cache / "photos"
    work = Work(folder, cache / "lite0 bundle", 0)
    if not (folder / "vectors.npy").is_file():
        crops.mkdir(exist_ok=True)
        paths = _crops(crops, 2000 + QUERIES)
        if work.bundle is not None and not work.bundle.is_dir():
            _command(
                "export", "--model", "core.efficientnet_lite0", "--output", work.bundle, "--photos", crops
            )
        assert work.bundle is not None
        _put(folder, work.bundle, paths[QUERIES:], paths[:QUERIES])
    return _counted(work)


def _crops(folder: Path, count: int) -> list[Path]:
    """Write photographs: parts of the two that scikit-learn brings, enlarged or not."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    found = [Image.fromarray(one) for one in load_sample_images().images]
    paths = []
    for number in range(count):
        whole = found[number % 2]
        width = int(random.integers(200, 560))
        height = width * 3 // 4
        left, top = (
            int(random.integers(0, whole.width - width)),
            int(random.integers(0, max(1, whole.height - height))),
        )
        path = folder / f"{number:05}.jpg"
        whole.crop((left, top, left + width, top + height)).resize((640, 480)).save(path, quality=85)
        paths.append(path)
    return paths


def _put(folder: Path, bundle: Path, items: list[Path], queries: list[Path]) -> None:
    """Make an index of images, its vectors as a matrix, and queries."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = Bundle.open(bundle, threads=2)
    _index(folder, opened, opened.encode_images([*map(str, items)], progress=False))
    _queries(folder, [path.read_bytes() for path in queries])


def _vectors(cache: Path, vectors: Path, count: int) -> Work:
    """Return a search with a vector among many of `image_vectors.py`, by exact search."""
    folder = cache / f"vectors {count}"
    if not (folder / "queries").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        found = image_vectors(vectors, count)
        _index(folder, Bundle.open(vectors / "fashion-128" / "run" / "bundle"), found.vectors)
        _queries(folder, [_json(row) for row in found.queries[:QUERIES]])
    return Work(folder, None, count)


def _small(cache: Path) -> Work:
    """Return a search with a vector in the demo's index: what a request costs besides its search."""
    from_ = _demo(cache).folder
    folder = cache / "small vectors"
    if not (folder / "queries").is_dir():
        found = np.load(from_ / "vectors.npy")
        _index(folder, Bundle.open(cache / "demo" / "bundle"), found)
        random = np.random.default_rng(0)
        _queries(folder, [_json(row + random.normal(0, 0.02, len(row))) for row in found[:QUERIES]])
    return _counted(Work(folder, None, 0))


def _json(row: Any) -> bytes:
    return json.dumps([round(float(one), 6) for one in row]).replace(" ", "").encode()


def _index(folder: Path, bundle: Bundle, vectors: Any) -> None:
    create_local(
        folder / "index", bundle, {"vector": vectors.shape[1]}, structure=Wanted("flat"), replace=True
    )
    store = LocalStore(folder / "index")
    for start in range(0, len(vectors), STEP):
        rows = [
            Item(f"{start + at:07}", arrays={"vector": row})
            for at, row in enumerate(vectors[start : start + STEP])
        ]
        store.upsert(rows, bundle.sha256)
    store.compact()
    store.close()
    np.save(folder / "vectors.npy", vectors)


def _queries(folder: Path, found: list[bytes]) -> None:
    (folder / "queries.partial").mkdir(exist_ok=True)
    for number, one in enumerate(found):
        (folder / "queries.partial" / f"{number:04}").write_bytes(one)
    (folder / "queries.partial").replace(folder / "queries")


def _counted(work: Work) -> Work:
    many = len(np.load(work.folder / "vectors.npy", mmap_mode="r"))
    return Work(work.folder, work.bundle, many)


def _command(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "retrieval.cli", *map(str, arguments)], check=True)


def pixels(image: bytes, said: dict[str, Any]) -> Any:
    """Return an image (1, C, H, W) as a manifest's `preprocessing` says, by Pillow alone: what a program by hand does."""
    opened = Image.open(io.BytesIO(image)).convert("L" if said["channels"] == 1 else "RGB")
    height, width = said["size"]
    method = Image.Resampling[said["interpolation"].upper()]
    if said["resize"] is None:
        opened = opened.resize((width, height), method)
    else:
        shorter, (wide, high) = said["resize"], opened.size
        longer = int(shorter * max(wide, high) / min(wide, high))
        opened = opened.resize((shorter, longer) if wide <= high else (longer, shorter), method)
        left, top = round((opened.width - width) / 2), round((opened.height - height) / 2)
        opened = opened.crop((left, top, left + width, top + height))
    array = np.asarray(opened)
    return np.ascontiguousarray(array[None] if said["channels"] == 1 else array.transpose(2, 0, 1))[None]
