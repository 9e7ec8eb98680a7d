"""The serving side in an environment that has no torch, and the direction of imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


WORK = textwrap.dedent("""
    import importlib.util, json, sys
    from pathlib import Path
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.index.index import create_index
    from retrieval.serving.index.index import open_index
    bundle, photos, out, query = map(Path, sys.argv[1:])
    encoded = Bundle.open(bundle).encode_image(query)
    create_index(out, bundle, [photos], backend="hnsw", progress=False)
    with open_index(out) as index:
        hits = index.search(index.bundle.encode_image(query), 3)[0]
    import retrieval.serving.http.app, retrieval.serving.http.server
    assert "torch" not in sys.modules
    assert not any(name.startswith(("retrieval_", "retrieval.host.plugins")) for name in sys.modules)
    assert importlib.util.find_spec("torch") is None
    assert importlib.util.find_spec("pytorch_metric_learning") is None
    print(json.dumps([encoded.vector[0].tolist(), [[hit.id, hit.distance] for hit in hits]]))
""")  # noqa: E501


@pytest.fixture(scope="module")
def light_python(tmp_path_factory) -> Path:
    """A virtual environment with `retrieval[cpu,serve]` from this source tree, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    source = folder / "source"
    source.mkdir()
    for name in ("retrieval", "plugins"):  # a copy, since building writes beside what it builds
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    subprocess.run(
        [sys.executable, "-m", "venv", str(folder / "venv")], check=True, env=environment
    )
    python = folder / "venv" / "bin" / "python"
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    install = subprocess.run(
        [*command, f"{source}[cpu,serve]"], capture_output=True, text=True, env=environment
    )
    if install.returncode:
        offline = (
            "No matching distribution",
            "Could not find a version",
            "NewConnectionError",
            "Max retries",
            "ConnectionError",
        )
        if any(word in install.stderr for word in offline):
            pytest.skip(
                f"the package registry cannot be reached: {install.stderr.strip().splitlines()[-1]}"
            )
        pytest.fail(install.stderr)
    return python


@pytest.mark.long
def test_everything_works_without_torch(
    light_python, bundle_path, index_path, photos, served, tmp_path, capfd
):
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.index.index import open_index

    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    query = photos / "4" / "0004.png"
    out = tmp_path / "i"
    command = [
        str(light_python),
        "-W",
        "error",
        "-c",
        WORK,
        str(bundle_path),
        str(photos),
        str(out),
        str(query),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    vector, hits = json.loads(run.stdout)
    assert vector == pytest.approx(
        Bundle.open(bundle_path, threads=1).encode_image(query).vector[0].tolist(), abs=1e-6
    )
    with open_index(index_path, threads=1) as index:
        expected = index.search(index.bundle.encode_image(query), 3)[0]
    assert [key for key, _ in hits] == [hit.id for hit in expected]
    listed = subprocess.run(
        [str(light_python), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "torch" not in names
    assert {"faiss-cpu", "onnxruntime", "starlette", "embedding-retrieval"} <= names

    program = light_python.with_name("retrieval")
    found = subprocess.run(
        [str(program), "search", str(out), str(query)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert found.returncode == 0, found.stderr
    assert "4/0004.png" in found.stdout
    server = served(out, python=str(light_python))
    answer = server.client.post("/v1/search", files={"image": query.read_bytes()}).json()
    assert answer["results"][0]["key"] == "4/0004.png"
    assert "<title>Image search" in server.client.get("/").text  # the page is in the package
    lines = Path(f"/proc/{server.process.pid}/maps").read_text() if sys.platform == "linux" else ""
    assert "libtorch" not in lines


def test_a_server_without_its_extra_says_what_to_install(index_path, tmp_path):
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'starlette', 'python_multipart'): sys.modules[name] = None\n"
        f"sys.argv = ['retrieval', 'serve', {str(index_path)!r}]\n"
        "from retrieval.cli.app import main\nmain()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert "pip install 'embedding-retrieval[serve]'" in run.stderr
    assert "Traceback" not in run.stderr
