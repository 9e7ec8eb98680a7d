"""Print the lowest versions that setup.cfg allows, as pip's constraints: `python .ci/lowest.py cpu
serve train`.
"""

import configparser
import re
import sys
from pathlib import Path

setup = configparser.ConfigParser()
setup.read(Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")
lists = [
    setup["options"]["install_requires"],
    *(setup["options.extras_require"][extra] for extra in sys.argv[1:]),
]
for line in "\n".join(lists).split("\n"):
    if line.strip():
        found = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)( *;.*)?", line.strip())
        if found is None:
            raise SystemExit(f"setup.cfg: '{line}' names no lowest version as NAME>=VERSION.")
        name, version, marker = found.groups()
        print(f"{name}=={version}{marker or ''}")
