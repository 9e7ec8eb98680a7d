"""The operator's page, followed: install without torch, keys, serve, push, search, kill, restart, snapshot, restore, migrate under load.

    python benchmarks/operator_trial.py --bundle demo/bundle --other other/bundle --output benchmarks/results/operator_trial.md

Each command is one of docs/operator.md or of a page that it links; each runs in a virtual environment that this makes from the checkout, or in `--venv`. The
bundles come from an environment with torch (`retrieval demo`, and `retrieval export` of another run). Images are Fashion-MNIST's from Debian's package
dataset-fashion-mnist, or handwritten digits where that is missing. The exit code is 1 when a step failed.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

FASHION = Path("/usr/share/datasets/fashion-mnist")
CHECKOUT = Path(__file__).parents[1]
_CLIENTS = 3


class Trial:
    """One trial: its folder, its commands, and what came of each step.

    Args:
        folder: an empty one; commands run there.
        programs: of the virtual environment, its `bin`.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self._programs = folder, programs
        self.keys: dict[str, str] = {}
        self.rows: list[tuple[str, float, str]] = []

    def note(self, step: str, began: float, what: str) -> None:
        """Keep what came of a step."""
        self.rows.append((step, time.monotonic() - began, what))
        print(f"{step}: {what} ({self.rows[-1][1]:.1f} s)", flush=True)

    def run(self, *command: str, key: str | None = None, code: int = 0) -> tuple[str, int]:
        """Run a command of the page; return what it printed, and the most bytes that it held.

        Raises:
            SystemExit: it ended with another code.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if key is not None:
            environment["RETRIEVAL_KEY"] = self.keys[key]
        with tempfile.TemporaryFile("w+", dir=self.folder) as out:
            process = subprocess.Popen(
                [str(self._programs / command[0]), *command[1:]],
                stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, env=environment,
            )  # fmt: skip
            most = 0
            while process.poll() is None:
                most = max(most, held_by(process.pid))
                time.sleep(0.02)
            out.seek(0)
            said = out.read()
        if process.returncode != code or "Traceback" in said:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
        return said, most

    @contextmanager
    def served(self, index: str, *options: str) -> Iterator[Server]:
        """Serve an index, until it is ready; ended by SIGTERM unless it is gone."""
        command = [
            str(self._programs / "retrieval"),
            "serve",
            index,
            "--port",
            "0",
            "--keys",
            "keys.jsonl",
            *options,
        ]
        with (self.folder / "server.log").open("a") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder
            )
        assert process.stdout is not None
        server = Server(process, int(process.stdout.readline().split("/ ")[0].rpartition(":")[2]), self.keys)
        try:
            server.until_ready()
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
            code = process.wait(30)
            process.stdout.close()
            if code not in (0, -signal.SIGKILL):
                raise SystemExit(f"The server ended with {code}.")


class Server:
    """A server, as a client sees it."""

    def __init__(self, process: subprocess.Popen[str], port: int, keys: dict[str, str]) -> None:
        self.process, self.port, self._keys = process, port, keys
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: object = None, key: str = "shop") -> tuple[int, Any]:
        """Send one request on a connection of its own; return status and JSON. Status 0 is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {self._keys[key]}"} if key else {}
        if isinstance(body, bytes):
            headers["Content-Type"] = "image/png"
        elif body is not None:
            headers["Content-Type"], body = "application/json", json.dumps(body)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if "json" in answer.headers["content-type"] else content
        except OSError as fault:
            return 0, str(fault)
        finally:
            connection.close()

    def until_ready(self) -> None:
        """Wait."""
        for _ in range(600):
            if self.ask("GET", "/readyz", key="")[0] == 200:
                return
            time.sleep(0.1)
        raise SystemExit("The server did not become ready.")

    def nearest(self, image: bytes) -> list[Any]:
        """Return id and distance of what is nearest to an image."""
        status, found = self.ask("POST", "/v1/search?k=5", image)
        if status != 200:
            raise SystemExit(f"A search was answered {status}: {found}")
        return [(hit["id"], round(hit["distance"], 5)) for hit in found["results"]]


