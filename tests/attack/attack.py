"""Attack a server of one's own, while honest clients search it; say what each got.

    python tests/attack/attack.py --requests 20000 --ends 20 --output benchmarks/results/attack.md
    python tests/attack/attack.py --requests 20000 --proxy --output attack_proxy.md

The server is a real one in a process of its own on 127.0.0.1; the attackers' and the honest
clients' addresses differ (127.0.0.2 … and 127.0.0.1), as they do outside. Its exit code is 1 when a
promise was broken. With `--proxy` all of them go through nginx with deploy's configuration and TLS,
attackers from 240 addresses so that its rates let their requests through, beside idle connections
and ones that send a byte a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]  # its neighbours

import makers  # noqa: E402
import wire  # noqa: E402
from honest import HonestClients, Seen  # noqa: E402
from hostile_images import damaged, worst  # noqa: E402
from hostile_requests import Generator  # noqa: E402
from proxy import Proxy, SlowClients  # noqa: E402
from wire import FORM, Answer, ask, form, get, post, vector  # noqa: E402

DEADLINE = 8.0  # seconds: the server's own default
GRACE = 10.0
_WARM = 1000  # requests before the memory is looked at
_ATTACKERS = 8  # addresses
_PROXY_ATTACKERS = 240  # addresses, of which the proxy takes 20 requests a second each
_PROXY_PAUSE = 0.15  # seconds between an honest client's searches, for the same reason
_IDLE, _DRIPPING = 1000, 200  # connections


class Memory(NamedTuple):
    """Resident bytes of the server's own process, and of those that it started."""

    server: int
    decoders: int

    @property
    def total(self) -> int:
        """Of all of them."""
        return self.server + self.decoders


@dataclass
class Server:
    """`retrieval serve` in a process of its own; what it logs goes to a file."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @classmethod
    def start(cls, index: Path, log: Path, *options: str, **environment: str) -> Server:
        """Start it, and wait until it is ready."""
        command = [
            sys.executable,
            "-m",
            "retrieval.cli",
            "serve",
            str(index),
            "--port",
            "0",
            *options,
        ]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=index.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        server = cls(process, int(line.split("/ ")[0].rpartition(":")[2]), log)
        for _ in range(200):
            if ask(server.port, get("/readyz")).status == 200:
                return server
            time.sleep(0.1)
        raise SystemExit(f"The server did not become ready: {log.read_text()}")

    def memory(self) -> Memory:
        """Return what the server and its processes hold now."""
        serving, decoders = self.processes()
        return Memory(sum(map(_resident, serving)), sum(map(_resident, decoders)))

    def processes(self) -> tuple[list[int], list[int]]:
        """Return its own processes (of several: the supervisor and those that serve), and all that
        these started.
        """
        own, decoders, todo = [self.process.pid], [], _children(self.process.pid)
        while todo:
            pid = todo.pop()
            (own if _serves(pid) else decoders).append(pid)
            todo += _children(pid)
        return own, decoders

    def end(self) -> tuple[float, int]:
        """Send SIGTERM; return the seconds until the process was gone, and its exit code."""
        began = time.monotonic()
        self.process.terminate()
        try:
            code = self.process.wait(3 * GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return time.monotonic() - began, code


def _resident(pid: int) -> int:
    """Return a process's resident bytes, 0 when it is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _serves(pid: int) -> bool:
    """Whether a process is one of several that answer."""
    with suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids


@dataclass
class Result:
    """What came of an attack.

    Attributes:
        answers: how many of a status, by the attack's kind; 0 for no answer.
        overload: the sentences of 503 with Retry-After, and how often an attacker read them.
        faults: 5xx that no overload explains: the request's kind and number, and the answer.
        honest: what honest clients saw meanwhile.
        memory: before, and after.
        course: what was held after so many requests.
    """

    answers: dict[str, Counter[int]] = field(default_factory=dict)
    overload: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    honest: Seen = field(default_factory=Seen)
    memory: tuple[Memory, Memory] = (Memory(0, 0), Memory(0, 0))
    course: list[tuple[int, Memory]] = field(default_factory=list)
    seconds: float = 0.0


