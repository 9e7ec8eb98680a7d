"""Attack a server while honest clients search it; report the answers and the memory used.

    python tests/attack/attack.py --requests 20000 --processes 2 --output benchmarks/results
    python tests/attack/attack.py --requests 20000 --proxy --output benchmarks/results

The server is real and has its own process, two indexes, keys, snapshots and a record of changes.
Honest clients search one index from the address 127.0.0.1. Attackers send the requests of
`hostile_writes` from 127.0.0.2 and further addresses; most have an admin key of the other index.
With `--proxy`, all requests go through nginx with TLS and the configuration of `deploy/`, beside
idle connections and connections that send a byte a second. The attackers then have 240 addresses,
because nginx limits the rate of each. The exit code is 1 if a promise was broken. `--output` names
a folder for the page attack.md or attack_proxy.md and its raw/*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
sys.path.append(str(HERE.parents[1] / "benchmarks"))

import makers  # noqa: E402
import wire  # noqa: E402
from honest import HonestClients, Seen  # noqa: E402
from hostile_images import damaged, worst  # noqa: E402
from hostile_requests import Generator, named  # noqa: E402
from hostile_writes import WritingGenerator  # noqa: E402
from proxy import Proxy, SlowClients  # noqa: E402
from wire import FORM, Answer, ask, form, get, post  # noqa: E402

from bench import commit, finish, markdown, page  # noqa: E402

DEADLINE = 8.0  # seconds: the server's own default
GRACE = 10.0
OPEN, STILL = "open", "still"
BOMBS = (
    "png: 169 megapixels",
    "png: text that grows",
    "png: a colour profile that grows",
    "png: many texts that grow",
    "gif: a huge canvas",
    "jpeg: 20,000 scans in 200 KB",
    "bmp: a header of 4 GB",
)
_WARM = 1000  # requests before the memory is first measured
_ATTACKERS = 8  # addresses
_PROXY_ATTACKERS = 240  # addresses; the proxy accepts 20 requests a second from each
_PAUSE, _PROXY_PAUSE = 0.02, 0.15  # seconds between the searches of an honest client
_IDLE, _DRIPPING = 1000, 200  # connections
_CALM = 40.0  # seconds until a server has returned free memory


class Held(NamedTuple):
    """Resources of a server.

    Attributes:
        resident: memory of all its processes, in bytes.
        descriptors: number of their open files and sockets.
        threads: number of their threads.
        temporary: number of files below its temporary folder.
        bytes: size of the attacked index.
    """

    resident: int
    descriptors: int
    threads: int
    temporary: int
    bytes: int


class Server:
    """`retrieval serve` in its own process, which logs to a file."""

    def __init__(self, index: Path, log: Path, *options: str, **environment: str) -> None:
        words = ["retrieval.cli", "serve", str(index), "--port", "0", *options]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=index.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.split("/ ")[0].rpartition(":")[2])
        wire.until(lambda: ask(self.port, get("/readyz")).status == 200)

    def processes(self) -> list[int]:
        """Return the ids of the server's process and of all its descendants."""
        pids, todo = list[int](), [self.process.pid]
        while todo:
            pids.append(todo.pop())
            todo += children(pids[-1])
        return pids

    def resident(self) -> int:
        """Return the memory of all processes of the server, in bytes."""
        return sum(map(_resident, self.processes()))

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
    """Return a process's resident bytes, or 0 if it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    pids: list[int] = []
    for task in _entries(f"/proc/{pid}/task"):
        with suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def _entries(folder: str) -> list[Path]:
    """Return the entries of a folder of /proc, or none if its process has ended."""
    with suppress(OSError):
        return list(Path(folder).iterdir())
    return []


@dataclass
class Result:
    """Result of an attack.

    Attributes:
        answers: number of answers by kind of request and status; 0 means no answer.
        overload: number of answers 503 with Retry-After, by sentence.
        faults: other 5xx answers, with the request's kind and number.
        honest: answers to honest clients.
        resident: memory of the server before and after, in bytes.
        seconds: duration.
    """

    answers: dict[str, Counter[int]] = field(default_factory=dict)
    overload: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    honest: Seen = field(default_factory=Seen)
    resident: tuple[int, int] = (0, 0)
    seconds: float = 0.0


class Attack:
    """Attackers and honest clients of one server.

    Args:
        server: the server.
        generator: makes the attackers' requests.
        searches: requests of the honest clients.
        first: number of the attackers' first request.
        proxy: proxy for all requests, or `None`.
    """

    def __init__(
        self,
        server: Server,
        generator: Generator,
        searches: list[bytes],
        first: int = 0,
        proxy: Proxy | None = None,
    ) -> None:
        self._server, self._proxy = server, proxy
        self._port = server.port if proxy is None else proxy.port
        self._addresses = _ATTACKERS if proxy is None else _PROXY_ATTACKERS
        self._generator, self._searches, self._next = generator, searches, first
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.result = Result()

    def run(self, requests: int, threads: int) -> Result:
        """Send a number of requests from several threads."""
        result, began, before = self.result, time.monotonic(), self._server.resident()
        last, pause = self._next + requests, _PAUSE if self._proxy is None else _PROXY_PAUSE
        certificate = None if self._proxy is None else str(self._proxy.certificate)
        wire.trust(certificate)
        honest = HonestClients(self._port, self._searches, DEADLINE, certificate, pause=pause)
        attackers = [
            threading.Thread(target=self._attack, args=(number, last)) for number in range(threads)
        ]
        for thread in attackers:
            thread.start()
        for thread in attackers:
            thread.join()
        result.honest = honest.stop()
        wire.trust(None)
        result.seconds = time.monotonic() - began
        time.sleep(5.0)
        result.resident = (before, self._server.resident())
        return result

    def stop(self) -> None:
        """Let the attackers send no further requests."""
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
        # nginx answers 501 to an unknown transfer coding, and 505 to an unknown HTTP version.
        elif self._proxy is None or answer.status not in (501, 505):
            self.result.faults.append(f"{name}: {answer.status} {answer.body[:200]!r}")


class Attacked:
    """A server with two indexes of digits, one of them for attackers.

    Args:
        folder: empty folder for all files of the server.
        options: further options of `serve`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        from retrieval.index.index import Index

        from retrieval_server.keys import add_key, new_key

        makers.write_digits(folder / "photos", 200)
        bundle = makers.make_bundle(folder / "bundle")
        self.sound = (folder / "photos" / "3" / "0003.png").read_bytes()
        self.index, self.still = folder / f"{OPEN}.index", folder / f"{STILL}.index"
        for path in (self.index, self.still):
            photos = [folder / "photos"]
            with Index.create(path, photos, model=bundle, progress=False) as index:
                index.calibrate(progress=False)
        self.snapshots, self.audit = folder / "snapshots", folder / "audit.jsonl"
        self.temporary, self.log = folder / "temporary", folder / "log"
        for path in (self.temporary, self.snapshots):
            path.mkdir()
        headers: dict[str, str] = {}
        roles = [("read", OPEN), ("write", OPEN), ("admin", OPEN), ("read", STILL)]
        for name, (role, index) in zip(("read", "write", "admin", "honest"), roles, strict=True):
            key, kept = new_key(name, role, (index,))
            add_key(folder / "keys", kept)
            headers[name] = f"Bearer {key}"
        self._honest = f"Authorization: {headers.pop('honest')}"
        self.keys: dict[str, str | None] = {
            **headers,
            "none": None,
            "wrong": "Bearer rk_x",
            "twice": f"{headers['read']}\r\nAuthorization: {headers['read']}",
            "long": "Bearer " + "x" * 9000,
            "odd": "Basic \xff\xfe",
        }
        settings = {"keys": folder / "keys", "audit": self.audit, "snapshots": self.snapshots}
        words = [word for name, path in settings.items() for word in (f"--{name}", str(path))]
        words = [f"{STILL}={self.still}", "--feedback", *words, *options]
        self.server = Server(self.index, self.log, *words, TMPDIR=str(self.temporary))

    def attack(self, generator: Generator, first: int = 0, proxy: Proxy | None = None) -> Attack:
        """Return an attack on this server."""
        vector = json.dumps({"vector": [0.25] * 16, "k": 3}).encode()
        plain = [
            post(form(self.sound, "3"), FORM, self._honest),
            post(vector, "application/json", self._honest),
        ]
        searches = [named("POST", f"/v1/indexes/{STILL}/search", search) for search in plain]
        return Attack(self.server, generator, searches, first, proxy)

    def empty(self) -> None:
        """Delete all items of the attacked index."""
        key = f"Authorization: {self.keys['admin']}"
        request = post(b'{"filter": {"exists": "id"}}', "application/json", key)
        request = named("POST", f"/v1/indexes/{OPEN}/delete", request)
        assert ask(self.server.port, request, 30.0).status == 200

    def held(self) -> Held:
        """Measure the server's resources."""
        pids = self.server.processes()
        return Held(
            self.server.resident(),
            *(sum(len(_entries(f"/proc/{pid}/{kind}")) for pid in pids) for kind in ("fd", "task")),
            sum(path.is_file() for path in self.temporary.rglob("*")),
            sum(path.stat().st_size for path in self.index.rglob("*") if path.is_file()),
        )

    def bombs(self, images: dict[str, bytes]) -> dict[str, float]:
        """Return the seconds until each bomb was answered, by its name.

        Each must be refused, or decoded within the deadline.
        """
        key, took = f"Authorization: {self.keys['write']}", dict[str, float]()
        for name in BOMBS:
            request = post(form(images[name]), FORM, key)
            began = time.perf_counter()
            answer = ask(self.server.port, named("POST", f"/v1/indexes/{OPEN}/search", request))
            took[name] = time.perf_counter() - began
            assert answer.status in (200, 413, 422) and took[name] < DEADLINE, (name, answer)
        return took

    def end(self, longest: float = GRACE + 0.5) -> list[str]:
        """End the server; return the faults of its end, indexes, snapshots and changes."""
        from retrieval.errors import StoreError
        from retrieval.feedback.feedback_record import FEEDBACK_FILE, FeedbackRecord

        took, code = self.server.end()
        faults = [f"the server took {took:.1f} s to end"] if took > longest else []
        faults += [f"the server ended with {code}"] if code else []
        copies = [path for path in self.snapshots.iterdir() if not path.name.startswith(".")]
        for path in (self.index, self.still, *copies[:5]):
            check = [sys.executable, "-m", "retrieval.cli", "index", "check", str(path)]
            done = subprocess.run(check, capture_output=True, text=True, cwd=path.parent)
            faults += [f"{path.name}: {done.stderr}"] if done.returncode else []
        try:
            with FeedbackRecord.open(self.index / FEEDBACK_FILE) as record:
                record.judged()
        except StoreError as error:
            faults.append(str(error))
        lines = [json.loads(line) for line in self.audit.read_text(encoding="utf-8").splitlines()]
        begun = {line["request"] for line in lines if line["outcome"] == "begun"}
        ended = {line["request"] for line in lines if line["outcome"] != "begun"}
        if begun != ended or {line["index"] for line in lines} - {OPEN}:
            faults.append(f"the record of changes: {len(begun)} begun, {len(ended)} ended")
        return faults


