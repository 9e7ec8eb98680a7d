"""Write the pages that the code defines: hooks, recipes, one page per kind of plugin, the floors,
the OpenAPI document.

An extension of Sphinx: it runs before each build and writes to `docs/generated`, which git ignores.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from retrieval.host import hookspecs
from retrieval.host.describe import COMMAND_KINDS, snippet
from retrieval.host.factory import COMPONENTS, GIVEN, KINDS, Factory
from retrieval.host.plugins import Plugins, installed_plugins, load_plugins
from retrieval.host.values import toml_value, type_text
from retrieval.recipe.read import Recipe

from retrieval_server.openapi import document
from retrieval_server.routes import Routes

DOCS = Path(__file__).parent
FOLDER = DOCS / "generated"


def hooks() -> str:
    """Every hook with its exact signature and docstring."""
    lines = [
        "# Hooks\n",
        f"{inspect.cleandoc(hookspecs.__doc__ or '')}\n",
        (
            "Mark a hook with `retrieval.plugin.hookimpl`. It may leave out arguments that it has"
            " no use for.\n"
        ),
        (
            "`Factories` is `Mapping[str, Callable[..., Any]]`; `run` is the run that is trained,"
            " `app` the command line.\n"
        ),
        "What the host gives to a factory that names it, and a recipe cannot set:\n",
        *(f"- `{name}`: {meaning}" for name, meaning in GIVEN.items()),
        "",
    ]
    for name, hook in vars(hookspecs).items():
        if name.startswith("retrieval_"):
            signature = str(inspect.signature(hook)).replace("'", "")
            lines += [
                f"## {name}\n",
                f"```python\ndef {name}{signature}\n```\n",
                f"{inspect.cleandoc(hook.__doc__ or '')}\n",
            ]
    return "\n".join(lines)


def recipe() -> str:
    """Every table and key of a recipe."""
    lines = [
        "# Recipes\n",
        (
            "A recipe is a TOML file. `retrieval check` reports everything that is wrong in it at"
            " once. Any value can be changed on the command line: `--set head.embedding_size=128`,"
            " `--set phase.0.epochs=3`. `--set train.clip_norm=none` removes a key that the recipe"
            " sets.\n"
        ),
        "## Top level\n",
        *_keys(
            {
                k: f
                for k, f in Recipe.model_fields.items()
                if k not in COMPONENTS and not _section(f)
            }
        ),
    ]
    for name, field in Recipe.model_fields.items():
        if name in COMPONENTS:
            lines += [f"## `[{name}]`\n", f"{field.description}\n"]
            lines += [
                f'`name = "PLUGIN.NAME"`, one of {_link(COMPONENTS[name])}, and that'
                f" {KINDS[COMPONENTS[name]]}'s parameters.\n"
            ]
            lines += [] if field.is_required() else ["Optional.\n"]
            keys = {k: f for k, f in _section(field).model_fields.items() if k != "name"}
            lines += _keys(keys) if keys else []
        elif section := _section(field):
            title = f"`[[{name}]]`" if get_origin(field.annotation) is list else f"`[{name}]`"
            text = inspect.cleandoc(section.__doc__ or "").partition(": ")[2]
            lines += [f"## {title}\n", f"{text[0].upper()}{text[1:]}\n"]
            lines += [f"{field.description}\n"] if field.description else []
            lines += _keys(section.model_fields)
    return "\n".join(lines)


def bundled() -> Plugins:
    """Return the plugins of this repository, whatever else is installed."""
    return load_plugins(
        block=[
            name
            for name, origin in installed_plugins().items()
            if origin.split()[0] != "embedding-retrieval"
        ]
    )


def plugins() -> dict[str, str]:
    """One page per kind of plugin, and the page that lists the kinds."""
    loaded = bundled()
    pages, rows = {}, []
    for kind in KINDS:
        # The trackers that a machine offers depend on the packages installed there
        factories = loaded.factories(kind) if kind != "trackers" else {}
        if factories:
            lines = [f"# {kind.capitalize()}\n", f"{len(factories)} bundled {kind}, by name.\n"]
            for factory in factories.values():
                lines += _factory(factory, snippet(factory))
            pages[f"plugins/{kind}.md"] = "\n".join(lines)
            rows.append(f"- {len(factories)} [{kind}](plugins/{kind}.md)")
    return {
        "plugins.md": "\n".join(
            [
                "# Bundled plugins\n",
                "`retrieval plugins show NAME` prints the same, for installed plugins too.\n",
                *rows,
                "\n```{toctree}\n:hidden:\n",
                *(name.removesuffix(".md") for name in pages),
                "```\n",
            ]
        ),
        **pages,
    }


def _factory(factory: Factory, example: str) -> Iterator[str]:
    yield f"## {factory.name}\n"
    yield f"{factory.description}\n"
    if factory.parameters:
        yield "| parameter | type | default | meaning |\n| --- | --- | --- | --- |"
        for p in factory.parameters:
            default = p.default_text
            shown = default if p.required or p.by_host or not default else f"`{default}`"
            yield f"| `{p.name}` | {_cell(p.type_text)} | {_cell(shown)} | {_cell(p.doc)} |"
        yield ""
    # what is to be filled in is not TOML yet
    language = (
        "sh"
        if factory.kind in COMMAND_KINDS
        else "text"
        if " = …" in re.sub("#.*", "", example)
        else "toml"
    )
    yield f"```{language}\n{example}\n```\n"


def _keys(fields: dict[str, Any]) -> Iterator[str]:
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    for name, field in fields.items():
        annotation = (
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        )
        default = field.get_default(call_default_factory=True)
        shown = (
            "required"
            if default is PydanticUndefined
            else ""
            if default is None
            else f"`{toml_value(default)}`"
        )
        yield (
            f"| `{name}` | {_cell(type_text(annotation))} | {_cell(shown)} |"
            f" {_cell(field.description or '')} |"
        )
    yield ""


def _section(field: Any) -> type[BaseModel] | None:
    """The table that a field of the recipe is, if it is one."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _link(kind: str) -> str:
    """A link to the kind's page, when the bundled plugins offer any of it."""
    return (
        f"[the {kind}](plugins/{kind}.md)"
        if bundled().factories(kind)
        else f"the {kind} of a plugin"
    )


