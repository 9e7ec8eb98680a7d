"""`--set`, and recipes written as TOML and read again."""

from __future__ import annotations

import string
import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from retrieval.errors import RecipeError
from retrieval.host.values import toml_value
from retrieval.recipe.read import apply_overrides, read_recipe, to_toml
from retrieval.recipe.tables import Phase, Tables

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
HARD = ['"', "'", "\\", "\n", "\r\n", "\t", "\x00\x1f\x7f\x85", "a = 3", "# no comment", "'''"]
HARD += ['"""', "é漢🎉\u2028", ""]
KEYS = st.one_of(st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=6), TEXT)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    TEXT,
    st.sampled_from(HARD),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
NAMES = st.text(string.ascii_letters + string.digits + "é漢🎉_-", min_size=1, max_size=12)
TABLE = st.dictionaries(KEYS, VALUES, max_size=4)
COMPONENT = st.builds(lambda parameters, name: {**parameters, "name": name}, TABLE, TEXT)
PHASES = st.lists(
    st.builds(Phase, name=TEXT, epochs=st.integers(1, 9), lr=st.none() | st.floats(1e-6, 1)),
    max_size=3,
)


@given(name=NAMES, data=COMPONENT, loss=st.none() | COMPONENT, options=TABLE, phases=PHASES)
@example("x", {"name": "d", "a": None, "b": {"c": None, "d": [{"e": 1}, {}]}}, None, {}, [])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_recipe_survives_writing_and_reading(name, data, loss, options, phases):
    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_none(v) for k, v in value.items() if v is not None}
        return [without_none(v) for v in value] if isinstance(value, list) else value

    recipe = Tables(
        name=name,
        data=data,
        backbone={"name": "b"},
        loss=loss,
        optimizer={"options": options},
        phase=phases,
    )
    again = Tables(**tomllib.loads(to_toml(recipe)))
    assert again.model_dump() == {**recipe.model_dump(), "data": without_none(data)}
    assert to_toml(again) == to_toml(recipe)


def test_only_what_was_set_is_written():
    recipe = Tables(data={"name": "a"}, backbone={"name": "b"}, seed=0)
    written = {"seed": 0, "data": {"name": "a"}, "backbone": {"name": "b"}}
    assert tomllib.loads(to_toml(recipe)) == written


def test_a_recipe_file_and_its_written_form_check_alike(tmp_path, table):
    table["loss"]["reducer"] = {"name": "everything.mean", "pad": {"name": "everything.lp", "p": 1}}
    table |= {"name": "é漢🎉", "split": {"by": "class", "test": [1, "b"]}}
    table |= {"head": {"hidden": [3, 4]}, "augmentation": {"crop_scale": (0.2, 1.0)}}
    named = Phase(name='a "b" \\ c\n', train=["head"], epochs=2)
    tables = Tables(**table, phase=[named, Phase(lr=1e-7)])
    (tmp_path / "first.toml").write_text(to_toml(tables), encoding="utf-8")
    recipe = read_recipe(tmp_path / "first.toml")
    (tmp_path / "second.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert read_recipe(tmp_path / "second.toml") == recipe
    assert recipe.augmentation.crop_scale == (0.2, 1.0) and recipe.phase[1].lr == 1e-7


@given(VALUES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_values_in_snippets_and_sentences_are_toml(value):
    text = toml_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"value = {text}")["value"] == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=5", {"seed": 5}),
        ("name=run two", {"name": "run two"}),
        ("name='quoted'", {"name": "quoted"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": ""}),
        ("loss.margin = 0.5", {"loss": {"name": "x", "margin": 0.5}}),
        ("loss.name=pml.circle", {"loss": {"name": "pml.circle"}}),
        ("loss.reducer.name=pml.mean", {"loss": {"name": "x", "reducer": {"name": "pml.mean"}}}),
        (
            'loss.reducer={ name = "pml.mean" }',
            {"loss": {"name": "x", "reducer": {"name": "pml.mean"}}},
        ),
        ("head.hidden=[64, 32]", {"head": {"hidden": [64, 32]}}),
        ('split.test=["a", "b"]', {"split": {"test": ["a", "b"]}}),
        ("optimizer.lr=1e-3", {"optimizer": {"lr": 0.001}}),
        ("backbone.frozen=true", {"backbone": {"frozen": True}}),
        ("backbone.frozen=True", {"backbone": {"frozen": "True"}}),
        ("phase.1.epochs=3", {"phase": [{"epochs": 1, "train": ["head"]}, {"epochs": 3}]}),
        ("phase.0.train.0=loss", {"phase": [{"epochs": 1, "train": ["loss"]}, {"epochs": 2}]}),
        ("name=a\nseed=3", {"name": "a\nseed=3"}),
        ("name='a'\nseed=3", {"name": "'a'\nseed=3"}),
        ("name=a # b", {"name": "a # b"}),
    ],
)
def test_set(text, expected):
    table: dict[str, Any] = {
        "loss": {"name": "x"},
        "phase": [{"epochs": 1, "train": ["head"]}, {"epochs": 2}],
    }
    apply_overrides(table, [text])
    for key, value in expected.items():
        assert table[key] == value and type(table[key]) is type(value)


def test_the_last_set_of_a_key_counts():
    table: dict[str, Any] = {}
    apply_overrides(table, ["a.b=1", "a.c=2", "a.b=3"])
    assert table == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("=3", "write it as table.key=value."),
        ("a..b=3", "write it as table.key=value."),
        ("name.x=3", 'name is "run", not a table, so no key can be set in it.'),
        ("phase.5.epochs=3", "phase has 1 entry, numbered from 0; '5' is none of them."),
        ("phase.first.epochs=3", "phase has 1 entry, numbered from 0; 'first' is none of them."),
        ("phase.epochs=3", "by the entry's number, as in phase.0.epochs=…"),
        ("phases.0.epochs=3", "the recipe has no list 'phases'."),
    ],
)
def test_set_that_fits_nowhere(text, problem):
    table: dict[str, Any] = {"name": "run", "loss": {"name": "x"}, "phase": [{"epochs": 1}]}
    with pytest.raises(RecipeError) as caught:
        apply_overrides(table, ["seed=1", text, "no"])
    first, second = caught.value.problems
    assert first.startswith(f"The change {text}: ") and first.endswith(problem)
    assert second == "The change no: write it as table.key=value."
    assert str(caught.value).startswith("The command line has 2 problems:")


def test_set_is_checked_like_the_file(tmp_path, table):
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(Tables(**table)), encoding="utf-8")
    recipe = read_recipe(path, ["loss.margin=0.7", "head.hidden=[8]", "train.epochs=2"])
    assert recipe.loss is not None and recipe.loss.parameters["margin"] == 0.7
    assert recipe.head.hidden == [8] and recipe.phases[0].epochs == 2
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, ["loss.margn=0.7", "hed.hidden=[8]", "train.epochs=two"])
    assert len(caught.value.problems) == 3
