"""Recipes: every problem at once with its place, unreadable files, `--set`, and TOML."""

from __future__ import annotations

import copy
import pickle
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings, strategies as st
from retrieval.errors import PluginError, RecipeError
from retrieval.host.values import toml_value
from retrieval.recipe.read import apply_overrides, check_recipe, read_recipe, to_toml
from retrieval.recipe.tables import Phase, Tables


def with_changes(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in {**table, **changes}.items() if v is not None}


STEP = {"name": "StepLR", "options": {"step_size": 2}}
TRANSFORM = {"augmentation": {"transforms": [{"name": "RandomAffine", "degree": 1, "degrees": 1}]}}
MARGIN = {"name": "everything.margin", "scale": 1}
NO_TRANSFORM = "[augmentation] transforms.0 name"
MISTAKES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"loss": "everything.margin"}, "[loss]", ["a table", '[loss] name = "everything.margin"']),
    ({"loss": {"name": "everything.items"}}, "[loss] name", ["'everything.items' is a dataset"]),
    ({"data": None}, "[data]", ["is required"]),
    ({"plugins": "mine.py"}, "plugins", ["list of text", '"mine.py"']),
    ({"head": {"hidden": [64, 0]}}, "[head] hidden.1", ["integer (> 0)", "not 0"]),
    ({"seed": "3"}, "seed", ["should be an integer", "Write it without quotes"]),
    ({"optimizer": {"name": "Adamw"}}, "[optimizer] name", ["torch.optim has no 'Adamw'"]),
    ({"optimiser": {"lr": 1}}, "[optimiser]", ["there is no such table", "'optimizer'?"]),
    ({"data": {"name": "everything.itms"}}, "[data] name", ["'everything.items'?"]),
    ({"split": {"test": 1.5}}, "[split] test", ["(≥ 0, < 1) or list of", "not 1.5"]),
    ({"augmentation": {"crop_scale": [0.5, 0.2]}}, "[augmentation]", ["smallest ≤ largest"]),
    ({"optimizer": {"lr": float("inf")}}, "[optimizer] lr", ["(> 0), not inf"]),
    ({"optimizer": {"lr_factor": {"hed": 2}}}, "[optimizer] lr_factor", ["'hed' sel", "'head'?"]),
    ({"optimizer": {"options": {"dcay": 1}}}, "[optimizer] options.dcay", ["AdamW takes no"]),
    ({"schedule": {"name": "cosin"}}, "[schedule] name", ["there is no schedule 'cosin'"]),
    ({"schedule": {**STEP, "warmup": 0.1}}, "[schedule] warmup", ["not with StepLR"]),
    ({"phase": [{"train": ["heads"]}]}, "[[phase]] 0.train.0", ["Did you mean 'head'?"]),
    ({"phase": [{"train": []}]}, "[[phase]] train", ["at least one part"]),
    ({"train": {"precision": "bf61"}}, "[train] precision", ["Did you mean 'bf16'?"]),
    ({"loss": {**MARGIN, "distance": object()}}, "[loss] distance", ["is of type object"]),
    (TRANSFORM, "[augmentation] transforms.0 degree", ["Did you mean 'degrees'?"]),
    ({"augmentation": {"transforms": ["RandAugmen"]}}, NO_TRANSFORM, ["'RandAugment'?"]),
]
# Entries of [evaluate] metrics; the last entry of each list is wrong.
METRICS: list[tuple[list[Any], str, str]] = [
    (["everything.bst"], "", "'everything.best'?"),
    (["recall_at_0"], "", "is recall_at_1"),
    (["map", {"name": "recal_at", "k": 5}], ".1 name", "Did you mean 'recall_at'?"),
    ([{"name": "core.recall_at", "kk": 5}], ".0 kk", "Did you mean 'k'?"),
]
MISTAKES += [
    ({"evaluate": {"metrics": metrics}}, f"[evaluate] metrics{place}", [words])
    for metrics, place, words in METRICS
]