def _cell(text: str) -> str:
    """Text that fits a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _load(file: Path) -> ModuleType:
    """A module by its file: neither docs nor tests are packages."""
    spec = importlib.util.spec_from_file_location(f"generate_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floors() -> str:
    """The diagram of the floors; the list is the one that the test of imports holds."""
    listed = _load(DOCS.parent / "tests" / "host" / "test_imports.py").FLOORS
    drawn: str = _load(DOCS / "layers.py").draw(DOCS.parent / "retrieval", listed)
    return drawn


def openapi() -> str:
    """The OpenAPI document of the server."""
    return json.dumps(document(Routes), indent=1, ensure_ascii=False) + "\n"


def pages() -> dict[str, str]:
    """Every generated file, by its path below `docs/generated`."""
    return {
        "hooks.md": hooks(),
        "recipe.md": recipe(),
        **plugins(),
        "floors.svg": floors(),
        "openapi.json": openapi(),
    }


def write(folder: Path = FOLDER) -> None:
    """Make a folder hold the generated files and no others; unchanged files keep their date, so
    Sphinx skips them.
    """
    made = pages()
    for path in folder.rglob("[!.]*.*"):
        if path.relative_to(folder).as_posix() not in made:
            path.unlink(missing_ok=True)
    for name, text in made.items():
        target = folder / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(
                f".{target.name}.{os.getpid()}"
            )  # two builds may run at once
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)


def setup(app: Any) -> None:
    """Write the pages before Sphinx looks for them."""
    app.connect("builder-inited", lambda app: write())