class Attack:
    """Attackers and honest clients at one server.

    Args:
        server: under attack.
        generator: of requests.
        sound: an image that is in the index.
        first: number of the first request.
        searches: the honest clients' requests; by default with that image, and with a vector.
        proxy: through which they all go; None: straight to the server.
    """

    def __init__(
        self,
        server: Server,
        generator: Generator,
        sound: bytes,
        first: int = 0,
        searches: list[bytes] | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        self._server, self._proxy = server, proxy
        self._port = server.port if proxy is None else proxy.port
        self._addresses = _ATTACKERS if proxy is None else _PROXY_ATTACKERS
        self._generator = generator
        self._searches = searches or [post(form(sound, "3"), FORM), vector()]
        self._lock = threading.Lock()
        self._next = first
        self._stop = threading.Event()
        self.result = Result()

    def run(self, requests: int, threads: int) -> Result:
        """Send so many requests, so many at a time, and return what came of it."""
        result, began, before = self.result, time.monotonic(), self._server.memory()
        first = self._next
        behind = {}
        if self._proxy is not None:
            behind = {"pause": _PROXY_PAUSE, "certificate": str(self._proxy.certificate)}
        honest = HonestClients(self._port, self._searches, DEADLINE, **behind)
        attackers = [
            threading.Thread(target=self._attack, args=(n, first + requests))
            for n in range(threads)
        ]
        watch = threading.Thread(target=self._watch, args=(first, requests))
        for thread in (watch, *attackers):  # starting the last takes as long as many requests
            thread.start()
        for thread in attackers:
            thread.join()
        self._stop.set()
        watch.join()
        result.honest = honest.stop()
        result.seconds = time.monotonic() - began
        time.sleep(5.0)
        result.memory = (before, self._server.memory())
        return result

    def _watch(self, first: int, requests: int) -> None:
        """Note what the server holds, until the attack ends."""
        with tqdm(total=requests, unit="req", disable=None) as bar:
            while not self._stop.wait(0.1):
                begun = min(requests, self._next - first)
                self.result.course.append((begun, self._server.memory()))
                bar.update(begun - bar.n)

    def stop(self) -> None:
        """Begin no further request."""
        self._stop.set()

    def _attack(self, thread: int, last: int) -> None:
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
            if number >= last or self._stop.is_set():
                return
            request = self._generator.make(number)
            answer = None
            source = thread if self._proxy is None else number
            with suppress(OSError):
                answer = request.send(self._port, f"127.0.0.{2 + source % self._addresses}")
            with self._lock:
                status = answer.status if answer is not None else 0
                self.result.answers.setdefault(request.kind, Counter())[status] += 1
                if answer is not None and status >= 500:
                    self._judge(f"{request.kind}, number {number}", answer)

    def _judge(self, name: str, answer: Answer) -> None:
        if answer.status == 503 and "retry-after" in answer.headers:
            self.result.overload[answer.error] += 1
        # the proxy's own: an unknown transfer coding (501), an unknown HTTP version (505)
        elif self._proxy is None or answer.status not in (501, 505):
            self.result.faults.append(f"{name}: {answer.status} {answer.body[:200]!r}")


def ends(
    index: Path, log: Path, generator: Generator, sound: bytes, count: int, seed: int
) -> list[float]:
    """Start a server, attack it, and end it at a random moment, so many times; return the seconds
    each end took.
    """
    took, chance = [], random.Random(seed)
    for turn in range(count):
        server = Server.start(index, log)
        attack = Attack(server, generator, sound, turn * 1000)
        thread = threading.Thread(target=attack.run, args=(1000, 24), daemon=True)
        thread.start()
        time.sleep(chance.uniform(0, 4))
        took.append(server.end()[0])
        attack.stop()
        thread.join(60)
    return took


def prepare(folder: Path) -> tuple[Path, bytes]:
    """Make an index of 200 digits; return its path and one of its images."""
    from retrieval.serving.index.index import create_index

    makers.write_digits(folder / "photos", 200)
    create_index(
        folder / "i", makers.make_bundle(folder / "bundle"), [folder / "photos"], progress=False
    )
    return folder / "i", (folder / "photos" / "3" / "0003.png").read_bytes()


def report(
    result: Result, took: list[float], log: int, requests: int, slow: SlowClients | None = None
) -> str:
    """Return what came of it, for people."""
    before, after = result.memory
    seen = result.honest
    honest = sorted(seen.answered) or [0.0]
    statuses = sorted({status for counts in result.answers.values() for status in counts})
    lines = [
        "# An attack on the server",
        "",
        (
            f"`tests/attack/attack.py`: {requests:,} generated requests in {result.seconds:.0f} s"
            f" from {_PROXY_ATTACKERS if slow else _ATTACKERS} addresses, while two honest clients"
            " of another address searched."
            f" {platform.machine()}, {os.cpu_count()} cores shared with other work, Python"
            f" {platform.python_version()}."
        ),
        "",
        f"- 5xx without an overload to explain it: {len(result.faults)}",
        (
            f"- honest searches: {len(seen.answered):,} answered as before (median"
            f" {honest[len(honest) // 2] * 1000:.0f} ms, 99th percentile"
            f" {honest[int(len(honest) * 0.99)] * 1000:.0f} ms, longest {honest[-1]:.2f} s),"
            f" {sum(seen.refused.values())} told to come again, {len(seen.wrong)} wrong,"
            f" {len(seen.late)} beyond the deadline of {DEADLINE:g} s"
        ),
        (
            f"- memory of the server and its processes: {before.total / 1e6:,.0f} MB before,"
            f" {after.total / 1e6:,.0f} MB after"
        ),
        f"- lines in the log: {log:,}",
    ]
    if slow is not None:
        closed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(slow.closed.items()))
        lines.append(
            f"- all through nginx with deploy/nginx.conf, beside {_IDLE:,} idle connections and"
            f" {_DRIPPING:,} that sent a byte a second, {slow.most:,} open at a time at the most;"
            f" the proxy closed {closed or 'none'}, and each was opened again"
        )
    if took:
        lines.append(
            f"- SIGTERM at {len(took)} random moments of further attacks: gone after"
            f" {min(took):.1f} to {max(took):.1f} s; {GRACE:g} are promised"
        )
    lines += [
        "",
        *_memory(result),
        "",
        "| kind | " + " | ".join(str(s) if s else "none read" for s in statuses) + " |",
    ]
    lines.append("| --- |" + " --- |" * len(statuses))
    for kind, counts in sorted(result.answers.items()):
        lines.append(f"| {kind} | " + " | ".join(str(counts[s] or "") for s in statuses) + " |")
    lines += ["", "503 that attackers were given, all with `Retry-After`:", ""]
    lines += [f"- {count} × {sentence}" for sentence, count in result.overload.most_common()] or [
        "- none"
    ]
    for title, texts in (("Faults", result.faults), ("Wrong", seen.wrong), ("Late", seen.late)):
        if texts:
            lines += ["", f"{title}:", "", *(f"- {text}" for text in texts[:20])]
    return "\n".join(lines) + "\n"


