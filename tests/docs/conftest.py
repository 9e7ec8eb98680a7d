"""Reads the pages: their blocks, files and commands; and runs them as a reader would."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, the file that it is to be saved as, and the line
    before it.
    """

    page: Path
    line: int
    language: str
    file: str | None
    before: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return a page's fenced blocks in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.M)
        language, file = match["head"].strip(), None
        if language.startswith("{code-block}"):
            language = language.split()[1]
            caption = re.match(r":caption: (\S+)\n\n", body)
            file, body = (caption[1], body[caption.end() :]) if caption else (None, body)
        start = text[: match.start()].rstrip()
        before = start.splitlines()[-1] if start else ""
        named = re.search(r"`([\w.]+)`:$", before)  # README's way: a caption would not show there
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                language,
                file or (named and named[1]) or None,
                before,
                body,
            )
        )
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `page`, `python_block` and `command` every page, block and command line."""
    blocks = [block for page in PAGES for block in read_blocks(page)]
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=lambda page: page.name)
    if "python_block" in metafunc.fixturenames:
        chosen = [block for block in blocks if block.language == "python"]
        metafunc.parametrize("python_block", chosen, ids=str)
    if "toml_block" in metafunc.fixturenames:
        metafunc.parametrize("toml_block", [b for b in blocks if b.language == "toml"], ids=str)
    if "command" in metafunc.fixturenames:
        found = {line: f"{b}: {line}" for b in blocks for line in command_lines(b.body)}
        metafunc.parametrize("command", list(found), ids=list(found.values()))


def command_lines(text: str) -> Iterator[str]:
    """Give the arguments of each line that calls `retrieval`, also through a launcher."""
    for line in text.splitlines():
        found = re.match(
            r"\s*(?:(?:accelerate|torchrun) .*-m retrieval\.cli|retrieval) (\S.*)$", line
        )
        if found:
            yield found[1]


class Reader:
    """Does in a folder what a page says: saves its files, runs its code and commands."""

    def __init__(self, folder: Path, photos: Path | None = None) -> None:
        self.folder = folder
        self.photos = photos  # where the photos of a copied index lie
        self.port = 0
        self.server: subprocess.Popen[str] | None = None
        self.answers: list[Any] = []
        self.ran: list[str] = []

    def follow(self, page: Path) -> None:
        """Go through a page from top to bottom."""
        with contextlib.chdir(self.folder):
            for block in read_blocks(page):
                self.do(block)

    def do(self, block: Block) -> None:
        """Do what one block says."""
        if block.before.startswith("<!-- not run"):
            return
        if block.file:
            (self.folder / block.file).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            body = (
                block.body.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
                if self.server
                else block.body
            )
            exec(compile(body, str(block), "exec"), {"__name__": "__main__"})
        elif block.language == "sh":
            self.answers = []
            for line in block.body.splitlines():
                self._line(line, str(block))
        elif block.language == "json" and self.answers:
            shown = list(documents(block.body))
            assert [shape(x) for x in shown] == [shape(x) for x in self.answers], (
                f"{block}: {self.answers}"
            )

    def _line(self, line: str, where: str) -> None:
        words = shlex.split(line)
        self.ran.append(line)
        if words[:2] == ["retrieval", "serve"]:
            self._serve(words[1:])
        elif words[0] == "retrieval":
            here = f"127.0.0.1:{self.port}"
            self.call([word.replace("127.0.0.1:8000", here) for word in words[1:]], where)
        elif words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] == "curl":
            line = line.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
            done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{where}: {done.stderr}"
            if done.stdout.startswith(("{", "[")):  # /metrics is text
                self.answers.append(json.loads(done.stdout))
        elif words[0] == "mkdir":
            (self.folder / words[1]).mkdir()
        elif "sha256sum" in words:
            assert subprocess.run(line, shell=True).returncode == 0, where
        else:
            raise AssertionError(f"{where}: this test does not know how to run '{line}'")

    def call(self, arguments: list[str], where: str) -> str:
        """Run the command line in this process; it must succeed."""
        from retrieval.cli.app import main

        out, before, code = io.StringIO(), sys.argv, 0
        sys.argv = ["retrieval", *arguments]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                main()
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            out.write(traceback.format_exc())
            code = 1
        finally:
            sys.argv = before
        assert code == 0, f"{where}: retrieval {shlex.join(arguments)}\n{out.getvalue()}"
        return out.getvalue()

    def _serve(self, arguments: list[str]) -> None:
        self.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        if self.photos is not None and "--images" in arguments:
            arguments = [*arguments, "--images", str(self.photos)]
        command = [sys.executable, "-m", "retrieval.cli", *arguments, "--port", str(self.port)]
        self.server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline().startswith("Serving ")
        url = f"http://127.0.0.1:{self.port}/readyz"
        ready = ["curl", "-sSf", "--retry", "50", "--retry-delay", "1", "--retry-connrefused", url]
        done = subprocess.run(ready, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr

    def close(self) -> None:
        """Stop the server, as an operator would."""
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(30) == 0
            assert self.server.stdout is not None
            self.server.stdout.close()
            self.server = None


def documents(text: str) -> Iterator[Any]:
    """Give each of the JSON documents that a text holds, one after the other."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        yield found
        text = text[end:].strip()


def shape(value: Any) -> Any:
    """Return what a page shows of an answer whatever the numbers are: keys, types, an error's
    sentence.
    """
    if isinstance(value, dict):
        return {k: v if k in ("status", "detail") else shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value]
    return type(value).__name__


@pytest.fixture(scope="session")
def root():
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def blocks():
    """`read_blocks`."""
    return read_blocks


@pytest.fixture(scope="session")
def commands_in():
    """`command_lines`, as a list."""
    return lambda text: list(command_lines(text))


@pytest.fixture
def reader(tmp_path):
    """A reader in an empty folder."""
    made = Reader(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tutorial(tmp_path_factory, isolated):
    """A reader who has finished the tutorial."""
    if shutil.which("curl") is None:
        pytest.skip("the pages talk to the server by curl, which is not here")
    made = Reader(tmp_path_factory.mktemp("tutorial"))
    try:
        made.follow(ROOT / "docs" / "tutorial.md")
    finally:
        made.close()
    return made


@pytest.fixture
def after_tutorial(tutorial, tmp_path):
    """A reader in a copy of the folder that the tutorial left, with the server running."""
    folder = tmp_path / "copy"
    shutil.copytree(tutorial.folder, folder)
    made = Reader(folder, tutorial.folder)
    yield made
    made.close()
