"""The build backend: setuptools, but an editable install is a path that type checkers can read.

setuptools would install an import hook, because packages lie in two folders; mypy and editors
cannot follow it. Here the installed `.pth` file names a folder of links to the packages, which
hides the repository's other folders.
"""

import base64
import hashlib
import tempfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import prepare_metadata_for_build_editable

LINKS = Path(".editable")
WHEEL = """Wheel-Version: 1.0
Generator: build_backend
Root-Is-Purelib: true
Tag: py3-none-any
"""


def link_packages() -> None:
    """Link every top-level package that setup.cfg lists."""
    setup = ConfigParser()
    setup.read("setup.cfg", encoding="utf-8")
    LINKS.mkdir(exist_ok=True)
    names = {name for name in setup["options"]["packages"].split() if "." not in name}
    for link in LINKS.iterdir():
        if link.name not in names:
            link.unlink()
    for name in names:
        folder = Path("..") / name if Path(name).is_dir() else Path("..", "plugins", name)
        link = LINKS / name
        if not link.is_symlink():
            link.symlink_to(folder)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Write a wheel with the metadata and a `.pth` file, and return its name (PEP 660)."""
    link_packages()
    with tempfile.TemporaryDirectory() as scratch:
        if metadata_directory is None:
            folder = prepare_metadata_for_build_editable(scratch, config_settings)
            metadata_directory = Path(scratch, folder)
        info = Path(metadata_directory)
        stem = info.name.removesuffix(".dist-info")
        files = {
            f"{info.name}/{path.relative_to(info)}": path.read_bytes()
            for path in sorted(info.rglob("*"))
            if path.is_file()
        }
        files[f"{info.name}/WHEEL"] = WHEEL.encode()
        files[f"{stem}.pth"] = f"{LINKS.resolve()}\n".encode()
        record = ""
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record += f"{name},sha256={digest.decode()},{len(content)}\n"
        files[f"{info.name}/RECORD"] = f"{record}{info.name}/RECORD,,\n".encode()
        wheel = f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    return wheel
