"""setup.cfg lists every package, data file and entry point; plugins' names load on first use."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path

import pytest
from retrieval.base.runtime import FAISS, ONNXRUNTIME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def folders() -> dict[str, Path]:
    """Return the folder of every package by its import name."""
    packages = {}
    for root in (ROOT, ROOT / "plugins"):
        for init in root.glob("retrieval*/**/__init__.py"):
            packages[".".join(init.parent.relative_to(root).parts)] = init.parent
    return packages


def test_setup_lists_every_package(config):
    listed = config["options"]["packages"].split()
    assert len(listed) == len(set(listed)) and set(listed) == set(folders())


def test_no_module_lies_outside_a_package():
    packages = set(folders().values())
    for root in (ROOT / "retrieval", ROOT / "plugins"):
        assert {path.parent for path in root.rglob("*.py")} <= packages


def test_every_data_file_is_package_data(config):
    patterns = [p.strip() for p in config["options.package_data"]["*"].split(",")]
    for folder in folders().values():
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(fnmatch(path.name, pattern) for pattern in patterns), path


def test_every_template_of_a_new_plugin_is_package_data(config):
    patterns = [p.strip() for p in config["options.package_data"]["retrieval.host"].split(",")]
    home = ROOT / "retrieval" / "host"
    files = [p.relative_to(home) for p in (home / "scaffolds").rglob("*") if p.is_file()]
    assert len(files) > 20
    for path in files:
        assert any(path.match(pattern) for pattern in patterns), path


def test_every_package_is_marked_as_typed(config):
    for name, folder in folders().items():
        assert "." in name or (folder / "py.typed").is_file(), name


def test_every_plugin_has_an_entry_point_that_imports(config):
    lines = config["options.entry_points"]["retrieval"].strip().splitlines()
    points = dict(line.split(" = ") for line in lines)
    for name, module in points.items():
        assert module in (f"retrieval_{name}", f"retrieval_engines.{name}")
        assert importlib.import_module(module)
    plugins = {name for name in folders() if name.startswith("retrieval_") and "." not in name}
    # MTEB takes an encoder of a class, so that its package needs no hook
    assert {module.partition(".")[0] for module in points.values()} == plugins - {"retrieval_mteb"}
    installed = distribution("embedding-retrieval").entry_points.select(group="retrieval")
    assert {e.name: e.value for e in installed} == points, "run pip install -e . again"
    script = config["options.entry_points"]["console_scripts"].split(" = ")[1].strip()
    module, _, function = script.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_no_extra_installs_two_builds_of_one_library(config):
    extras = config["options.extras_require"]
    for extra in extras:
        names = {re.split(r"[>\[]", line)[0] for line in extras[extra].split()}
        assert len(names & set(FAISS)) <= 1 and len(names & set(ONNXRUNTIME)) <= 1
    assert {"faiss-cpu", "onnxruntime"} <= {line.split(">=")[0] for line in extras["cpu"].split()}
    base = config["options"]["install_requires"]
    assert not any(word in base for word in ("torch", "faiss", "onnx", "scikit"))


def test_the_extra_gpu_resolves_to_one_cuda_version():
    """After a change of the extra, run: python tests/host/resolve_gpu.py."""
    script = runpy.run_path(str(Path(__file__).with_name("resolve_gpu.py")))
    kept = json.loads(script["KEPT"].read_text(encoding="utf-8"))
    assert kept["wanted"] == script["wanted"]()
    assert kept["cuda"] == "13" and {"torch", "faiss-gpu-cuvs"} <= set(kept["versions"])
    package = {"name": "a-cu12", "version": "1", "requires_dist": ["cuda-toolkit<14,>=13.2"]}
    assert [*script["majors"](package)] == ["12", "13"]


INITS = (ROOT / "plugins").glob("*/__init__.py")
LAZY = [path.parent.name for path in INITS if " = lazy(" in path.read_text("utf-8")]


def exported(plugin: str) -> set[tuple[str, str]]:
    """Return the exported names that a plugin's `__init__.py` imports, with their modules."""
    path = ROOT / "plugins" / plugin / "__init__.py"
    return {
        (str(node.module), name.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retrieval_")
        for name in node.names
        if name.asname == name.name  # it is exported
    }


@pytest.mark.parametrize("plugin", LAZY)
def test_lazy_names_match_those_for_type_checkers(plugin):
    package = importlib.import_module(plugin)
    unloaded = set(package.__dir__()) - set(vars(package))
    partly = plugin in ("retrieval_core", "retrieval_sets")  # these export only some names
    assert partly or unloaded <= {name for _, name in exported(plugin)}
    values = {name: getattr(package, name) for name in dir(package)}
    loads = {(getattr(value, "__module__", None), name) for name, value in values.items()}
    loads = {(home, name) for home, name in loads if str(home).startswith(f"{package.__name__}.")}
    assert exported(plugin) <= loads if partly else loads == exported(plugin)
    assert loads
    for home, name in loads:
        assert values[name] is getattr(importlib.import_module(home), name)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what a distribution is built from."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("retrieval", "plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    files = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "build_backend.py", "README.md")
    for name in (*files, "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def done(*command, cwd, **env):
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


USER = """
import retrieval

reveal_type(retrieval.load("runs/photos"))
reveal_type(retrieval.Run.open("runs/photos"))
reveal_type(retrieval.Index.open("photos.index"))
retrieval.train(1)
"""
# other libraries are large, and their types are not the question here
OTHERS = "numpy torch pydantic PIL sklearn pytorch_metric_learning accelerate onnx"
MYPY = f"""
[mypy]
follow_imports = silent
[mypy-{",".join(f"{name}.*" for name in OTHERS.split())}]
follow_imports = skip
"""


def test_an_editable_install_has_types_and_exposes_only_packages(source, tmp_path):
    """mypy finds the package from a file elsewhere; setuptools' import hook would hide it."""
    pytest.importorskip("pip")
    here = Path(importlib.import_module("setuptools").__file__).parents[1]
    done(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{here}\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    done(*pip, "--no-build-isolation", "--no-index", "-e", ".", cwd=source)

    links = Path((packages / "embedding_retrieval-0.1.0.pth").read_text().strip())
    names = {name for name in folders() if "." not in name}
    assert {link.name for link in links.iterdir()} == names
    script = "import retrieval, retrieval_core; print(retrieval.__file__, retrieval_core.__file__)"
    files = done(python, "-I", "-c", script, cwd=tmp_path).split()
    expected = [source / "retrieval", source / "plugins" / "retrieval_core"]
    assert [Path(file).resolve().parent for file in files] == expected

    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(MYPY)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    checked = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    revealed = re.findall(r'Revealed type is "(.*)"', checked.stdout)
    encoders = "retrieval.export.export_backbone.BackboneEncoder | "
    encoders += "retrieval.bundle.encoder.BundleEncoder"
    assert revealed[0] == f"retrieval.training.train.Run | {encoders}"
    assert revealed[1] == "retrieval.training.train.Run"
    assert revealed[2] == "retrieval.index.index.Index"
    errors = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1 and 'Argument 1 to "train"' in errors[0]


def test_the_wheel_and_the_source_distribution_hold_all_files(source, tmp_path):
    for kind in ("wheel", "sdist"):
        script = f"import sys, build_backend; build_backend.build_{kind}(sys.argv[1])"
        done(sys.executable, "-c", script, tmp_path, cwd=source, PYTHONPATH=str(source))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(source / "plugins" if "plugins" in path.parts else source).as_posix()
        for folder in ("retrieval", "plugins")
        for path in (source / folder).rglob("*")
        if path.is_file() and not path.is_relative_to(source / "plugins" / "build")
    }
    files = {name for name in files if ".egg-info/" not in name and "__pycache__" not in name}
    assert packed == files
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"build_backend.py", "pyproject.toml", "setup.cfg", "retrieval/__init__.py"} <= names
    assert "plugins/retrieval_core/__init__.py" in names
