"""Fixtures of all tests: isolation from this machine, the command line, plugins to install."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

# Parallel workers compute on one thread each. Libraries read the variable when they are imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs and their child processes ignore Ctrl-C, but tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than cores, because many tests wait for another process."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Run all tests of Milvus in one process, and all tests that follow the tutorial in another.

    The server then starts once, and the tutorial is followed once.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if "/test_milvus" in file:
                return "milvus"
            of_tutorial = ("docs/test_pages.py", "docs/test_indexes.py")
            return "tutorial" if file.endswith(of_tutorial) else file

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """End the tests if SIGTERM or Ctrl-C, which were meant for pytest, stopped a training.

    While it trains, `Trainer` handles both. Without this hook the test would fail, and pytest would
    run the others.
    """
    from retrieval.errors import Interrupted

    try:
        return (yield)
    except Interrupted as error:
        raise KeyboardInterrupt(f"a signal stopped the training of {item.nodeid}") from error


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory):
    """Use a cache folder of this session, and ignore the user's settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RETRIEVAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("RETRIEVAL_ALLOW_PLUGINS", "1")  # the tests write the plugins themselves
        patch.delenv("RETRIEVAL_BLOCK", raising=False)
        yield


@pytest.fixture(scope="session")
def makers():
    """The module tests/helpers/makers.py, which writes bundles and images."""
    import makers as module

    return module


@pytest.fixture(scope="session")
def killed():
    """Run a function in a forked child, which the function must end by SIGKILL.

    A process that has searched with several threads cannot use this: its child would wait for
    threads that a fork does not copy.
    """

    def run(call: Callable[[], object]) -> None:
        if not (child := os.fork()):
            try:
                call()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    return run


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run the command line in this process: `cli("plugins", "list")`."""

    def run(*arguments: str | Path) -> Outcome:
        from retrieval.cli.app import main

        monkeypatch.setattr(sys, "argv", ["retrieval", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        text = capsys.readouterr()
        return Outcome(code, text.out, text.err)

    return run


@pytest.fixture
def mount():
    """Mount a file system until the test ends; skip the test without the permission."""
    folders = []

    def call(folder, *words):
        folder.mkdir()
        line = ["mount", *words, folder]
        if shutil.which("mount") is None or subprocess.run(line, capture_output=True).returncode:
            pytest.skip("nothing may be mounted here")
        folders.append(folder)
        return folder

    yield call
    for folder in folders:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def shown():
    """Compare a new picture with the one in `docs/`: same size, at most 60 KB, and alike.

    RETRIEVAL_PICTURES=write in the environment first replaces the picture in `docs/`, in 64
    colours. `most` is the largest mean difference of two small grey copies. Pictures of search
    results need a larger one, because rounding during training differs between processors; such
    pictures of different queries differ by about 60.
    """
    docs = Path(__file__).parents[1] / "docs"

    def compare(file: Path, name: str, most: float = 12) -> None:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        if os.environ.get("RETRIEVAL_PICTURES") == "write":
            picture.quantize(64).save(docs / name, optimize=True)
        with Image.open(docs / name) as kept:
            assert kept.size == picture.size, (
                f"{name}: write it again, with RETRIEVAL_PICTURES=write pytest"
            )
            # Single points and digits differ between machines; small grey copies hide that.
            small = [
                np.asarray(p.convert("L").resize((64, 64)), dtype=float) for p in (kept, picture)
            ]
        difference = np.abs(small[0] - small[1]).mean()
        assert difference < most, f"{name} differs by {difference:.1f} of 255: write it again"
        assert (docs / name).stat().st_size < 60_000

    return compare


# Chromium must not contact its maker, and must not open a window.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    """Chromium, controlled by playwright; the tests are skipped if either is missing."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """A page in the browser. `faults` has its errors, `asked` the addresses that it requests."""
    context = browser.new_context(viewport={"width": 1180, "height": 900}, offline=False)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.faults.append(message.text))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


@pytest.fixture
def axe():
    """A checker of accessibility."""
    name = "axe_playwright_python.sync_playwright"
    return pytest.importorskip(name, reason="axe is not installed").Axe()


@pytest.fixture
def process():
    """Run Python in a new process: `process("-m", "retrieval.cli", "--help", path=folder)`.

    `path` comes first in the process's module search path.
    """

    def run(
        *arguments: str | Path,
        path: Path | None = None,
        cwd: Path | None = None,
        seconds: float = 120,
        **env: str,
    ) -> Outcome:
        settings = {**os.environ, **env}
        if path is not None:
            settings["PYTHONPATH"] = os.pathsep.join(
                [str(path), os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep)
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="replace",
            env=settings,
            cwd=cwd,
            timeout=seconds,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def install():
    """Write a distribution with a plugin into a folder, as pip would: metadata and one module."""

    def write(
        folder: Path, project: str, plugin: str, module: str, code: str = "", version: str = "1.0"
    ) -> None:
        info = folder / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[retrieval]\n{plugin} = {module}\n")
        (folder / f"{module}.py").write_text(code, encoding="utf-8")

    return write


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Escape names that are not UTF-8 in logs: a process of xdist could not send them."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report
