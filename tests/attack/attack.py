"""Attack a server of one's own while honest clients search it; say what each got and what is left.

    python tests/attack/attack.py --requests 20000 --processes 2 --output attack.json
    python tests/attack/attack.py --requests 20000 --proxy

The server is a real one in a process of its own on 127.0.0.1; the attackers' and the honest
clients' addresses differ (127.0.0.2 … and 127.0.0.1), as they do outside. It has two indexes, keys,
snapshots and a record of changes. Honest clients search one index; attackers, most of whom have a
key that may do everything to the other, send what `hostile_writes` makes. The exit code is 1 when a
promise was broken. With `--proxy` all of them go through nginx with deploy's configuration and TLS,
attackers from 240 addresses so that its rates let their requests through, beside idle connections
and ones that send a byte a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]  # its neighbours

import makers  # noqa: E402
import wire  # noqa: E402
from honest import HonestClients, Seen  # noqa: E402
from hostile_images import damaged, worst  # noqa: E402
from hostile_requests import Generator  # noqa: E402
from hostile_writes import WritingGenerator  # noqa: E402
from proxy import Proxy, SlowClients  # noqa: E402
from wire import FORM, Answer, ask, form, get, post, vector  # noqa: E402

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
    """

    answers: dict[str, Counter[int]] = field(default_factory=dict)
    overload: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    honest: Seen = field(default_factory=Seen)
    memory: tuple[Memory, Memory] = (Memory(0, 0), Memory(0, 0))
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
        for thread in attackers:
            thread.start()
        for thread in attackers:
            thread.join()
        result.honest = honest.stop()
        result.seconds = time.monotonic() - began
        time.sleep(5.0)
        result.memory = (before, self._server.memory())
        return result

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


class Held(NamedTuple):
    """What a server holds.

    Attributes:
        resident: bytes of its own processes and of those that decode.
        descriptors: that its own processes have open.
        connections: to the record of an index, among these; each is two of them.
        threads: of its own processes.
        decoders: processes.
        temporary: files below its temporary folder.
        files: of the index that is written to.
        bytes: of these files.
        log: bytes of the record's write-ahead log, among these.
        free: bytes of the record's pages that hold nothing.
    """

    resident: int
    descriptors: int
    connections: int
    threads: int
    decoders: int
    temporary: int
    files: int
    bytes: int
    log: int
    free: int


