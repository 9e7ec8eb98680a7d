"""Progress of long work: a bar on a terminal, a log line every ten seconds elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

from retrieval.base import progress
from retrieval.base.progress import Meter

ROOT = Path(__file__).parents[2]


def test_a_log_gets_a_line_every_ten_seconds(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Meter("encoding", 12_000, "images", done=2_000) as meter:
        for _ in range(100):
            now[0] += 1.0
            meter.update(100, loss="0.5")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\r" not in err and len(lines) == 10
    # The 2,000 images of an earlier run do not count in the speed.
    first = "encoding: 3000 of 12000 images (25 %), 100.00 images/s, 01:30 left, loss 0.5"
    assert lines[0] == first
    assert lines[-1].startswith("encoding: 12000 of 12000 images (100 %), 100.00 images/s, 00:00")


def test_progress_works_without_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Meter("encoding", 3, "images") as meter:
        meter.update(3)


def test_a_terminal_shows_a_bar_and_wipes_it():
    code = """
import time
from retrieval.base.progress import Meter
with Meter("encoding", 20, "images") as meter:
    for i in range(20):
        time.sleep(0.06)
        meter.update()
        if i == 15:
            meter.say("a note")
"""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    running = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=theirs)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # Linux raises it when the other end is closed
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    assert running.wait(60) == 0
    text = seen.decode()
    assert re.search(r"encoding: +\d+%\|", text) and "a note\r\n" in text
    assert text.rsplit("\r", 2)[-2].strip() == ""  # the bar is wiped


def test_no_other_module_draws_a_bar():
    files = [*(ROOT / "retrieval").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    imports = re.compile(r"^\s*(from|import) tqdm", re.MULTILINE)
    users = [path for path in files if imports.search(path.read_text(encoding="utf-8"))]
    assert users == [ROOT / "retrieval/base/progress.py"]


def test_a_notebook_shows_a_bar(monkeypatch, capsys):
    """A Jupyter kernel without ipywidgets, told by its shell, as tqdm tells it."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "_DELAY", 0)
    with Meter("encoding", 40, "images") as meter:
        for _ in range(4):
            meter.update(10)
        meter.reach(41, 42, "writing")
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("\rencoding:   0%|") and "\n" not in err
    shell.config = {}  # IPython in a terminal or a script
    with Meter("encoding", 40, "images") as meter:
        meter.update(10)
    assert capsys.readouterr() == ("", "")