@pytest.mark.parametrize(("changes", "place", "words"), MISTAKES)
def test_one_mistake_is_one_sentence(table, problems, changes, place, words):
    plugins = table["plugins"]
    merged = with_changes(table, changes)
    if merged.get("plugins") != plugins:  # the table's names need the plugin
        names = {"data": "core.digits", "backbone": "core.convnet", "loss": "pml.multi_similarity"}
        merged |= {part: {"name": name} for part, name in names.items()}
    (problem,) = problems(merged)
    assert problem.startswith((f"{place}:", f"{place} must")) and problem.endswith((".", "?"))
    assert all(word in problem for word in words), problem


def several(*losses: str) -> dict[str, Any]:
    tables = [{"name": f"everything.{x}"} | {"margin": {"scale": 1}}.get(x, {}) for x in losses]
    return {"loss": {"name": "everything.several", "losses": tables}}


COMBINER = {"combiner": {"name": "everything.cosine"}}
GENERATOR = {"generator": {"name": "everything.middle"}}
OWN = {**GENERATOR, "generator_optimizer": {"lr": 0.5}}
FIXED = {"loss": {"name": "everything.fixed"}}
DISTANCE = {"loss": {**MARGIN, "distance": "everything.euclidean"}}
LEARNER = {"loss": None, "learner": {"name": "everything.centre"}}
FLIP = {"augmentation": {"horizontal_flip": 0.5}}
FROZEN = {"backbone": {"name": "everything.same", "frozen": True}}
MINER = {"miner": {"name": "everything.all_pairs"}}
WITHOUT_GENERATOR = "is of no use without a [generator]"
BRINGS = "a [combiner] brings its own"
BOTH_SIDES = {"lr_factor": {"generator": 2, "head": 3}}
UNVALIDATED = {"split": {"by": "class", "validation": 0}}
OWN_SIDES = {"generator_optimizer": BOTH_SIDES}
HEAD_ONLY = {"phase": [{"train": ["head"], "generator_lr": 0.1}]}
TRAINS_GENERATOR = {"phase": [{"train": ["generator"], "lr": 0.1}]}
VIEWS: dict[str, Any] = {"positives": "item", "views": 2, "horizontal_flip": 0.5}
ALONE = {"sampler": {"items": 1}}
TOGETHER: list[tuple[dict[str, Any], list[str]]] = [
    ({"augmentation": {"views": 2}}, ["all views of an item are equal"]),
    ({"augmentation": {**VIEWS, "views": 1}, **ALONE}, ["Set views to 2"]),
    ({"augmentation": VIEWS}, ["[sampler] items = 4", "Set items = 1"]),
    ({**MINER, "augmentation": {"mix": "cutmix"}}, ["[miner] needs one label per item"]),
    ({**COMBINER, **FIXED}, ["takes a `distance`, and everything.fixed", "everything.margin"]),
    ({**COMBINER, **several("margin", "fixed")}, ["everything.several takes none"]),
    ({**GENERATOR, **FIXED}, ["everything.fixed takes no `ref_emb`", "everything.margin"]),
    ({**GENERATOR, **several("margin", "fixed")}, ["everything.several takes no `ref_emb`"]),
    ({**MINER, **FIXED}, ["everything.fixed has no use for them", "everything.margin"]),
    ({**COMBINER, **DISTANCE}, ["[loss] distance: [combiner]", "cosine is already the distance"]),
    ({**COMBINER, "head": {"identity": True}}, [f"[head] identity: {BRINGS}"]),
    ({**COMBINER, "head": {"hidden": [8]}}, [f"[head] hidden: {BRINGS}"]),
    ({**COMBINER, "head": {"normalise": False}}, ["[head] normalise: a [combiner] brings"]),
    ({"learner": {"name": "everything.centre"}}, ["either a [loss] or a [learner], not both"]),
    ({"loss": None}, ["either a [loss] or a [learner]; it has neither"]),
    ({**LEARNER, **MINER}, ["[miner] needs a [loss]"]),
    ({**LEARNER, **FLIP}, ["[augmentation]", "with a [learner]"]),
    ({**FROZEN, **FLIP}, ["[augmentation] changes", "[backbone] frozen = true", "once"]),
    ({**FROZEN, "phase": [{"train": ["backbone"]}]}, ["[[phase]] train: trains only the backbone"]),
    ({"phase": [{"train": ["generator"]}]}, ["trains only a generator", "has no [generator]"]),
    ({"generator_optimizer": {"lr": 1}}, [f"[generator_optimizer] {WITHOUT_GENERATOR}"]),
    ({**OWN, "optimizer": BOTH_SIDES}, ["[optimizer] lr_factor.generator", "generator_optimizer"]),
    ({**OWN, **OWN_SIDES}, ["[generator_optimizer] lr_factor.head", "[optimizer] lr_factor"]),
    ({**OWN, **TRAINS_GENERATOR}, ["Use generator_lr"]),
    ({"phase": [{"generator_lr": 0.1}]}, ["[[phase]] train: generator_lr is of no use unless a"]),
    ({**OWN, **HEAD_ONLY}, ["[[phase]] train: generator_lr", 'add "generator" to train']),
    ({"train": {"real_weight": 1}}, [f"[train] real_weight {WITHOUT_GENERATOR}"]),
    ({"train": {"loss_weight": 2}}, [f"[train] loss_weight {WITHOUT_GENERATOR} or a [combiner]"]),
    ({"train": {"coupling": "joint"}}, [f"[train] coupling {WITHOUT_GENERATOR}"]),
    (
        {"train": {"patience": 3}, **UNVALIDATED},
        ["[train] patience needs a validation part", "[split] validation above 0"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), TOGETHER)
def test_tables_that_conflict(table, problems, changes, words):
    (problem,) = problems(with_changes(table, changes))
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    "changes",
    [
        {**COMBINER, **several("margin", "margin"), "train": {"loss_weight": 2}},
        {**GENERATOR, **several("margin"), "train": {"real_weight": 1, "coupling": "joint"}},
        {**OWN, "phase": [{"train": ["generator"], "generator_lr": 0.1}, {"lr": 0.1}]},
        {**GENERATOR, **TRAINS_GENERATOR, "optimizer": {"lr_factor": {"generator": 2}}},
        {**MINER, **FLIP},
        {**FROZEN, "augmentation": {}},
        LEARNER,
        {"evaluate": {"metrics": ["everything.best", "recall_at_17", "map"]}},
        {"evaluate": {"metrics": [{"name": "core.recall_at", "k": 5}, {"name": "precision_at"}]}},
        {"split": {"test": [1, "2"]}, "head": {"identity": True}},
        {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}, "lr_factor": {"head": 10}}},
        {"schedule": STEP},
    ],
)
def test_tables_that_fit_together(table, problems, changes):
    assert problems(with_changes(table, changes)) == ()


