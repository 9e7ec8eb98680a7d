"""CPU time of training, of one query and of starting, at two commits, in turn in one run.

    git worktree add ../before f2e2964           # then install each checkout into its own .venv, as README says
    python benchmarks/before_after.py ../before . --output benchmarks/results/before_after.md

Only the commands and what they write are used, never a module of the package, so that any two commits can be compared.
Counted are user and system seconds of a process and its children, with one thread each; a busy machine disturbs them
little. An epoch's are those between the first and the last line of `metrics.jsonl`: the start is not in it, validation
and checkpoint are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from serving import Server, cpu_seconds, requests

CROPPED = """
name = "files"
[data]
name = "core.image_folder"
folder = "{folder}"
[split]
by = "item"
test = 0.2
validation = 0.2
[sampler]
classes = 10
items = 12
[backbone]
name = "core.convnet"
size = 16
width = 16
depth = 3
[head]
embedding_size = 32
[loss]
name = "pml.multi_similarity"
[augmentation]
crop_scale = [0.5, 1.0]
"""
"""A crop is another one each time, so that every epoch decodes every file that trains."""


@dataclass
class Checkout:
    """A checkout that is installed in its own `.venv`, and a folder to write into."""

    root: Path
    folder: Path

    def start(self, program: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
        """Start a program of its environment, with one thread and a cache of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "RETRIEVAL_CACHE": str(self.folder / "cache"), "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
        }  # fmt: skip
        return subprocess.Popen(
            [str(self.root / ".venv" / "bin" / program), *map(str, arguments)],
            env=environment, cwd=self.folder, text=True, **{"stdout": subprocess.DEVNULL, **options},
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    def run(self, program: str, *arguments: object) -> None:
        """Run a program to its end."""
        process = self.start(program, *arguments, stderr=subprocess.PIPE)
        _, said = process.communicate()
        if process.returncode:
            raise SystemExit(f"{self.root}: {program} {arguments[0]} failed: {said}")

    def cpu_of(self, program: str, *arguments: object) -> float:
        """Return the CPU seconds of a program that runs to its end."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(program, *arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def epoch(self, recipe: Path, epochs: int) -> float:
        """Train, and return the CPU seconds of an epoch after the first."""
        run = self.folder / "run"
        process = self.start(
            "retrieval", "train", recipe, "--set", f"train.epochs={epochs}", "--set", f"train.patience={epochs}",
            "--set", "train.device=cpu", "--output", run, "--replace", stderr=subprocess.DEVNULL,
        )  # fmt: skip
        log, seen = run / "metrics.jsonl", {}
        started = time.time()
        while len(seen) < epochs:
            if process.poll() is not None:
                raise SystemExit(f"{self.root}: training ended with {process.returncode}.")
            fresh = (
                log.is_file() and log.stat().st_mtime >= started
            )  # the one before is there until it is replaced
            lines = log.read_bytes().count(b"\n") if fresh else 0
            if lines and lines not in seen:
                seen[lines] = cpu_seconds(process.pid)
            time.sleep(0.002)
        process.wait()
        return (seen[epochs] - seen[min(seen)]) / (epochs - min(seen))

    def server(self, photos: Path) -> Server:
        """Start a server for an index of photos, encoded by what was trained last."""
        bundle, index = self.folder / "bundle", self.folder / "index"
        self.run("retrieval", "export", self.folder / "run", "--output", bundle)
        self.run("retrieval", "index", "create", index, photos, "--bundle", bundle)
        process = self.start("retrieval", "serve", index, "--port", 0, "--workers", 2, stdout=subprocess.PIPE)
        assert process.stdout is not None
        server = Server(process, int(process.stdout.readline().split("/ ")[0].rsplit(":", 1)[1]))
        for _ in range(200):
            if b" 200 " in server.ask(b"GET /v1/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n", 1)[:20]:
                return server
            time.sleep(0.1)
        process.terminate()
        raise SystemExit(f"The server of {self.root} did not become ready.")


def write_photos(folder: Path) -> None:
    """Write scikit-learn's digits as files, 64 × 64 pixels, one folder per class."""
    digits = load_digits()
    for i, (image, label) in enumerate(zip(digits.images[:600], digits.target, strict=False)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray((image * 15.9).astype(np.uint8)).resize((64, 64))
        pixels.save(folder / str(label) / f"{i:04}.png")


def measure(checkouts: dict[str, Checkout], folder: Path, repeats: int, epochs: int, count: int) -> dict:
    """Return CPU milliseconds by what was measured and checkout, one for each repetition."""
    write_photos(folder / "photos")
    (folder / "files.toml").write_text(CROPPED.format(folder=folder / "photos"), encoding="utf-8")
    root = next(iter(checkouts.values())).root
    tasks = {
        "`import retrieval`": lambda c: c.cpu_of("python", "-c", "import retrieval"),
        "`retrieval --help`": lambda c: c.cpu_of("retrieval", "--help"),
        "an epoch of `models/digits`": lambda c: c.epoch(folder / "digits.toml", epochs),
        "an epoch with images from files": lambda c: c.epoch(folder / "files.toml", epochs),
    }
    (folder / "digits.toml").write_text((root / "models" / "digits" / "recipe.toml").read_text())
    found: dict[str, dict[str, list[float]]] = {}
    for name, task in tasks.items():
        found[name] = {who: [] for who in checkouts}
        for turn in range(repeats + 1):
            for who in list(checkouts)[:: 1 if turn % 2 else -1]:
                value = task(checkouts[who])
                if turn:  # the first warms up
                    found[name][who].append(value * 1000)
        print(name, json.dumps(found[name]), flush=True)
    query = requests(folder / "photos")["image, 8 × 8 PNG"]
    servers = {who: checkout.server(folder / "photos") for who, checkout in checkouts.items()}
    name = "one image query, the server's"
    found[name] = {who: [] for who in checkouts}
    try:
        for turn in range(repeats + 1):
            for who in list(servers)[:: 1 if turn % 2 else -1]:
                answer = servers[who].ask(query, 20)
                assert b" 200 " in answer[:20], answer
                before = servers[who].cpu_seconds()
                servers[who].ask(query, count)
                if turn:
                    found[name][who].append((servers[who].cpu_seconds() - before) / count * 1000)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(15)
    print(name, json.dumps(found[name]), flush=True)
    return found


def page(found: dict, names: list[str], options: argparse.Namespace) -> str:
    """Return the page: medians, their ratio, and the range of the ratios of single turns."""
    lines = [
        "# CPU time at two commits",
        "",
        f"Made by `python benchmarks/before_after.py`: CPU milliseconds (user and system), medians of {options.repeats} repetitions in turn after one that "
        f"is not counted, one thread. The ratio is that of the medians; behind it the smallest and the largest of one repetition. An epoch's are the mean of {options.epochs - 1} "
        f"after the first, validation and checkpoint included; a query's the mean of {options.count} on one connection. {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.",
        "",
        f"| | {names[0]} | {names[1]} | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        one, other = row.values()
        ratios = [b / a for a, b in zip(one, other, strict=True)]
        middle = statistics.median(one), statistics.median(other)
        lines.append(
            f"| {name} | {middle[0]:.2f} | {middle[1]:.2f} | {middle[1] / middle[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout, installed in its .venv")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=21, help="epochs of one training")
    parser.add_argument("--count", type=int, default=400, help="queries of one repetition")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    roots = [options.before.resolve(), options.after.resolve()]
    names = [
        subprocess.check_output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], text=True).strip()
        for root in roots
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkouts = {
            who: Checkout(root, folder / who) for who, root in zip(("before", "after"), roots, strict=True)
        }
        text = page(
            measure(checkouts, folder, options.repeats, options.epochs, options.count), names, options
        )
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
