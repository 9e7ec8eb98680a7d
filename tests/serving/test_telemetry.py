"""No telemetry: a search opens no connection and leaves nothing in the home folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STRACE = shutil.which("strace")


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's environment, with a home of its own and nothing said about telemetry."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("XDG_") and k != "ORT_DISABLE_TELEMETRY"
    }
    return kept | {"HOME": str(home), "OMP_NUM_THREADS": "1"} | more


def test_a_search_calls_nobody_and_leaves_the_home_folder_alone(index_path, photos, tmp_path):
    home, trace = tmp_path / "home", tmp_path / "trace"
    home.mkdir()
    query = next((photos / "3").glob("*.png"))
    traced = [STRACE, "-f", "-qq", "-e", "trace=network", "-o", str(trace)] if STRACE else []
    subprocess.run(
        [*traced, sys.executable, "-m", "retrieval.cli", "search", index_path, query],
        cwd=tmp_path,
        env=environment(home),
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert not list(home.rglob("*"))
    if traced:
        assert "AF_INET" not in trace.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    ("module", "setting", "stays"),
    [("retrieval", "0", "0"), ("retrieval", None, "1"), ("retrieval_core", None, "1")],
)
def test_every_module_turns_it_off_unless_the_user_has_said_otherwise(
    module, setting, stays, tmp_path
):
    code = (
        f"import sys, os, {module}; print('onnxruntime' in sys.modules,"
        " os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    more = {} if setting is None else {"ORT_DISABLE_TELEMETRY": setting}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path, **more),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["False", stays]
