"""Write each page of the built site as Markdown too, `llms.txt`, which lists them, and the skill.

An extension of Sphinx. `PAGE.html` has its twin `PAGE.md` beside it: the page's source, with
included files, and with signatures and docstrings where the source names objects of the code.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INCLUDE = re.compile(r"^```\{include\} (\S+)\n(?::heading-offset: (\d)\n)?.*?```$", re.M | re.S)
HIDDEN = re.compile(r"^```\{toctree\}\n.*?^```\n", re.M | re.S)
OBJECTS = re.compile(r"^```\{eval-rst\}\n(.*?)^```$", re.M | re.S)
CAPTION = re.compile(r"^```\{code-block\} (\w+)\n:caption: (\S+)\n", re.M)


def twin(source: str, folder: Path) -> str:
    """Return a page's Markdown. Paths of included files start at a folder."""

    def included(match: re.Match[str]) -> str:
        text = (folder / match[1]).resolve().read_text(encoding="utf-8").strip()
        return re.sub("^(?=#+ )", "#" * int(match[2] or 0), text, flags=re.M)

    module = "retrieval"

    def described(match: re.Match[str]) -> str:
        nonlocal module
        lines = []
        for entry in re.split(r"^(?=\.\. )", match[1], flags=re.M):
            kind, _, rest = entry.removeprefix(".. ").partition(":: ")
            name = rest.split("\n")[0].strip()
            if kind == "currentmodule":
                module = name
            elif kind.startswith(("auto", "py:")):
                whole = name if name.startswith("retrieval.") else f"{module}.{name}"
                lines += documented(whole, ":members:" in rest)
        return "\n".join(lines)

    text = INCLUDE.sub(included, HIDDEN.sub("", source))
    return CAPTION.sub(r"`\2`:\n\n```\1\n", OBJECTS.sub(described, text))


def documented(name: str, members: bool) -> Iterator[str]:
    """Yield the lines of an object's entry, and of its public methods if members are asked for."""
    path, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(path), last)
    yield f"### {name}{signature(thing)}\n"
    yield f"{inspect.getdoc(thing) or ''}\n"
    for key, value in inspect.getmembers(thing) if members and inspect.isclass(thing) else ():
        text = inspect.getdoc(value)
        if not key.startswith("_") and inspect.isroutine(value) and text:
            yield f"#### {last}.{key}{signature(value)}\n"
            yield f"{text}\n"


def signature(thing: Any) -> str:
    """Return the parameters of a function or class; empty for others."""
    try:
        return str(inspect.signature(thing)).replace("'", "")
    except (TypeError, ValueError):
        return ""


def write(app: Any, error: Exception | None) -> None:
    """Write the twins, `llms.txt` and the skill of a site that was built without an error."""
    if error is not None or app.builder.name != "html":
        return
    env, out = app.env, Path(app.outdir)
    lines = []
    for page in order(env.toctree_includes, "index"):
        file = Path(env.doc2path(page))
        text = [file.read_text(encoding="utf-8")]
        app.emit("source-read", page, text)  # as for the page itself
        written = twin(text[0], file.parent)
        target = out / f"{page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(written, encoding="utf-8")
        lines.append(f"- [{env.titles[page].astext()}]({page}.md){beginning(written)}")
    skill = Path("skills", "retrieval", "SKILL.md")
    (out / skill).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(app.srcdir) / skill, out / skill)
    head = f"# {app.config.project}\n\n> {lines[0].partition(': ')[2]}\n\n"
    head += f"From photos to a served search in a few commands: {skill.as_posix()}\n\n## Pages\n\n"
    (out / "llms.txt").write_text(head + "\n".join(lines[1:]) + "\n", encoding="utf-8")


def beginning(text: str) -> str:
    """Return the first sentence of a page's first paragraph after a colon; empty without any."""
    for paragraph in text.split("\n\n"):
        if re.match(r"[\w*`](?!``)", paragraph):
            return f": {re.split('(?<=[.])[ ]', ' '.join(paragraph.split()))[0]}"
    return ""


def order(includes: dict[str, list[str]], page: str) -> Iterator[str]:
    """Yield a page and those below it in the contents, in their order."""
    yield page
    for below in includes.get(page, ()):
        yield from order(includes, below)


def setup(app: Any) -> None:
    """Write when the site is built."""
    app.connect("build-finished", write)
