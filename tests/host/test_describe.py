"""`plugins list`, and `plugins show` with its lines for a recipe."""

from __future__ import annotations

import re
import tomllib
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from retrieval.errors import PluginError
from retrieval.host.describe import list_text, show_text, snippet
from retrieval.host.factory import KINDS, Factory, Parameter
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe

from .conftest import EVERYTHING, TABLE

PLUGINS = load_plugins([str(EVERYTHING)])
ALL = [factory for kind in KINDS for factory in PLUGINS.factories(kind).values()]
SIMPLE = {"losses": "everything.fixed", "miners": "everything.all_pairs"}


def fill(p: Parameter) -> str:
    """Return a value for a required parameter, as TOML."""
    if p.part:
        name = SIMPLE.get(p.part) or next(iter(PLUGINS.factories(p.part)))
        return f'["{name}"]' if p.many else f'"{name}"'
    annotation = p.annotation
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return f'"{get_args(annotation)[0]}"'
    if get_origin(annotation) in (list, tuple):
        return "[]"
    return {int: "3", float: "0.5", bool: "true"}.get(annotation, '"text"')


def pasted(factory: Factory) -> dict[str, Any]:
    """Return a recipe that contains a factory's snippet, with values for the dots."""
    text = snippet(factory)
    for p in factory.parameters:
        if p.required:
            text = re.sub(rf"\b{p.name} = …", f"{p.name} = {fill(p)}", text)
    pasted = tomllib.loads(text)
    base = {k: v for k, v in TABLE.items() if (k, factory.kind) != ("loss", "learners")}
    return {**base, **pasted}


@pytest.mark.parametrize("kind", KINDS)
def test_every_factory_is_shown_and_its_snippet_passes_the_check(kind):
    for factory in PLUGINS.factories(kind).values():
        lines, shown = snippet(factory), show_text(PLUGINS, factory.name)
        assert factory.name in lines or kind in ("clusters", "encoders")
        if kind in ("indexes", "stores"):
            assert lines.startswith("retrieval index ")
        elif kind == "clusters":
            assert lines == "retrieval compare RECIPE RECIPE --ray ADDRESS"
        elif kind == "encoders":
            scheme = factory.name.partition(".")[2]
            assert lines == f"retrieval evaluate RUN --model {scheme}:…"
        elif kind == "trackers":
            assert lines == f"retrieval train RECIPE --track {factory.name}"
        else:
            check_recipe(pasted(factory), plugins=PLUGINS)
        assert f"{factory.name} ({KINDS[factory.kind]})" in shown
        assert all(f"  {line}".rstrip() in shown for line in lines.splitlines())
        words = " ".join(shown.split())
        assert " ".join(factory.description.split()) in words
        for p in factory.parameters:
            assert f"  {p.name}: {p.type_text}" in shown and " ".join(p.doc.split()) in words


def test_show_lists_every_factory_of_a_name():
    text = show_text(PLUGINS, "pml.multi_similarity")
    assert "pml.multi_similarity (loss)" in text and "pml.multi_similarity (miner)" in text


def test_built_in_factories_have_a_short_and_a_full_name():
    listed = list_text(PLUGINS, "indexes")
    for short in ("flat", "hnsw", "ivf"):
        assert f"  core.{short} " in listed
        text = show_text(PLUGINS, short)
        assert text == show_text(PLUGINS, f"core.{short}")
        assert f"--backend core.{short}" in text
    assert "  m: integer (≥ 4, ≤ 256) = 32" in show_text(PLUGINS, "hnsw")
    text = show_text(PLUGINS, "recall_at")
    assert text == show_text(PLUGINS, "core.recall_at")
    assert '  metrics = [{ name = "core.recall_at", k = 1 }]' in text
    assert '  metrics = ["core.map_at_r"]' in show_text(PLUGINS, "map_at_r")


def test_an_unknown_name_suggests_a_known_one():
    for name, message in (
        ("contrastve", r"Nothing is called 'contrastve'\. Did you mean 'pml\.contrastive'"),
        ("hnws", r"Nothing is called 'hnws'\. Did you mean 'hnsw'"),
        ("qqqqq", "See: retrieval plugins list"),
    ):
        with pytest.raises(PluginError, match=message):
            show_text(PLUGINS, name)
    with pytest.raises(PluginError, match=r"There is no index 'hnws'\. Did you mean 'hnsw'"):
        PLUGINS.find("indexes", "hnws")


def test_a_required_parameter_is_marked():
    margin = PLUGINS.find("losses", "everything.margin")
    lines = ["[loss]", 'name = "everything.margin"', "scale = …  # number (> 0), required"]
    lines += ["margin = 0.1", "# distance = …  # a distance", "# reducer = …  # a reducer"]
    assert snippet(margin).splitlines() == lines
    shown = show_text(PLUGINS, "everything.margin")
    assert "  scale: number (> 0) (required)" in shown and "  margin: number = 0.1" in shown
    assert "  classes: integer (given by the host)" in show_text(PLUGINS, "everything.fixed")


def test_a_nested_part_is_shown_in_a_loss():
    lines = snippet(PLUGINS.find("regularizers", "everything.lp")).splitlines()
    part = 'embedding_regularizer = { name = "everything.lp", p = 2 }'
    assert lines == ["[loss]", 'name = "pml.contrastive"', part]


def test_list_names_everything_by_kind():
    text = list_text(PLUGINS)
    for source in PLUGINS.sources:
        assert re.search(rf"^{source.plugin} +{re.escape(source.origin)}$", text, re.M)
    lines = text.splitlines()
    for factory in ALL:
        own = lines[lines.index(factory.kind) :]
        line = next(line for line in own if line.startswith(f"  {factory.name} "))
        assert factory.summary.split()[0] in line
    losses = list_text(PLUGINS, "losses")
    assert losses.startswith("losses\n") and "everything.items" not in losses
    with pytest.raises(PluginError, match="Did you mean 'losses'"):
        list_text(PLUGINS, "loses")