def _memory(result: Result) -> list[str]:
    """Return who held how many megabytes, in the course of the attack."""
    begun = [number for number, _ in result.course]
    tenths = [result.course[bisect_left(begun, begun[-1] * tenth // 10)] for tenth in range(1, 11)]
    rows = [(f"{number:,} requests", held) for number, held in tenths]
    most = max((held for _, held in result.course), key=lambda held: held.total)
    before, after = result.memory
    rows = [("none", before), *rows, ("most", most), ("5 s after the end", after)]
    lines = [
        f"Resident megabytes, after {_WARM:,} such requests that are not counted:",
        "",
        "| after | server's own | processes that decode | together |",
        "| --- | --- | --- | --- |",
    ]
    for name, held in rows:
        lines.append(
            f"| {name} | {held.server / 1e6:.0f} | {held.decoders / 1e6:.0f} |"
            f" {held.total / 1e6:.0f} |"
        )
    return lines


def write(page: Path, text: str, measured: dict[str, Any]) -> None:
    """Write a page, and what was measured beside it, into `raw/`."""

    def plain(value: Any) -> Any:
        if not isinstance(value, Seen):
            return vars(value)
        longest = sorted(value.answered) or [0.0]
        percentiles = {p: longest[(len(longest) - 1) * p // 100] for p in (0, 25, 50, 75, 99, 100)}
        return {**vars(value), "answered": len(value.answered), "seconds": percentiles}

    raw = page.parent / "raw" / f"{page.stem}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    head = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(["python", *sys.argv])}
    measured_as_text = json.dumps({**head, **measured}, indent=1, default=plain)
    raw.write_text(measured_as_text + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    """Attack, print the report, and say by the exit code whether the promises were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=48, help="attackers at a time")
    parser.add_argument("--ends", type=int, default=3, help="servers that are ended in the middle")
    parser.add_argument("--proxy", action="store_true", help="through nginx, with slow clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    images = [*worst(options.seed), *damaged(options.seed, 20)]
    with tempfile.TemporaryDirectory() as name:
        index, sound = prepare(Path(name))
        generator = Generator(images, sound, 16, options.seed)
        behind = ["--open", "read", "--proxy-header-from", "127.0.0.1"] if options.proxy else []
        server = Server.start(index, Path(name) / "log", *behind)
        proxy = slow = None
        if options.proxy:
            proxy = Proxy(Path(name) / "proxy", server.port)
            wire.trust(str(proxy.certificate))
            slow = SlowClients(proxy.port, proxy.context, _IDLE, _DRIPPING)
        Attack(server, generator, sound, 10**6, proxy=proxy).run(
            _WARM, options.threads
        )  # every process is started, every pool filled
        result = Attack(server, generator, sound, proxy=proxy).run(
            options.requests, options.threads
        )
        if proxy is not None and slow is not None:
            slow.stop()
            proxy.stop()
            wire.trust(None)
        server.end()
        lines = server.log.read_text().count("\n")
        took = ends(index, Path(name) / "log2", generator, sound, options.ends, options.seed)
    text = report(result, took, lines, options.requests, slow)
    print(text)
    if options.output:
        slow_clients = None if slow is None else {"closed": slow.closed, "most": slow.most}
        measured = {"attack": result, "ends": took, "lines": lines, "slow": slow_clients}
        write(options.output, text, measured)
    kept = (
        not (result.faults or result.honest.wrong or result.honest.late)
        and max(took, default=0) <= GRACE + 0.5
    )
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
