"""`retrieval` forked from a process that has loaded what a server loads: half of a start's time."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOADED = """
import json, os, sys
import retrieval_server.server
from retrieval.cli.app import main
from retrieval.base.runtime import load_faiss, load_onnxruntime
load_faiss(), load_onnxruntime()
for line in sys.stdin:
    message = json.loads(line)
    if "ended" in message:
        pid, status = os.waitpid(message["ended"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    ends = [os.open(path, os.O_WRONLY) for path in message["ends"]]
    if not (pid := os.fork()):
        break
    for end in ends:
        os.close(end)
    print(pid, flush=True)
else:
    sys.exit()
os.chdir(message["folder"])
os.environ.clear()
os.environ.update(message["environment"])
for number, end in enumerate([os.open(os.devnull, os.O_RDONLY), *ends]):
    os.dup2(end, number)
    os.close(end)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
sys.argv = ["retrieval", *message["words"]]
main()
"""


class Forker:
    """The process that has loaded it all."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-c", LOADED], env=environment, **pipes)

    def ask(self, **message: Any) -> Any:
        """Send a message, and return the answer."""
        self._process.stdin.write(json.dumps(message, default=str) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._process.communicate()


class Forked:
    """A process as `subprocess.Popen` gives one, of `retrieval` and some words."""

    def __init__(self, forker: Forker, words: list[str], folder: Path, environment: dict) -> None:
        self._forker, self.returncode = forker, None
        pipes = [os.pipe(), os.pipe()]
        ends = [f"/proc/{os.getpid()}/fd/{write}" for _, write in pipes]
        self.pid = forker.ask(
            ends=ends, words=words, folder=str(folder), environment=dict(environment)
        )
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr = (os.fdopen(read) for read, _ in pipes)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("retrieval", timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            self.wait(timeout)
            return reads[0].result(), reads[1].result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
