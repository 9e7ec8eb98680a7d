"""The three minutes of docs/feedback.md: its script against a real server finds more each time."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

PAGE = Path(__file__).parents[2] / "docs" / "feedback.md"
CLI = [sys.executable, "-m", "retrieval.cli"]


@pytest.fixture
def folder(tmp_path):
    """A folder with half of the digits as pictures, a folder for each class, as `demo` writes."""
    for row, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        if row % 2:
            file = tmp_path / "demo" / "images" / f"digit {label}" / f"{row:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.reshape(8, 8) * 15).astype(np.uint8)).save(file)
    return tmp_path


def test_the_users_find_more_each_time(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = PAGE.read_text(encoding="utf-8")
    script = re.search(r":caption: users.py\n\n(.*?)```", text, re.S)[1]
    script = script.replace("Random()", "Random(0)").replace(":8000", f":{port}")
    (folder / "users.py").write_text(script, encoding="utf-8")

    def run(*line: str) -> str:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    create = re.search(r"^retrieval (index create digits.index .*)$", text, re.M)[1]
    run(*CLI, *create.split())
    serve = [*CLI, "serve", "digits.index", "--feedback", "--explore", "1", "--port", str(port)]
    with subprocess.Popen(serve, cwd=folder, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                    break
                time.sleep(0.2)
            shares = []
            said = []
            for _ in range(3):
                shares.append(int(run(sys.executable, "users.py").split("%")[0]))
                said.append(run(*CLI, "learn", "digits.index"))
                # The server looks for a trial once a second.
                time.sleep(2)
            shares.append(int(run(sys.executable, "users.py").split("%")[0]))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    assert "is on trial" in said[0]
    assert "switched" in said[1]
    assert shares[0] + 5 < shares[1] < shares[-1], "a trial shows half of the better hits"
    assert shares[-1] > shares[0] + 15
