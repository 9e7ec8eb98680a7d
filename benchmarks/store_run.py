"""One run of `store.py`: what was measured already, and each system in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from store_systems import SYSTEMS

HERE = Path(__file__).parent
WAIT = 1800.0


class Failed(Exception):
    """A system refused, or did not answer."""


class Worker:
    """A system in a process of its own; it stands still while it is not asked anything."""

    def __init__(
        self, run: Run, name: str, folder: Path, *, cores: int = 1, before: tuple[str, ...] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        threads = {f"{library}_NUM_THREADS": str(cores) for library in ("OMP", "OPENBLAS", "MKL", "RAYON")}
        allowed = sorted(os.sched_getaffinity(0))[-cores:]
        self.errors = (run.folder / f"{name.replace(' ', '-')}.log").open("a+")
        self.process = subprocess.Popen(
            [
                *before,
                str(run.python(name)),
                str(HERE / "store_worker.py"),
                name,
                str(folder),
                *map(str, run.files),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "ANONYMIZED_TELEMETRY": "False"},
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
        self.name = name

    def ask(self, do: str, within: float = WAIT, **said: Any) -> dict[str, Any]:
        """Have it do something.

        Raises:
            Failed: it could not.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self.process.stdin.write((json.dumps({"do": do, **said}) + "\n").encode())
            self.process.stdin.flush()
            ready = select.select([self.process.stdout], [], [], within)[0]
            line = self.process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            raise Failed(f"{self.name} did not answer '{do}' within {within:.0f} s, or ended")
        os.killpg(self.process.pid, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(f"{self.name}, {do}: {answer['failed']}")
        return answer

    def kill(self) -> None:
        """End it without any warning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def end(self) -> None:
        """Close the store, then the process, and let it end what it does in the background."""
        try:
            self.ask("close")
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.communicate(timeout=WAIT)
        finally:
            self.kill()


class Run:
    """What is measured, where, and what was measured already."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.folder: Path = given.folder.resolve()
        self.files = (given.vectors.resolve(), given.queries.resolve())
        self.environments: Path = (given.environments or self.folder / "environments").resolve()
        self.names: list[str] = given.only or list(SYSTEMS)
        self.kept: dict[str, Any] = {"sizes": {}}
        for file in self.folder.glob("figures*.json"):
            said = json.loads(file.read_text())
            self.kept["sizes"] |= said.pop("sizes", {})
            self.kept |= said
        self.vectors = np.load(self.files[0], mmap_mode="r")
        self.queries = np.load(self.files[1])

    def python(self, name: str) -> Path:
        """Return the interpreter of a system's environment."""
        system = SYSTEMS[name]
        return self.environments / "-".join(system.packages) / "bin" / "python" if system.packages else Path(sys.executable)  # fmt: skip

    def save(self) -> None:
        """Keep the figures so far: a file for each size, so that two sizes may be filled at the same time."""
        sizes = self.kept["sizes"]
        files = {"figures.json": {name: held for name, held in self.kept.items() if name != "sizes"}}
        files |= {f"figures-{size}.json": {"sizes": {size: sizes[size]}} for size in map(str, self.given.sizes) if size in sizes}  # fmt: skip
        if self.given.load_only and (self.folder / "figures.json").exists():
            files.pop("figures.json")
        for name, held in files.items():
            temporary = self.folder / f"{name}.tmp"
            temporary.write_text(json.dumps(held, indent=1) + "\n")
            temporary.replace(self.folder / name)

    def at(self, *keys: str) -> dict[str, Any]:
        """Return a table of what is kept."""
        table = self.kept
        for key in keys:
            table = table.setdefault(key, {})
        return table

    def once(self, table: dict[str, Any], key: str, make: Callable[[], Any], label: str = "") -> Any:
        """Return what is kept, or make it and keep it; a failure is kept too."""
        if key not in table:
            began = time.monotonic()
            try:
                table[key] = make()
            except Failed as fault:
                table[key] = {"failed": str(fault)[-600:]}
            self.save()
            print(f"{time.strftime('%H:%M:%S')} {label} {key}: {json.dumps(table[key])[:150]} [{time.monotonic() - began:.1f} s]", flush=True)  # fmt: skip
        return table[key]

    def store(self, name: str, size: int) -> Path:
        """Return the folder of a store."""
        return self.folder / "stores" / f"{size}" / name.replace(" ", "-")


@contextlib.contextmanager
def opened(run: Run, names: list[str], folder: Callable[[str], Path]) -> Iterator[dict[str, Worker]]:
    """Give the systems, each opened in a process of its own."""
    workers = {}
    try:
        for name in names:
            worker = workers[name] = Worker(run, name, folder(name))
            with contextlib.suppress(Failed):  # then whatever is asked of it fails, and is kept so
                worker.ask("open")
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