class Load:
    """Clients that search for images, without a pause, until `stop`; what they were answered."""

    def __init__(self, server: Server, images: list[bytes]) -> None:
        self.statuses: Counter[int] = Counter()
        self.failed: list[str] = []
        self.longest = 0.0
        self._server, self._images, self._stop = server, images, threading.Event()
        self._threads = [threading.Thread(target=self._search, args=(n,)) for n in range(_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _search(self, turn: int) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            status, found = self._server.ask("POST", "/v1/search?k=5", self._images[turn % len(self._images)])
            turn += 1
            self.longest = max(self.longest, time.monotonic() - began)
            self.statuses[status] += 1
            if status != 200 or len(found["results"]) != 5:
                self.failed.append(f"{status}: {found}")

    def stop(self) -> Load:
        """End them, and return what they were answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self


def held_by(pid: int) -> int:
    """Return the most resident bytes that a process has had; 0 when it is gone."""
    try:
        said = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in said.splitlines() if line.startswith("VmHWM")), 0)


def write_images(folder: Path, count: int) -> str:
    """Write so many images as PNG files, a folder for each label; return what they are."""
    if FASHION.is_dir():

        def read(name: str, offset: int) -> np.ndarray:
            return np.frombuffer(gzip.decompress((FASHION / name).read_bytes()), np.uint8, offset=offset)

        images, labels = (
            read("train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28),
            read("train-labels-idx1-ubyte.gz", 8),
        )
        what = "Fashion-MNIST"
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels, what = (digits.images * 15).astype(np.uint8), digits.target, "handwritten digits"
    for number in range(count):
        at = number % len(images)
        path = folder / f"{labels[at]}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[at]).save(path)
    return what


def install(venv: Path, trial: Trial | None = None) -> None:
    """Make a virtual environment with the serving install alone, from a copy of the checkout."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    with tempfile.TemporaryDirectory() as copy:
        clone = Path(copy) / "clone"
        subprocess.run(["git", "clone", "-q", str(CHECKOUT), str(clone)], check=True)
        subprocess.run(
            [str(venv / "bin" / "pip"), "install", "-q", ".[cpu,serve,client]"], cwd=clone, check=True
        )


def follow(trial: Trial, count: int) -> None:
    """Follow the page from keys to migration; `bundle` and `other` lie in the trial's folder."""
    folder = trial.folder
    began = time.monotonic()
    what = write_images(folder / "photos", count)
    few = folder / "few"
    for path in sorted((folder / "photos").rglob("*.png"))[: count // 10]:
        (few / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, few / path.parent.name / path.name)
    images = [
        path.read_bytes() for path in sorted((folder / "photos").rglob("*.png"))[:: max(1, count // 50)]
    ]
    trial.note("images", began, f"{count:,} of {what} as PNG files")
    began = time.monotonic()
    trial.run("retrieval", "doctor")
    trial.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None")
    trial.note("doctor", began, "all is well; torch is not there")
    began = time.monotonic()
    for name, role in (("shop", "read"), ("importer", "write"), ("operator", "admin")):
        said, _ = trial.run("retrieval", "keys", "add", name, "--role", role, "--output", "keys.jsonl")
        trial.keys[name] = next(word for word in said.split() if word.startswith("rk_"))
    trial.note("keys", began, "3 added")
    began = time.monotonic()
    trial.run("retrieval", "index", "create", "photos.index", "--bundle", "bundle")
    (folder / "snapshots").mkdir()
    trial.note("index create", began, "an empty index")
    options = ("--snapshots", "snapshots", "--audit", "audit.jsonl")
    with trial.served("photos.index", *options) as server:
        before = pushed(trial, server, count)
        filtered(trial, server, images)
        found = [server.nearest(image) for image in images[:10]]
        began = time.monotonic()
        server.process.kill()
        server.process.wait()
    with trial.served("photos.index", *options) as server:
        same = [server.nearest(image) for image in images[:10]] == found
        items = server.ask("GET", "/v1/index")[1]["items"]
        trial.note("SIGKILL, restart", began, f"{items:,} items of {before:,}, the same answers: {same}")
        began = time.monotonic()
        status, made = server.ask("POST", "/v1/snapshots", key="operator")
        trial.note("snapshot", began, f"{status}, {made['snapshot']}")
    began = time.monotonic()
    trial.run("retrieval", "index", "restore", f"snapshots/{made['snapshot']}", "restored.index")
    trial.run("retrieval", "index", "check", "restored.index")
    with trial.served("restored.index") as server:
        restored = [server.nearest(image) for image in images[:10]] == found
    trial.note("restore elsewhere, check, serve", began, f"the same answers: {restored}")
    failed = migrated(trial, images)
    if not (same and restored and items == before == count and status == 201) or failed:
        raise SystemExit("The trial failed.")


def pushed(trial: Trial, server: Server, count: int) -> int:
    """Push a tenth of the images, then all; return how many items there are."""
    for folder, many in (("few", count // 10), ("photos", count)):
        began = time.monotonic()
        said, most = trial.run("retrieval", "push", folder, server.url, key="importer")
        last = [line for line in said.splitlines() if "added" in line][-1]
        trial.note(f"push of {many:,} files", began, f"{last} At most {most / 1e6:.1f} MB.")
    items: int = server.ask("GET", "/v1/index")[1]["items"]
    return items


def filtered(trial: Trial, server: Server, images: list[bytes]) -> None:
    """Search with a filter."""
    began, wrong = time.monotonic(), 0
    for image in images:
        status, found = server.ask("POST", "/v1/search?k=10&filter=label+%3D+'3'", image)
        wrong += (
            status != 200
            or {hit["label"] for hit in found["results"]} != {"3"}
            or len(found["results"]) != 10
        )
    trial.note("search with a filter", began, f"{len(images)} searches, {wrong} wrong")
    if wrong:
        raise SystemExit("Searches with a filter are wrong.")


def migrated(trial: Trial, images: list[bytes]) -> list[str]:
    """Give the index another model while clients search, go back, and forth again; return the requests that failed."""
    with trial.served("photos.index") as server:
        began = time.monotonic()
        server.ask(
            "PUT",
            f"/v1/items/{quote(next(iter(server.nearest(images[0])))[0], safe='')}",
            {"label": "3"},
            "importer",
        )
        said, _ = trial.run("retrieval", "index", "migrate", "photos.index", "other", code=2)
        trial.note(
            "migrate while the server is the writer",
            began,
            said.strip().splitlines()[-1].replace(f"{trial.folder}/", ""),
        )
    with trial.served("photos.index") as server:
        bundle, load, began = (
            server.ask("GET", "/v1/index")[1]["bundle"],
            Load(server, images),
            time.monotonic(),
        )
        said, _ = trial.run("retrieval", "index", "migrate", "photos.index", "other")
        took = time.monotonic() - began
        seen = [server.ask("GET", "/v1/index")[1]["bundle"]]
        for _ in range(3):
            trial.run("retrieval", "index", "rollback", "photos.index")
            seen.append(server.ask("GET", "/v1/index")[1]["bundle"])
            trial.run("retrieval", "index", "migrate", "photos.index", "other")
            seen.append(server.ask("GET", "/v1/index")[1]["bundle"])
        trial.run("retrieval", "index", "migrate", "photos.index", "--drop-old")
        load.stop()
    exchanged = sum(one != other for one, other in zip([bundle, *seen], seen, strict=False))
    trial.note(
        "migrate under load",
        began,
        f"{said.strip().splitlines()[-1]} {took:.1f} s. Models exchanged {exchanged} times; {sum(load.statuses.values()):,} searches of {_CLIENTS} clients "
        f"meanwhile, {len(load.failed)} failed, the longest {load.longest:.2f} s",
    )
    return load.failed + ([] if exchanged == 7 else [f"{exchanged} exchanges"])


def render(trial: Trial) -> str:
    """Return what came of it, for people."""
    lines = [
        "# The page for operators, followed",
        "",
        "`benchmarks/operator_trial.py`, in a virtual environment with `pip install '.[cpu,serve,client]'` alone, on two cores shared with other work.",
        "",
        "| step | seconds | what came of it |",
        "| --- | --- | --- |",
    ]
    return (
        "\n".join([*lines, *(f"| {step} | {took:.1f} | {what} |" for step, took, what in trial.rows)]) + "\n"
    )


def main() -> None:
    """Follow the page, print what came of it, and say by the exit code whether each step did what the page says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True, help="of another model, for the same images")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--venv", type=Path, help="one that is there, with the serving install")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "trial"
        folder.mkdir()
        venv = (options.venv or Path(name) / "venv").absolute()
        trial = Trial(folder, venv / "bin")
        if options.venv is None:
            began = time.monotonic()
            install(venv)
            trial.note("install", began, "pip install '.[cpu,serve,client]' from a clone")
        for source, target in ((options.bundle, "bundle"), (options.other, "other")):
            shutil.copytree(source, folder / target)
        try:
            follow(trial, options.images)
        finally:
            text = render(trial)
            print(text)
        if options.output:
            options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