def ends(attacked: Attacked, generator: Generator, count: int) -> list[float]:
    """Start, attack and end several servers at random moments; return the seconds of each end."""
    took, chance = [], random.Random(0)
    searches = [post(form(attacked.sound, "3"), FORM), wire.vector()]
    for turn in range(count):
        server = Server(attacked.index, attacked.log)
        attack = Attack(server, generator, searches, turn * 1000)
        thread = threading.Thread(target=attack.run, args=(1000, 24), daemon=True)
        thread.start()
        time.sleep(chance.uniform(0, 4))
        took.append(server.end()[0])
        attack.stop()
        thread.join(60)
    return took


def report(result: Result, **more: Any) -> str:
    """Return an attack's result as JSON."""
    took = sorted(result.honest.answered) or [0.0]
    shares = {f"{share} %": took[(len(took) - 1) * share // 100] for share in (50, 99, 100)}
    answered = {"answered": len(result.honest.answered), "seconds": shares}
    honest = vars(result.honest) | answered
    return json.dumps({"commit": commit(), **vars(result), "honest": honest, **more}, indent=1)


def render(raw: dict[str, Any]) -> str:
    """Return the page of an attack from its report."""
    honest, held = raw["honest"], raw["held"]
    seconds = " s, ".join(f"{share}: {took:.2f}" for share, took in honest["seconds"].items())
    statuses = sorted({status for counts in raw["answers"].values() for status in counts})
    table = [
        [kind, *(str(counts.get(status, "")) for status in statuses)]
        for kind, counts in sorted(raw["answers"].items())
    ]
    head = ["moment", "resident MB", "file descriptors", "threads", "temporary files"]
    columns = "resident", "descriptors", "threads", "temporary"
    memory = [
        [moment, f"{facts['resident'] / 1e6:.0f}", *(f"{facts[name]:,}" for name in columns[1:])]
        for moment, facts in held.items()
    ]
    requests = sum(sum(counts.values()) for counts in raw["answers"].values())
    return page(f"""
        # An attack on the server

        `{raw["command"]}`: {requests:,} hostile requests in {raw["seconds"]:.0f} s, while honest
        clients of another address searched.

        - promises broken: {len(raw["broken"]) + len(raw["faults"])}
        - honest searches: {honest["answered"]:,} answered rightly ({seconds} s),
        {len(honest["wrong"])} wrong, {len(honest["late"])} late
        - seconds until a server ended during an attack:
        {", ".join(f"{took:.1f}" for took in raw["ends"])}
        - slow clients of the proxy, by what they sent: {raw["slow"] or "none"}

        {markdown(head, memory)}

        Answers by kind of request; 0 stands for none, as many requests are cut off:

        {markdown(["kind", *statuses], table)}
    """)


def run(options: argparse.Namespace) -> bool:
    """Attack a server, print and write the report, and return whether the promises were kept."""
    images = [*worst(options.seed), *damaged(options.seed, 20)]
    with tempfile.TemporaryDirectory() as name:
        behind = ["--proxy-header-from", "127.0.0.1"] if options.proxy else []
        attacked = Attacked(Path(name), "--processes", str(options.processes), *behind)
        generator = WritingGenerator(images, attacked.sound, 16, attacked.keys, OPEN, options.seed)
        bombs = attacked.bombs(dict(images))
        proxy = slow = None
        if options.proxy:
            proxy = Proxy(Path(name) / "proxy", attacked.server.port)
            slow = SlowClients(proxy.port, proxy.context, _IDLE, _DRIPPING)
        attacked.attack(generator, 10**6, proxy).run(_WARM, options.threads)
        attacked.empty()
        time.sleep(_CALM)
        held, serving = {"before": attacked.held()}, children(attacked.server.process.pid)
        result = attacked.attack(generator, 0, proxy).run(options.requests, options.threads)
        if proxy is not None and slow is not None:
            slow.stop()
            proxy.stop()
        held["at the end"] = attacked.held()
        attacked.empty()
        time.sleep(_CALM)
        held["later"] = attacked.held()
        ready = ask(attacked.server.port, get("/readyz")).status
        ended = set(serving) - set(children(attacked.server.process.pid))
        faults = attacked.end() + ([] if ready == 200 else [f"/readyz: {ready}"])
        faults += [f"processes that serve have ended: {ended}"] if ended else []
        took = ends(attacked, generator, options.ends)
        faults += [f"an end took {seconds:.1f} s" for seconds in took if seconds > GRACE + 0.5]
        more = {moment: entry._asdict() for moment, entry in held.items()}
        slow_clients = None if slow is None else {"closed": slow.closed, "most": slow.most}
        text = report(result, held=more, broken=faults, ends=took, bombs=bombs, slow=slow_clients)
    print(text)
    if options.output:
        command = "python tests/attack/attack.py " + " ".join(sys.argv[1:])
        raw = {"command": command, **json.loads(text)}
        name = "attack_proxy" if options.proxy else "attack"
        finish(name, raw, render(raw), folder=options.output)
    return not (faults or result.faults or result.honest.wrong or result.honest.late)


def main() -> None:
    """Attack, print the report, and exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1, help="processes of the server")
    parser.add_argument("--threads", type=int, default=48, help="concurrent attackers")
    parser.add_argument("--ends", type=int, default=3, help="servers to end during an attack")
    parser.add_argument("--proxy", action="store_true", help="through nginx, with slow clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of results")
    raise SystemExit(0 if run(parser.parse_args()) else 1)


if __name__ == "__main__":
    main()
