"""No telemetry: a search opens no connection and leaves nothing in the home folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STRACE = shutil.which("strace")


def run(home: Path, command: list[object], **more: str) -> str:
    """Run a command with its own home folder, without the tests' setting of telemetry."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    env.pop("ORT_DISABLE_TELEMETRY", None)
    env |= {"HOME": str(home), "OMP_NUM_THREADS": "1"} | more
    options = {"check": True, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(list(map(str, command)), cwd=home.parent, env=env, **options).stdout


def test_a_search_opens_no_connection_and_writes_nothing_into_the_home_folder(
    index_path, photos, tmp_path
):
    home, trace = tmp_path / "home", tmp_path / "trace"
    home.mkdir()
    query = next((photos / "3").glob("*.png"))
    traced = [STRACE, "-f", "-qq", "-e", "trace=network", "-o", trace] if STRACE else []
    run(home, [*traced, sys.executable, "-m", "retrieval.cli", "search", index_path, query])
    assert not list(home.rglob("*"))
    if traced:
        assert "AF_INET" not in trace.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    ("module", "setting", "stays"),
    [("retrieval", "0", "0"), ("retrieval", None, "1"), ("retrieval_core", None, "1")],
)
def test_telemetry_is_off_unless_the_user_has_set_it(module, setting, stays, tmp_path):
    loaded = "'onnxruntime' in sys.modules"
    code = f"import sys, os, {module}; print({loaded}, os.environ['ORT_DISABLE_TELEMETRY'])"
    more = {} if setting is None else {"ORT_DISABLE_TELEMETRY": setting}
    assert run(tmp_path, [sys.executable, "-c", code], **more).split() == ["False", stays]
