"""Descriptions of plugins' factories as text, for `plugins list`, `plugins show` and the docs."""

from __future__ import annotations

import textwrap

from retrieval.errors import PluginError, did_you_mean
from retrieval.host.factory import BUILT_IN, COMPONENTS, KINDS, SHORT, Factory
from retrieval.host.plugins import Plugins
from retrieval.host.values import toml_value

COMMAND_KINDS = ("indexes", "stores", "clusters", "encoders")
"""Kinds of parts that a command names, not a recipe."""


def list_text(plugins: Plugins, kind: str | None = None) -> str:
    """Return plugins, factories (of all kinds or of one), and why some factories are disabled."""
    if kind is not None and kind not in KINDS:
        raise PluginError(
            f"There is no kind '{kind}' (known: {', '.join(KINDS)}).{did_you_mean(kind, KINDS)}"
        )
    kinds = list(KINDS)
    lines = [f"{source.plugin:<12} {source.origin}" for source in plugins.sources]
    if kind:
        kinds = [kind]
        lines = []
    disabled: dict[str, str] = {}
    for kind in kinds:
        disabled |= plugins.disabled(kind)
        if factories := plugins.factories(kind):
            width = max(map(len, factories))
            lines += ["", kind]
            for factory in factories.values():
                summary = textwrap.shorten(factory.summary, 76, placeholder=" …")
                lines.append(f"  {factory.name:<{width}}  {summary}")
    if disabled:
        lines += ["", "disabled", *(f"  {name}: {why}" for name, why in disabled.items())]
    return "\n".join(lines).strip("\n")


def show_text(plugins: Plugins, name: str) -> str:
    """Return each factory called `name`: its description, parameters and lines for a recipe."""
    factories = [plugins.named(kind, plugins.full_name(kind, name)) for kind in KINDS]
    if matches := [factory for factory in factories if factory]:
        return "\n\n".join(map(_factory_text, matches))
    for kind in KINDS:
        if name in plugins.disabled(kind):
            raise PluginError(plugins.disabled(kind)[name])
    known = [n for kind in KINDS for n in plugins.factories(kind)]
    known += [n.removeprefix(f"{BUILT_IN}.") for kind in SHORT for n in plugins.factories(kind)]
    hint = did_you_mean(name, known) or " See: retrieval plugins list."
    raise PluginError(f"Nothing is called '{name}'.{hint}")


def _factory_text(factory: Factory) -> str:
    lines = [f"{factory.name} ({KINDS[factory.kind]})", "", *_wrap(factory.description), ""]
    if factory.parameters:
        lines.append("Parameters")
        for p in factory.parameters:
            default = ""
            if p.by_host or p.required:
                default = f" ({p.default_text})"
            elif p.default_text:
                default = f" = {p.default_text}"
            lines += [f"  {p.name}: {p.type_text}{default}", *_filled(p.doc, "      ")]
        lines.append("")
    if factory.hints:
        lines += ["Hints for its author", *(f"  - {hint}" for hint in factory.hints), ""]
    lines.append("On the command line" if factory.kind in COMMAND_KINDS else "In a recipe")
    return "\n".join([*lines, *(f"  {line}" for line in snippet(factory).splitlines())])


def snippet(factory: Factory) -> str:
    """Return the recipe lines or the command that uses a factory, with its defaults."""
    name = factory.name
    settable = [p for p in factory.parameters if not p.by_host]
    required = [p.name for p in settable if p.required]
    options = "".join(f" --set {key}=…" for key in required)
    query = ""
    if required:
        query = "?" + "&".join(f"{key}=…" for key in required)
    part = _inline(factory)
    # Without parameters, the name alone stands in a list.
    item = part if settable else toml_value(name)
    plugin = name.partition(".")[0]
    loss = '[loss]\nname = "pml.contrastive"\n'
    uses = {
        "metrics": f"[evaluate]\nmetrics = [{item}]",
        "augmentations": f"[augmentation]\ntransforms = [{item}]",
        "indexes": f"retrieval index create INDEX IMAGES --bundle BUNDLE --backend {name}{options}",
        "stores": f"retrieval index create {name}://PLACE{query} IMAGES --bundle BUNDLE",
        "trackers": f"retrieval train RECIPE --track {name}",
        "encoders": f"retrieval evaluate RUN --model {name.partition('.')[2]}:…",
        "clusters": f"retrieval compare RECIPE RECIPE --{plugin} ADDRESS",
        "distances": f"{loss}distance = {part}",
        "reducers": f"{loss}reducer = {part}",
        "regularizers": f"{loss}embedding_regularizer = {part}",
    }
    if factory.kind in uses:
        return uses[factory.kind]
    tables = {kind: table for table, kind in COMPONENTS.items()}
    lines = [f"[{tables[factory.kind]}]", f'name = "{name}"']
    for p in settable:
        if p.required:
            lines.append(f"{p.name} = …  # {p.type_text}, required")
        elif p.default_text:
            lines.append(f"{p.name} = {p.default_text}")
        else:
            lines.append(f"# {p.name} = …  # {p.type_text}")
    return "\n".join(lines)


def _inline(factory: Factory) -> str:
    """Return a factory with its defaults as a TOML table on one line."""
    settable = [p for p in factory.parameters if not p.by_host and p.default_text]
    inner = [f"{p.name} = {'…' if p.required else p.default_text}" for p in settable]
    return f"{{ {', '.join([f'name = {toml_value(factory.name)}', *inner])} }}"


def _wrap(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        # Formulas, code and lists keep their line breaks.
        if any(line.startswith((" ", "- ", "* ")) for line in paragraph.splitlines()):
            lines += [*paragraph.splitlines(), ""]
        else:
            lines += [*_filled(" ".join(paragraph.split())), ""]
    return lines[:-1]


def _filled(text: str, indent: str = "") -> list[str]:
    # Names stay on one line so that they can be copied.
    wrapped = textwrap.wrap(text, 100 - len(indent), break_on_hyphens=False, break_long_words=False)
    return [indent + line for line in wrapped]
