"""Load on a server by wrk, and the CPU time of the server's processes meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from serve_data import Work
from serving import ROOT, cpu_seconds

_SCRIPT = """
local bodies, at = {}, %(seed)d
for line in io.lines("%(names)s") do
  local file = io.open(line, "rb")
  bodies[#bodies + 1] = wrk.format("POST", "%(path)s", {["Content-Type"] = "%(kind)s", ["Host"] = "localhost"}, file:read("*a"))
  file:close()
end
function init(args) math.randomseed(%(seed)d) end
function request()
  at = at %% #bodies + 1
  return bodies[at]
end
%(delay)s
function done(summary, latency, requests)
  io.write(string.format("FOUND %%d %%d %%d %%f %%f %%f %%f\\n", summary.requests, summary.errors.status, summary.duration,
    latency:percentile(50), latency:percentile(99), latency.max, summary.errors.timeout + summary.errors.read + summary.errors.connect))
end
"""
_DELAY = "function delay() return -math.log(1 - math.random()) * %f end"


@dataclass(frozen=True)
class Seen:
    """What wrk and /proc saw in one span of time.

    Attributes:
        answered: requests a second that were answered with 200.
        asked: requests a second that were answered at all.
        p50: milliseconds.
        p99: likewise.
        cpu: milliseconds of the server's processes for each request that was answered.
        failed: requests that got no answer.
    """

    answered: float
    asked: float
    p50: float
    p99: float
    cpu: float
    failed: int


class Contestant:
    """A server in a process of its own.

    Args:
        name: "ours", "bare", "flask" or "qdrant".
        work: what it is asked.
        options: of our server.
    """

    def __init__(self, name: str, work: Work, options: tuple[str, ...] = ()) -> None:
        self.name = name
        shape = name if name in ("flask", "qdrant") else "ours"
        self.path, self.kind, bodies = work.request(shape)
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._names = folder / "names"
        self._names.write_text("".join(f"{folder / f'{n:04}'}\n" for n in range(len(bodies))))
        for number, body in enumerate(bodies):
            (folder / f"{number:04}").write_bytes(body)
        self._log = (folder / "log").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if shape == "ours" and name != "bare":
            command = ["-m", "retrieval.cli", "serve", str(work.folder / "index"), "--port", "0", *options]
        else:
            given = [str(work.bundle)] if work.bundle else []
            command = [str(Path(__file__).parent / "serve_contestants.py"), name, str(work.folder), *given]
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment, cwd=ROOT
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"ready (\d+)|:(\d+)/ ", line)
        if found is None:
            self._log.seek(0)
            raise SystemExit(f"{name} did not start: {line}{self._log.read()}")
        self.port = int(found[1] or found[2])
        first = folder / "0000"
        for _ in range(600):
            try:
                self.post(first.read_bytes())
                break
            except OSError:
                time.sleep(0.1)

    def post(self, body: bytes) -> bytes:
        """Send one request by hand; return its answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.path}", body, {"Content-Type": self.kind}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def ids(self, work: Work, count: int) -> list[str]:
        """Return the nearest item of each of the first queries."""
        found = []
        for body in work.request(self.name)[2][:count]:
            said = json.loads(self.post(body))
            one = (said.get("results") or said["result"] if isinstance(said, dict) else said)[0]
            found.append(one["id"])
        return found

    def load(self, connections: int, seconds: float, rate: float = 0.0, latency: float = 0.0) -> Seen:
        """Ask for some time.

        Args:
            connections: at a time.
            seconds: how long.
            rate: requests a second, at random moments; 0: each connection asks again at once.
            latency: milliseconds that an answer takes about, where a rate is given.
        """
        pause = max(0.0, 1000 * connections / rate - latency) if rate else 0.0
        values = {
            "names": self._names,
            "path": self.path,
            "kind": self.kind,
            "seed": connections,
            "delay": _DELAY % pause if rate else "",
        }
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
            script.write(_SCRIPT % values)
            script.flush()
            before = cpu_seconds(self.process.pid)
            run = subprocess.run(
                ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s", "-s", script.name,
                 f"http://127.0.0.1:{self.port}{self.path}"],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            spent = cpu_seconds(self.process.pid) - before
        found = re.search(r"FOUND (.*)", run.stdout)
        if found is None:
            raise SystemExit(f"wrk: {run.stdout}{run.stderr}")
        requests, refused, took, p50, p99, _, failed = map(float, found[1].split())
        good = requests - refused
        return Seen(
            good / took * 1e6,
            requests / took * 1e6,
            p50 / 1000,
            p99 / 1000,
            1000 * spent / max(1, good),
            int(failed),
        )

    def open_load(self, rate: float, seconds: float, connections: int) -> dict[str, float]:
        """Ask at a constant rate, whatever is answered: see `serve_open.py`."""
        bodies = self._names.parent / "bodies"
        if not bodies.is_dir():
            bodies.mkdir()
            for name in self._names.read_text().split():
                (bodies / Path(name).name).symlink_to(name)
        line = [sys.executable, str(Path(__file__).parent / "serve_open.py"), str(self.port), self.path, self.kind, str(bodies)]  # fmt: skip
        line += [str(rate), str(seconds), str(connections)]
        found: dict[str, float] = json.loads(
            subprocess.run(line, capture_output=True, text=True, check=True).stdout
        )
        return found

    def metrics(self) -> dict[str, float]:
        """Return our server's figures, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(20)
        self._log.close()
        self._folder.cleanup()