class Attacked:
    """A server with two indexes of digits, of which one is for attackers; everything of it is below
    one folder.

    Args:
        folder: an empty one.
        options: of `serve` besides.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        from retrieval.serving.http.keys import add_key, new_key
        from retrieval.serving.index.index import create_index

        makers.write_digits(folder / "photos", 200)
        bundle = makers.make_bundle(folder / "bundle")
        self.sound = (folder / "photos" / "3" / "0003.png").read_bytes()
        self.index, self.temporary = folder / f"{OPEN}.index", folder / "temporary"
        for path in (self.index, folder / f"{STILL}.index"):
            create_index(path, bundle, [folder / "photos"], progress=False)
        for name in ("temporary", "snapshots"):
            (folder / name).mkdir()
        self.snapshots, self.audit = folder / "snapshots", folder / "audit.jsonl"
        reply: dict[str, str] = {}
        for role in ("read", "write", "admin"):
            reply[role], kept = new_key(role, role, (OPEN,))
            add_key(folder / "keys", kept)
        honest, kept = new_key("honest", "read", (STILL,))
        add_key(folder / "keys", kept)
        self._honest = f"Authorization: Bearer {honest}"
        self.keys: dict[str, str | None] = {role: f"Bearer {key}" for role, key in reply.items()}
        self.keys |= {
            "none": None,
            "wrong": "Bearer rk_x",
            "twice": f"Bearer {reply['read']}\r\nAuthorization: Bearer {reply['read']}",
            "long": "Bearer " + "x" * 9000,
            "odd": "Basic \xff\xfe",
        }
        self.server = Server.start(
            self.index,
            folder / "log",
            f"{STILL}={folder / f'{STILL}.index'}",
            "--keys",
            str(folder / "keys"),
            "--audit",
            str(self.audit),
            "--snapshots",
            str(self.snapshots),
            *options,
            TMPDIR=str(self.temporary),
        )

    def searches(self) -> list[bytes]:
        """Return the honest clients' requests."""
        path = f"POST /v1/indexes/{STILL}/search HTTP/1.1".encode()
        plain = [
            post(form(self.sound, "3"), FORM, self._honest),
            post(
                json.dumps({"vector": [0.25] * 16, "k": 3}).encode(),
                "application/json",
                self._honest,
            ),
        ]
        return [entry.replace(b"POST /v1/search HTTP/1.1", path, 1) for entry in plain]

    def attack(
        self, generator: WritingGenerator, first: int = 0, proxy: Proxy | None = None
    ) -> Attack:
        """Return an attack on it."""
        return Attack(self.server, generator, self.sound, first, self.searches(), proxy)

    def put_back(self) -> None:
        """Leave the open index with the items that it had: none that attackers brought."""
        key = f"Authorization: {self.keys['admin']}"
        request = post(json.dumps({"all": True}).encode(), "application/json", key)
        request = request.replace(b"/v1/search", f"/v1/indexes/{OPEN}/delete".encode(), 1)
        assert ask(self.server.port, request, 30.0).status == 200

    def held(self) -> Held:
        """Return what it holds now."""
        own, decoders = self.server.processes()
        opened = [str(element.readlink()) for pid in own for element in _there(f"/proc/{pid}/fd")]
        sizes = {path.name: path.stat().st_size for path in self.index.rglob("*") if path.is_file()}
        with closing(
            sqlite3.connect(f"file:{self.index}/items.sqlite?mode=ro", uri=True)
        ) as record:
            free = record.execute(
                "select freelist_count * page_size from pragma_freelist_count, pragma_page_size"
            ).fetchone()
        return Held(
            self.server.memory().total,
            len(opened),
            sum(name.endswith("/items.sqlite-wal") for name in opened),
            sum(len(_there(f"/proc/{pid}/task")) for pid in own),
            len(decoders),
            sum(path.is_file() for path in self.temporary.rglob("*")),
            len(sizes),
            sum(sizes.values()),
            sizes.get("items.sqlite-wal", 0),
            free[0],
        )

    def bombs(self, images: dict[str, bytes]) -> dict[str, float]:
        """Return the seconds until each bomb was answered, by its name.

        One that costs seconds of a decoder is refused, or decoded within its decoder's deadline.
        """
        key, took = f"Authorization: {self.keys['write']}", dict[str, float]()
        for name in BOMBS:
            request = post(form(images[name]), FORM, key).replace(
                b"/v1/search", f"/v1/indexes/{OPEN}/search".encode(), 1
            )
            began = time.perf_counter()
            status = ask(self.server.port, request).status
            took[name] = time.perf_counter() - began
            assert status in (200, 413, 422) and took[name] < DEADLINE, (name, status, took[name])
        return took

    def whole(self) -> list[str]:
        """End it; return what is wrong with the indexes, snapshots and record of changes."""
        began = time.monotonic()
        self.server.process.send_signal(signal.SIGTERM)
        code, faults = self.server.process.wait(30), []
        if (took := time.monotonic() - began) > GRACE + 0.5:
            faults.append(f"the server took {took:.1f} s to end after SIGTERM")
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()
        if code:
            faults.append(f"the server ended with {code}")
        copies = [path for path in self.snapshots.iterdir() if not path.name.startswith(".")]
        for path in (self.index, self.index.with_name(f"{STILL}.index"), *copies[:5]):
            done = subprocess.run(
                [sys.executable, "-m", "retrieval.cli", "index", "check", str(path)],
                capture_output=True,
                text=True,
                cwd=path.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if done.returncode:
                faults.append(f"{path.name}: {done.stderr}")
        lines = [json.loads(line) for line in self.audit.read_text(encoding="utf-8").splitlines()]
        begun = {line["request"] for line in lines if line["outcome"] == "begun"}
        ended = {line["request"] for line in lines if line["outcome"] != "begun"}
        if begun != ended or {line["index"] for line in lines} - {OPEN}:
            faults.append(f"the record of changes: {len(begun)} begun, {len(ended)} ended")
        return faults


def _there(folder: str) -> list[Path]:
    """Return what is in a folder of /proc; of a process that has ended, nothing."""
    with suppress(OSError):
        return list(Path(folder).iterdir())
    return []


def ends(index: Path, log: Path, generator: Generator, sound: bytes, count: int) -> list[float]:
    """Start a server, attack it, and end it at a random moment, so many times; return the seconds
    each end took.
    """
    took, chance = [], random.Random(0)
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


def report(result: Result, **more: Any) -> str:
    """Return what came of an attack, as JSON."""
    seen, (before, after) = result.honest, result.memory
    took = sorted(seen.answered) or [0.0]
    shares = {f"{share} %": took[(len(took) - 1) * share // 100] for share in (50, 99, 100)}
    honest = {"answered": len(took), "seconds": shares, "refused": seen.refused}
    content = {
        "faults": result.faults[:20],
        "honest": {**honest, "wrong": seen.wrong[:20], "late": seen.late[:20]},
        "resident": {"before": before.total, "after": after.total},
        "answers": result.answers,
        "overload": result.overload,
        "seconds": result.seconds,
        **more,
    }
    return json.dumps(content, indent=1)


def run(
    processes: int, images: list[tuple[str, bytes]], options: argparse.Namespace
) -> tuple[str, bool]:
    """Attack a server of so many processes; return what came of it, and whether the promises were
    kept.
    """
    with tempfile.TemporaryDirectory() as name:
        behind = ["--proxy-header-from", "127.0.0.1"] if options.proxy else []
        attacked = Attacked(Path(name), "--processes", str(processes), *behind)
        generator = WritingGenerator(images, attacked.sound, 16, attacked.keys, OPEN, options.seed)
        bombs = attacked.bombs(dict(images))
        proxy = slow = None
        if options.proxy:
            proxy = Proxy(Path(name) / "proxy", attacked.server.port)
            slow = SlowClients(proxy.port, proxy.context, _IDLE, _DRIPPING)
        wire.trust(None if proxy is None else str(proxy.certificate))
        attacked.attack(generator, 10**6, proxy).run(_WARM, options.threads)  # all are started
        wire.trust(None)
        attacked.put_back()
        time.sleep(40)
        left, serving = {"before": attacked.held()}, attacked.server.processes()[0]
        attack = attacked.attack(generator, 0, proxy)
        wire.trust(None if proxy is None else str(proxy.certificate))
        result = attack.run(options.requests, options.threads)
        wire.trust(None)
        if proxy is not None and slow is not None:
            slow.stop()
            proxy.stop()
        left["at the end"] = attacked.held()
        attacked.put_back()
        time.sleep(40)
        left["40 s later"] = attacked.held()
        ready = ask(attacked.server.port, get("/readyz")).status
        ended = set(serving) - set(attacked.server.processes()[0])
        faults = attacked.whole() + ([] if ready == 200 else [f"/readyz: {ready}"])
        faults += [f"{len(ended)} processes that serve have ended"] if ended else []
        log = Path(name) / "log of ends"
        took = ends(attacked.index, log, generator, attacked.sound, options.ends)
        faults += [f"an end took {seconds:.1f} s" for seconds in took if seconds > GRACE + 0.5]
        held = {moment: entry._asdict() for moment, entry in left.items()}
        slow_clients = None if slow is None else {"closed": slow.closed, "most": slow.most}
        more = {"processes": processes, "held": held, "broken": faults, "ends": took}
        text = report(result, **more, bombs=bombs, slow=slow_clients)
    return text, not (faults or result.faults or result.honest.wrong or result.honest.late)


def main() -> None:
    """Attack, print the report, and say by the exit code whether the promises were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1, help="of the server")
    parser.add_argument("--threads", type=int, default=48, help="attackers at a time")
    parser.add_argument("--ends", type=int, default=3, help="servers that are ended in the middle")
    parser.add_argument("--proxy", action="store_true", help="through nginx, with slow clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    images = [*worst(options.seed), *damaged(options.seed, 20)]
    text, kept = run(options.processes, images, options)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
