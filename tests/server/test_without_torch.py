"""Index, search and serve without torch, without the extra `serve`, and beside torch."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import create_index, open_index

ROOT = Path(__file__).parents[2]


WORK = textwrap.dedent("""
    import importlib.util, json, sys
    from pathlib import Path
    from retrieval.bundle.bundle import Bundle
    from retrieval.index.index import create_index
    from retrieval.index.index import open_index
    bundle, photos, out, query = map(Path, sys.argv[1:])
    encoded = Bundle.open(bundle).encode_image(query)
    create_index(out, bundle, [photos], backend="hnsw", progress=False)
    with open_index(out) as index:
        hits = index.search(index.bundle.encode_image(query), 3)[0]
    import retrieval_server.app, retrieval_server.server
    assert "torch" not in sys.modules
    plugins = {name.partition(".")[0] for name in sys.modules if name.startswith("retrieval_")}
    assert plugins == {"retrieval_server"} and "retrieval.host.plugins" not in sys.modules
    assert importlib.util.find_spec("torch") is None
    assert importlib.util.find_spec("pytorch_metric_learning") is None
    print(json.dumps([encoded.vector[0].tolist(), [[hit.id, hit.distance] for hit in hits]]))
""")


def clean() -> dict[str, str]:
    """Return the environment without variables that lead to other packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


OFFLINE = ("No matching distribution", "Could not find a version", "NewConnectionError")
OFFLINE += ("Max retries", "ConnectionError")


@pytest.fixture(scope="module")
def light_python(tmp_path_factory):
    """The Python of a virtual environment with only `retrieval[cpu,serve]` of this source tree."""
    folder = tmp_path_factory.mktemp("light")
    source, ignored = folder / "source", shutil.ignore_patterns("__pycache__", "*.egg-info")
    source.mkdir()
    for name in ("retrieval", "plugins"):  # copied, because a build writes beside its sources
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    files = ("setup.cfg", "pyproject.toml", "build_backend.py", "MANIFEST.in")
    for name in (*files, "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, env=clean())
    python = folder / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-compile", f"{source}[cpu,serve]"]
    install = subprocess.run(command, capture_output=True, text=True, env=clean())
    if install.returncode and any(word in install.stderr for word in OFFLINE):
        last = install.stderr.strip().splitlines()[-1]
        pytest.skip(f"the package registry cannot be reached: {last}")
    assert not install.returncode, install.stderr
    return python


@pytest.mark.long
def test_index_search_and_serve_work_without_torch(
    light_python, bundle_path, index_path, photos, served, makers, tmp_path
):
    def run(*words: object) -> str:
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": clean()}
        done = subprocess.run(list(map(str, words)), **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    query, out = photos / "4" / "0004.png", tmp_path / "i"
    lines = run(light_python, "-W", "error", "-c", WORK, bundle_path, photos, out, query)
    vector, hits = json.loads(lines)
    own = Bundle.open(bundle_path, threads=1).encode_image(query).vector[0]
    assert vector == pytest.approx(own.tolist(), abs=1e-6)
    with open_index(index_path, threads=1) as index:
        expected = index.search(index.bundle.encode_image(query), 3)[0]
    assert [key for key, _ in hits] == [hit.id for hit in expected]
    listed = json.loads(run(light_python, "-m", "pip", "list", "--format=json"))
    names = {package["name"].lower() for package in listed}
    assert not {"torch", "transformers"} & names
    assert {"faiss-cpu", "onnxruntime", "starlette", "embedding-retrieval"} <= names
    assert "4/0004.png" in run(light_python.with_name("retrieval"), "search", out, query)
    server = served(out, python=str(light_python))
    answer = server.client.post("/v1/search", files={"image": query.read_bytes()}).json()
    assert answer["results"][0]["key"] == "4/0004.png"
    assert "<title>Image search" in server.client.get("/").text  # the page is in the package
    texts = tmp_path / "texts"
    create_index(texts, makers.add_text(makers.make_bundle(tmp_path / "b")), [photos])
    command = light_python.with_name("retrieval")
    (found,) = json.loads(run(command, "search", texts, "--text", "four", "-k", "1", "--json"))
    assert found["results"][0]["label"] == "4"
    answer = served(texts, python=str(light_python)).client.post(
        "/v1/search", json={"text": "four"}
    )
    assert answer.json()["results"][0]["id"] == found["results"][0]["id"]
    maps = Path(f"/proc/{server.process.pid}/maps")
    assert "libtorch" not in (maps.read_text() if sys.platform == "linux" else "")


def test_serve_without_its_extra_names_the_command_to_install_it(index_path, process):
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'starlette', 'python_multipart'): sys.modules[name] = None\n"
        f"sys.argv = ['retrieval', 'serve', {str(index_path)!r}]\n"
        "from retrieval.cli.app import main\nmain()\n"
    )
    run = process("-c", code)
    assert run.code == 2 and "pip install 'embedding-retrieval[serve]'" in run.err
    assert "Traceback" not in run.err


BESIDE_TORCH = """
import numpy as np
import faiss, faiss.contrib.torch_utils
from retrieval.store.backends import make_backend
rng = np.random.default_rng(0)
x = rng.standard_normal((500, 16)).astype(np.float32)
backend = make_backend("hnsw", {})
backend.build(x, lambda count: None)
distances, rows = backend.search(x[:5], 3)
assert rows[:, 0].tolist() == [0, 1, 2, 3, 4], rows
assert np.allclose(distances[:, 0], 0, atol=1e-3)
"""


def test_faiss_works_after_torch_utils_has_replaced_its_methods(process):
    """pytorch-metric-learning imports that module."""
    done = process("-c", BESIDE_TORCH)
    assert done.code == 0, done.err