def test_a_wrong_table_neither_hides_nor_invents_problems_of_others(table, problems):
    wrong = {"head": {"identity": True, "hidden": 3}, "train": {"patience": 1, "epochs": 0}}
    actual = problems({**table, **COMBINER, **FIXED, **UNVALIDATED, **wrong})
    assert len(actual) == 5, actual
    for sampler in ({"classes": 1, "items": 1}, {"classes": 4, "items": 1, "batches": 0}):
        assert len(problems({**table, "augmentation": VIEWS, "sampler": sampler})) == 1
    assert len(problems({**table, "loss": 3})) == 1


def test_unreadable_files(tmp_path):
    def refused(content: bytes, path: Path = tmp_path / "recipe.toml") -> str:
        (tmp_path / "recipe.toml").write_bytes(content)
        with pytest.raises(RecipeError) as caught:
            read_recipe(path)
        assert str(path) in str(caught.value) and len(caught.value.problems) == 1
        return caught.value.problems[0]

    assert refused(b"", tmp_path / "none.toml") == "it cannot be read: No such file or directory."
    assert refused(b"\xff\xfe\x00") == "it cannot be read: it is not UTF-8 text."
    assert refused(b"[data\n").startswith("it is not valid TOML: Expected ']'")
    assert "line 2" in refused(b"a = 1\nb = \n")
    assert refused(b"a = " + b"[" * 100_000) == "it is not valid TOML: it is nested too deeply."
    assert refused(b"a = " + b"9" * 5000).startswith("it is not valid TOML: Exceeds the limit")
    assert "Is a directory" in refused(b"", tmp_path)


