"""Embed photos on a Ray cluster, kill one of its processes, and compare the files with those of one
process.

    # writes results/raw/ray_embedding.json and results/ray_embedding.md
    python benchmarks/ray_embedding.py demo/bundle --count 20000

The photos are PNGs of Fashion-MNIST. The cluster is on this machine: two nodes of one core each, so
that two processes embed. One of them is killed by SIGKILL when a third of the photos is embedded.
Needs the extras ray and parquet.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from retrieval.base.progress import Progress
from retrieval.helpers import read_idx
from retrieval.index.write_embeddings import Embedding, EmbeddingOptions, embed_sources

from bench import FASHION, Row, arguments, finish, machine, page, versions

NODES = 2
STORE_BYTES = 200 * 2**20


def write_photos(folder: Path, count: int) -> None:
    """Write the first photos of Fashion-MNIST's training side, one folder per class."""
    pixels = read_idx(FASHION / "train-images-idx3-ubyte.gz", 3)[:count]
    labels = read_idx(FASHION / "train-labels-idx1-ubyte.gz", 1)[:count]
    for label in set(labels.tolist()):
        (folder / str(label)).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{number:05}.png", compress_level=1)


def embedders() -> list[psutil.Process]:
    """Return the processes of this process's cluster that embed."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "MapWorker" in " ".join(child.cmdline())]


class Killer:
    """Kills one of the processes that embed when a third of the items is embedded."""

    def __init__(self) -> None:
        self.processes: set[int] = set()
        self.killed: int | None = None
        self.done = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Follow the progress; `embed_sources` calls this."""
        self.processes |= {process.pid for process in embedders()}
        if self.killed is None and total // 3 <= done < total:
            self.killed = min(self.processes)
            self.done = done
            os.kill(self.killed, signal.SIGKILL)


def differing(first: Path, second: Path) -> list[str]:
    """Return the names of files that only one folder has, or whose bytes differ."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    both = [(name, first / name, second / name) for name in sorted(names)]
    return [
        name
        for name, one, other in both
        if not (one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes())
    ]


def measured(bundle: Path, count: int, folder: Path) -> Row:
    import ray  # here, so that the page can be rendered without it
    from ray.cluster_utils import Cluster

    photos = folder / "photos"
    write_photos(photos, count)

    def embedded(name: str, progress: Progress, ray: str | None = None) -> tuple[Embedding, float]:
        began = time.perf_counter()
        options = EmbeddingOptions(ray=ray, device="cpu")
        done = embed_sources(bundle, photos, folder / name, options, progress=progress)
        return done, time.perf_counter() - began

    alone, alone_seconds = embedded("alone", progress=False)
    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    killer = Killer()
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        on_ray, ray_seconds = embedded("on-ray", ray=str(cluster.address), progress=killer)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "machine": machine(),
        "versions": versions("ray", "pyarrow", "onnxruntime"),
        "count": count,
        "parts": on_ray.parts,
        "embedded": [alone.items, on_ray.items],
        "processes": len(killer.processes),
        "killed_after": killer.done,
        "differing": differing(folder / "alone", folder / "on-ray"),
        "seconds": [alone_seconds, ray_seconds],
    }


def render(raw: Row) -> str:
    names = ", ".join(raw["differing"]) or "none"
    alone, on_ray = raw["seconds"]
    return page(f"""
        # Embedding on a Ray cluster

        `python benchmarks/ray_embedding.py BUNDLE --count {raw["count"]}`; {raw["machine"]};
        {raw["versions"]}.

        {raw["count"]:,} PNGs of Fashion-MNIST were embedded twice, in {raw["parts"]} parts: by one
        process, and by `--ray` on a cluster of two nodes with one core each. One of the two
        processes that embed was killed by SIGKILL after {raw["killed_after"]:,} photos; Ray started
        another in its place ({raw["processes"]} processes in all).

        **Files that differ in any byte: {names}.** Both folders have {raw["embedded"][1]:,} items.

        The single process took {alone:.0f} s with all cores, and the cluster {on_ray:.0f} s, which
        includes starting its processes. A small net on small photos shows what the cluster costs,
        not what it gains: the two nodes are the cores of one machine, which other work used at the
        same time.
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("bundle", type=Path, help="a bundle of grey or coloured photos")
    parser.add_argument("--count", type=int, default=20000, help="number of photos")
    parser.add_argument("--no-write", action="store_true", help="only print the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw = measured(options.bundle, options.count, Path(folder))
    finish("ray_embedding", raw, render(raw), keep=not options.no_write)


if __name__ == "__main__":
    main()
