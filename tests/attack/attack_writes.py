"""Attack a server that takes changes: several indexes, keys, snapshots, a record of changes; say
what each got, and what is left.

    python tests/attack/attack_writes.py --requests 20000 --processes 2 --output attack.md
    python tests/attack/attack_writes.py --requests 20000 --processes 2 --proxy # through nginx

Honest clients search one index all the while, and attackers, most of whom have a key that may do
everything to the other, send what `hostile_writes` makes. Its exit code is 1 when a promise was
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]  # its neighbours

import makers  # noqa: E402
import wire  # noqa: E402
from hostile_images import damaged, worst  # noqa: E402
from hostile_writes import WritingGenerator  # noqa: E402
from proxy import Proxy, SlowClients  # noqa: E402
from wire import FORM, ask, form, get, post  # noqa: E402

from attack import (  # noqa: E402
    _DRIPPING,
    _IDLE,
    _WARM,
    DEADLINE,
    GRACE,
    Attack,
    Result,
    Server,
    report,
    write,
)

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
_TRIES = 20


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

    def bombs(self, images: dict[str, bytes]) -> dict[str, list[float]]:
        """Return the seconds until each bomb was answered, tried several times, by its name.

        One that costs seconds of a decoder is refused, or decoded within its decoder's deadline.
        """
        key, took = f"Authorization: {self.keys['write']}", dict[str, list[float]]()
        for name in BOMBS:
            request = post(form(images[name]), FORM, key).replace(
                b"/v1/search", f"/v1/indexes/{OPEN}/search".encode(), 1
            )
            for _ in range(_TRIES):
                began = time.perf_counter()
                status = ask(self.server.port, request).status
                took.setdefault(name, []).append(time.perf_counter() - began)
                assert status in (200, 413, 422) and took[name][-1] < DEADLINE, (
                    name,
                    status,
                    took[name],
                )
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


def text_of(
    result: Result,
    processes: int,
    requests: int,
    lines: int,
    left: dict[str, Held],
    faults: list[str],
    changes: int,
    slow: SlowClients | None = None,
) -> str:
    """Return what came of it, for people."""
    text = report(result, [], lines, requests, slow).replace(
        "tests/attack/attack.py", "tests/attack/attack_writes.py"
    )
    text = text.replace(
        "while two honest clients",
        "half of them with a key that may do everything to the index that they attack, while two"
        " honest clients",
    )
    text = text.replace(
        "# An attack on the server", f"## A server of {processes} process{'es' * (processes > 1)}"
    )
    rows = [
        "",
        "### What is left",
        "",
        (
            f"The server had two indexes, keys, snapshots and a record of changes ({changes:,}"
            " lines of it); attackers wrote to one index, honest clients searched the other."
            " Afterwards all items were deleted and the index was left alone for 40 s."
        ),
        "",
        (
            "Descriptors are of the server's own processes; a connection to the record takes two of"
            " them, and an index keeps up to 16 for the next searches. The write-ahead log is used"
            " again from its beginning when it has 16 MB; free pages are used by the next items,"
            " and given back by `retrieval index compact`."
        ),
        "",
        (
            "| | resident MB | descriptors | connections to records | threads | processes that"
            " decode | temporary files | files of the index | their MB | of these the log | free"
            " pages, MB |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in left.items():
        rows.append(
            f"| {name} | {entry.resident / 1e6:.0f} | {entry.descriptors} | {entry.connections} |"
            f" {entry.threads} | {entry.decoders} | {entry.temporary} | {entry.files} |"
            f" {entry.bytes / 1e6:.1f} | {entry.log / 1e6:.1f} | {entry.free / 1e6:.1f} |"
        )
    rows += [
        "",
        f"Wrong with processes, indexes, snapshots or the record afterwards: {len(faults)}",
        *(f"- {entry}" for entry in faults),
    ]
    return text + "\n".join(rows) + "\n"


def bombs_of(bombs: dict[str, list[float]]) -> str:
    """Return how soon each bomb was refused, for people."""
    rows = [
        "## Bombs",
        "",
        (
            f"Milliseconds from the connection to the refusal, {_TRIES} times each, one after the"
            " other; the upload is in it, and of the 10 MB it is most:"
        ),
        "",
        "| | MB | least | half | longest |",
        "| --- | --- | --- | --- | --- |",
    ]
    sizes = {name: len(content) for name, content in worst(0)}
    for name, took in bombs.items():
        inside = sorted(took)
        least, half, most = (
            1000 * entry for entry in (inside[0], inside[len(inside) // 2], inside[-1])
        )
        rows.append(f"| {name} | {sizes[name] / 1e6:.3g} | {least:.1f} | {half:.1f} | {most:.1f} |")
    return "\n".join(rows) + "\n"


def run(
    processes: int, images: list[tuple[str, bytes]], options: argparse.Namespace
) -> tuple[str, bool, dict[str, list[float]], dict[str, Any]]:
    """Attack a server of so many processes; return what came of it, whether the promises were kept,
    the bombs' seconds, and what was measured.
    """
    with tempfile.TemporaryDirectory() as name:
        behind = ["--proxy-header-from", "127.0.0.1"] if options.proxy else []
        attacked = Attacked(Path(name), "--processes", str(processes), *behind)
        generator = WritingGenerator(images, attacked.sound, 16, attacked.keys, OPEN, options.seed)
        bombs = attacked.bombs(dict(images))
        if options.bombs:
            attacked.server.end()
            return "", True, bombs, {}
        proxy = slow = None
        if options.proxy:
            proxy = Proxy(Path(name) / "proxy", attacked.server.port)
            wire.trust(str(proxy.certificate))
            slow = SlowClients(proxy.port, proxy.context, _IDLE, _DRIPPING)
        warming = attacked.attack(generator, 10**6, proxy)
        warming.run(_WARM, options.threads)  # every process is started
        wire.trust(None)
        attacked.put_back()
        time.sleep(40)
        left, serving = {"before": attacked.held()}, attacked.server.processes()[0]
        attack = attacked.attack(generator, 0, proxy)
        wire.trust(None if proxy is None else str(proxy.certificate))
        timer = threading.Timer(60 * options.minutes, attack.stop)
        timer.daemon = True
        timer.start()
        result = attack.run(options.requests, options.threads)
        timer.cancel()
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
        lines = attacked.server.log.read_text().count("\n")
        changes = attacked.audit.read_text(encoding="utf-8").count("\n")
    sent = sum(sum(entry.values()) for entry in result.answers.values())
    kept = not (faults or result.faults or result.honest.wrong or result.honest.late)
    measured = {"processes": processes, "attack": result, "lines": lines, "changes": changes}
    measured |= {"held": left, "faults": faults}
    if slow is not None:
        measured["slow"] = {"closed": slow.closed, "most": slow.most}
    text = text_of(result, processes, sent, lines, left, faults, changes, slow)
    return text, kept, bombs, measured


def main() -> None:
    """Attack, print the report, and say by the exit code whether the promises were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        help="of the server; several times: one attack after the other",
    )
    parser.add_argument("--threads", type=int, default=48, help="attackers at a time")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="after which no further request is begun"
    )
    parser.add_argument("--proxy", action="store_true", help="through nginx, with slow clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bombs", action="store_true", help="only time their refusal")
    options = parser.parse_args()
    images = [*worst(options.seed), *damaged(options.seed, 20)]
    parts, whole, bombs = ["# An attack on the server\n"], True, dict[str, list[float]]()
    attacks: list[dict[str, Any]] = []
    for processes in options.processes or [1]:
        load = os.getloadavg()[0]
        text, kept, took, measured = run(processes, images, options)
        attacks.append(measured)
        bombs, whole = bombs or took, whole and kept
        parts.append(
            f"{text}\nLoad average: {load:.1f} when it began, {os.getloadavg()[0]:.1f} when it"
            " ended.\n"
            if text
            else ""
        )
        print(parts[-1], flush=True)
    page = "\n".join([part for part in parts if part] + [bombs_of(bombs)])
    print(bombs_of(bombs))
    if options.output:
        write(options.output, page, {"attacks": attacks, "bombs": bombs})
    raise SystemExit(0 if whole else 1)


if __name__ == "__main__":
    main()