def test_a_byte_order_mark_and_windows_lines_are_read_and_dates_refused(tmp_path):
    file = tmp_path / "recipe.toml"
    names = {"data": "core.digits", "backbone": "core.convnet", "loss": "pml.contrastive"}
    lines = ['\ufeffname = "é"', *(f'{part}.name = "{name}"' for part, name in names.items())]
    file.write_bytes("\r\n".join(lines).encode())
    assert read_recipe(file).name == "é"
    file.write_text("name = 2024-01-01\n")
    says = "name: is a date or time, which nothing here takes. If it is text, put it in quotes"
    with pytest.raises(RecipeError, match=says):
        read_recipe(file)


def test_plugin_files_are_found_beside_the_recipe_then_here(tmp_path, table, monkeypatch):
    (tmp_path / "sub").mkdir()
    recipe = tmp_path / "sub" / "recipe.toml"
    source = Path(table["plugins"][0]).read_text(encoding="utf-8")
    text = '{}data.name = "{p}.items"\nbackbone.name = "{p}.same"\nloss.name = "{p}.fixed"\n'
    (tmp_path / "sub" / "beside.py").write_text(source)
    (tmp_path / "here.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    recipe.write_text(text.format('plugins = ["beside.py"]\n', p="beside"))
    assert read_recipe(Path("sub/recipe.toml")).plugins == [str(tmp_path / "sub" / "beside.py")]
    recipe.write_text(text.format('plugins = ["here.py"]\n', p="here"))
    assert read_recipe(recipe).plugins == [str(tmp_path / "here.py")]
    # A plugin that both the recipe and the caller name is listed twice and loaded once.
    assert len(read_recipe(recipe, plugins=["here.py"]).plugins) == 2
    recipe.write_text(text.format("", p="here"))
    assert read_recipe(recipe, plugins=["here.py"]).plugins == [str(tmp_path / "here.py")]
    recipe.write_text(text.format('plugins = ["gone.py"]\n', p="gone"))
    with pytest.raises(PluginError, match=r"gone\.py does not exist"):
        read_recipe(recipe)
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe, ["seed=a"])
    assert len(caught.value.problems) == 2
    for entry in (["a.py"], {"a": 1}):
        with pytest.raises(RecipeError, match=r"\[plugins\] 0: should be text"):
            read_recipe({**table, "plugins": [entry]})


def test_a_recipe_keeps_its_plugins_which_comparisons_ignore(table):
    recipe = check_recipe(table)
    loss = recipe.build("loss", features=3, embedding_size=2, classes=4)
    assert type(loss) is type(recipe.loaded.build("losses", table["loss"]))
    again, longer = check_recipe(table), check_recipe({**table, "train": {"epochs": 11}})
    assert again == recipe != longer and again.loaded is not recipe.loaded
    changed = recipe.model_copy(update={"seed": 5})
    assert changed.loaded is recipe.loaded and changed != recipe
    for copied in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert copied == recipe and copied.loaded.find("losses", "everything.margin")
    assert "everything.margin" in to_toml(recipe) and "loaded" not in to_toml(recipe)
    assert tomllib.loads(to_toml(recipe)) == tomllib.loads(tomli_w.dumps(table))


def test_the_host_reads_frozen_and_the_backbone_does_not(table):
    recipe = check_recipe({**table, "backbone": {**table["backbone"], "frozen": True}})
    assert recipe.backbone.frozen and "frozen" not in recipe.backbone.table
    assert tomllib.loads(to_toml(recipe))["backbone"] == {**table["backbone"], "frozen": True}
    assert recipe.build("backbone", features=2).features == 2


def test_a_metric_s_parameters_survive_set_and_toml(tmp_path, table):
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    entry = '{ name = "core.recall_at", k = 5 }'
    for text in (f'["map_at_r", {entry}]', f"[{entry}]"):
        recipe = read_recipe(path, [f"evaluate.metrics={text}"])
        assert recipe.evaluate.metrics[-1] == {"name": "core.recall_at", "k": 5}
        again = tmp_path / "again.toml"
        again.write_text(to_toml(recipe), encoding="utf-8")
        assert read_recipe(again) == recipe
        changed = read_recipe(again, [f"evaluate.metrics.{len(recipe.evaluate.metrics) - 1}.k=7"])
        assert changed.evaluate.metrics[-1] == {"name": "core.recall_at", "k": 7}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
