"""Read the blocks, files and commands of the pages, and run them as a reader would."""

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trained_weights import retrieval

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block, the name of the file to save it as (if any), and the line before it."""

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
    text, blocks = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.M)
        language, start = match["head"].strip(), text[: match.start()].rstrip()
        before = start.splitlines()[-1] if start else ""
        # README names a file in the line before, because GitHub shows no captions.
        named = re.search(r"`([\w.]+)`:$", before)
        if language.startswith("{code-block}"):
            language = language.split()[1]
            if caption := re.match(r":caption: (\S+)\n\n", body):
                named, body = caption, body[caption.end() :]
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, language, named and named[1], before, body))
    return blocks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `page`, `python_block`, `toml_block` and `command` by what the pages contain."""
    blocks = [block for page in PAGES for block in read_blocks(page)]
    lines = {line: f"{b}: {line}" for b in blocks for line in command_lines(b.body)}
    values: dict[str, dict[Any, str]] = {"page": {page: page.name for page in PAGES}}
    for language in ("python", "toml"):
        values[f"{language}_block"] = {b: str(b) for b in blocks if b.language == language}
    for name, ids in (values | {"command": lines}).items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(ids), ids=list(ids.values()))


def command_lines(text: str) -> Iterator[str]:
    """Yield the arguments of each line that calls `retrieval`, also through a launcher."""
    launched = r"^\s*(?:(?:accelerate|torchrun) .*-m retrieval\.cli|retrieval) (\S.*)$"
    yield from re.findall(launched, text, re.M)


class Reader:
    """Follows a page in a folder: saves its files, and runs its code and commands.

    Attributes:
        photos: folder of the photos of a copied index.
        answers: the JSON answers of the last block of commands.
        ran: all commands so far.
    """

    def __init__(self, folder: Path, photos: Path | None = None) -> None:
        self.folder = folder
        self.photos = photos
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
            code = compile(self._here(block.body), str(block), "exec")
            exec(code, {"__name__": "__main__"})
        elif block.language == "sh":
            self.answers = []
            for line in block.body.splitlines():
                self._line(line, str(block))
        elif block.language == "json" and self.answers:
            shown = [shape(document) for document in documents(block.body)]
            assert shown == [shape(answer) for answer in self.answers], f"{block}: {self.answers}"

    def _here(self, text: str) -> str:
        """Return a text with the address of the server that runs."""
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}") if self.server else text

    def _line(self, line: str, where: str) -> None:
        self.ran.append(line)
        line = self._here(line)
        words = shlex.split(line)
        if words[:2] == ["retrieval", "serve"]:
            self._serve(words[1:])
        elif words[0] == "retrieval":
            self.call(words[1:], where)
        elif words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] in ("curl", "mkdir") or "sha256sum" in words:
            options = {"shell": True, "capture_output": True, "text": True, "timeout": 60}
            done = subprocess.run(line, **options)
            assert done.returncode == 0, f"{where}: {done.stderr}"
            if done.stdout.startswith(("{", "[")):  # /metrics is text
                self.answers.append(json.loads(done.stdout))
        else:
            raise AssertionError(f"{where}: this test does not know how to run '{line}'")

    def call(self, arguments: list[str], where: str) -> str:
        """Run the command line in this process; it must succeed."""
        done = retrieval(*arguments)
        message = f"{where}: retrieval {shlex.join(arguments)}\n{done.output}{done.exception!r}"
        assert done.exit_code == 0, message
        return str(done.output)

    def _serve(self, arguments: list[str]) -> None:
        self.close()
        photos = ["--images", str(self.photos)] if self.photos and "--images" in arguments else []
        line = [sys.executable, "-m", "retrieval.cli", *arguments, *photos]
        line += ["--port", str(self.port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env)
        address = re.match(r"Serving .*:(\d+)/", self.server.stdout.readline())
        self.port = int(address[1])
        url = f"http://127.0.0.1:{self.port}/readyz"
        ready = ["curl", "-sSf", "--retry", "50", "--retry-delay", "1", "--retry-connrefused", url]
        subprocess.run(ready, check=True, timeout=120)

    def close(self) -> None:
        """Stop the server, as an operator would."""
        if self.server is not None:
            self.server.terminate()
            self.server.communicate(timeout=30)
            assert self.server.returncode == 0
            self.server = None


def documents(text: str) -> Iterator[Any]:
    """Yield the JSON documents in a text."""
    while text := text.strip():
        document, end = json.JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


def shape(value: Any) -> Any:
    """Return the keys and types of an answer, and the sentence of an error."""
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
    with contextlib.closing(Reader(tmp_path)) as reader:
        yield reader


@pytest.fixture(scope="session")
def tutorial(tmp_path_factory, isolated):
    """A reader who has followed the whole tutorial."""
    if shutil.which("curl") is None:
        pytest.skip("the pages use curl, which is not installed")
    with contextlib.closing(Reader(tmp_path_factory.mktemp("tutorial"))) as reader:
        reader.follow(ROOT / "docs" / "tutorial.md")
    return reader


@pytest.fixture
def after_tutorial(tutorial, tmp_path):
    """A reader in a copy of the tutorial's folder."""
    folder = tmp_path / "copy"
    shutil.copytree(tutorial.folder, folder)
    with contextlib.closing(Reader(folder, tutorial.folder)) as reader:
        yield reader
