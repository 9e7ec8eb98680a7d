"""The commands on the page of indexes run in order, and print what the page shows."""

import contextlib
import io
import re
import shlex
from pathlib import Path

VARIES = re.compile(
    r"\d+\.\d+|\b[0-9a-f]{64}\b|\b[0-9a-f]{16}\b|(?<=bytes: )[\d,]+|(?<=transactions: )\d+|^…$",
    re.M,
)
"""Text that differs between machines: times, sizes, distances, hashes, names of files, and `…` for
lines that the page leaves out.
"""


def same(shown: str, printed: str) -> bool:
    """Return whether a page shows the output that was printed, apart from `VARIES`."""
    parts = [re.escape(part) for part in VARIES.split(shown)]
    tokens = [r"(?s:.*)" if token == "…" else r"[0-9a-f.,]+" for token in VARIES.findall(shown)]
    pattern = "".join(part + token for part, token in zip(parts, [*tokens, ""], strict=True))
    return re.fullmatch(pattern, printed) is not None


def test_indexes_shows_what_its_commands_print(after_tutorial, root, blocks):
    printed, compared = "", 0
    with contextlib.chdir(after_tutorial.folder):
        for block in blocks(root / "docs" / "indexes.md"):
            if block.before.startswith("<!-- not run"):
                continue
            if block.language == "sh":
                lines = [shlex.split(line)[1:] for line in block.body.splitlines()]
                printed = "".join(after_tutorial.call(words, str(block)) for words in lines)
            elif block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.body, str(block), "exec"), {})
                printed = out.getvalue()
            elif block.file:
                after_tutorial.do(block)
            elif not block.body.startswith("gallery.index/"):  # a tree of files
                assert same(block.body, printed), f"{block}:\n{block.body}\n{printed}"
                compared += 1
        names = {path.name for path in Path("gallery.index").iterdir()}
    names -= {"items.sqlite-wal", "items.sqlite-shm"}
    assert names == {"index.json", "items.sqlite", "acknowledged", "arrays", "bundles"}
    assert compared == 16