HARD = ['"', "'", "\\", "\n", "\r\n", "\t", "\x00\x1f\x7f\x85", "a = 3", "# no comment", "'''"]
HARD += ['"""', "é漢🎉\u2028", ""]
KEYS = st.one_of(st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=6), TEXT)
NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
SCALARS = st.one_of(st.booleans(), NUMBERS, TEXT, st.sampled_from(HARD))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
NAMES = st.text(string.ascii_letters + string.digits + "é漢🎉_-", min_size=1, max_size=12)
TABLE = st.dictionaries(KEYS, VALUES, max_size=4)
COMPONENT = st.builds(lambda parameters, name: {**parameters, "name": name}, TABLE, TEXT)
PHASE = st.builds(Phase, name=TEXT, epochs=st.integers(1, 9), lr=st.none() | st.floats(1e-6, 1))
PHASES = st.lists(PHASE, max_size=3)


@given(name=NAMES, data=COMPONENT, loss=st.none() | COMPONENT, options=TABLE, phases=PHASES)
@example("x", {"name": "d", "a": None, "b": {"c": None, "d": [{"e": 1}, {}]}}, None, {}, [])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_recipe_survives_writing_and_reading(name, data, loss, options, phases):
    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_none(v) for k, v in value.items() if v is not None}
        return [without_none(v) for v in value] if isinstance(value, list) else value

    parts = {"data": data, "backbone": {"name": "b"}, "loss": loss}
    recipe = Tables(name=name, optimizer={"options": options}, phase=phases, **parts)
    again = Tables(**tomllib.loads(to_toml(recipe)))
    assert again.model_dump() == {**recipe.model_dump(), "data": without_none(data)}
    assert to_toml(again) == to_toml(recipe)


@given(VALUES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_values_in_snippets_and_sentences_are_toml(value):
    text = toml_value(value)
    assert "\n" not in text and tomllib.loads(f"value = {text}")["value"] == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=5", {"seed": 5}),
        ("name='quoted'", {"name": "quoted"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": ""}),
        ("loss.margin = 0.5", {"loss": {"name": "x", "margin": 0.5}}),
        ("loss.reducer.name=pml.mean", {"loss": {"name": "x", "reducer": {"name": "pml.mean"}}}),
        ('split.test=["a", 2]', {"split": {"test": ["a", 2]}}),
        ("optimizer.lr=1e-3", {"optimizer": {"lr": 0.001}}),
        ("backbone.frozen=true", {"backbone": {"frozen": True}}),
        ("backbone.frozen=True", {"backbone": {"frozen": "True"}}),
        ("phase.1.epochs=3", {"phase": [{"epochs": 1, "train": ["head"]}, {"epochs": 3}]}),
        ("phase.0.train.0=loss", {"phase": [{"epochs": 1, "train": ["loss"]}, {"epochs": 2}]}),
        ("name='a'\nseed=3", {"name": "'a'\nseed=3"}),
        ("name=a # b", {"name": "a # b"}),
    ],
)
def test_set(text, expected):
    phases = [{"epochs": 1, "train": ["head"]}, {"epochs": 2}]
    table: dict[str, Any] = {"loss": {"name": "x"}, "phase": phases}
    apply_overrides(table, [text])
    for key, value in expected.items():
        assert table[key] == value and type(table[key]) is type(value)
    apply_overrides(table, ["a.b=1", "a.c=2", "a.b=3"])  # the last change of a key counts
    assert table["a"] == {"b": 3, "c": 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("=3", "write it as table.key=value."),
        ("name.x=3", 'name is "run", not a table, so no key can be set in it.'),
        ("phase.first.epochs=3", "phase has 1 entry, numbered from 0; 'first' is none of them."),
        ("phase.epochs=3", "by the entry's number, as in phase.0.epochs=…"),
        ("phases.0.epochs=3", "the recipe has no list 'phases'."),
    ],
)
def test_a_change_that_cannot_be_applied(text, problem):
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
    assert recipe.loss.parameters["margin"] == 0.7
    assert recipe.head.hidden == [8] and recipe.phases[0].epochs == 2
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, ["loss.margn=0.7", "hed.hidden=[8]", "train.epochs=two"])
    assert len(caught.value.problems) == 3
