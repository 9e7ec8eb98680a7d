"""Recipes: every problem at once, each with its place and what to do; files that are none; what
cannot go together.
"""

from __future__ import annotations

import copy
import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from retrieval.errors import PluginError, RecipeError
from retrieval.recipe.read import Recipe, check_recipe, read_recipe, to_toml

Problems = Callable[..., tuple[str, ...]]


def test_a_right_recipe_has_no_problem(table: dict[str, Any]) -> None:
    recipe = check_recipe(table)
    assert (
        recipe.loss is not None
        and recipe.loss.table == table["loss"]
        and not recipe.backbone.frozen
    )
    assert recipe.phases[0].epochs == recipe.train.epochs == 10
    assert recipe.loaded.find("losses", "everything.margin")


def test_eight_mistakes_are_eight_sentences(tmp_path: Path, table: dict[str, Any]) -> None:
    (tmp_path / "recipe.toml").write_text(
        f"""
seed = "3"
plugins = ["{table["plugins"][0]}"]

[data]
name = "everything.itms"

[split]
by = "clas"

[backbone]
name = "everything.same"
widht = 3

[head]
embedding_size = 0

[loss]
name = "everything.margin"
margin = "0.1"
scale = 1

[optimizer]
name = "Adamw"

[optimiser]
lr = 1

[evaluate]
metrics = ["recall_at_1", "map_at_s"]
""",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError) as caught:
        read_recipe(tmp_path / "recipe.toml")
    assert sorted(caught.value.problems) == sorted(
        [
            'seed: should be an integer, not "3". Write it without quotes.',
            "[data] name: There is no dataset 'everything.itms'. Did you mean 'everything.items'?",
            (
                '[split] by: should be "given" or "class" or "item", not "clas". Did you mean'
                " 'class'?"
            ),
            "[backbone] widht: everything.same has no such parameter (it has: none).",
            "[head] embedding_size: should be an integer (≥ 1), not 0.",
            '[loss] margin: should be a number, not "0.1". Write it without quotes.',
            caught.value.problems[-2],
            caught.value.problems[-1],
            "[optimiser]: there is no such table (known: "
            + ", ".join(Recipe.model_fields)
            + "). Did you mean 'optimizer'?",
        ]
    )
    assert caught.value.problems[-2].startswith("[optimizer] name: torch.optim has no 'Adamw'")
    assert caught.value.problems[-2].endswith("Did you mean 'AdamW'?")
    assert caught.value.problems[-1].startswith(
        "[evaluate] metrics: There is no metric 'map_at_s'. Did you mean 'map_at_r'?"
    )
    assert str(caught.value).startswith(f"{tmp_path / 'recipe.toml'} has 9 problems:\n  - ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"loss": "everything.margin"},
            (
                '[loss]: should be a table, not "everything.margin". Write: [loss] name ='
                ' "everything.margin", or in Python loss={"name": "everything.margin"}.'
            ),
        ),
        ({"loss": {"scale": 1}}, '[loss] must name a loss: name = "PLUGIN.NAME".'),
        ({"loss": {"name": 3}}, '[loss] must name a loss: name = "PLUGIN.NAME".'),
        (
            {"loss": {"name": "everything.items"}},
            "[loss] name: There is no loss 'everything.items'. 'everything.items' is a dataset.",
        ),
        ({"data": None}, "[data]: is required (a table)."),
        (
            {"backbone": {"name": "everything.same", "frozen": "yes"}},
            '[backbone] frozen: should be true or false, not "yes".',
        ),
        ({"plugins": "mine.py"}, 'plugins: should be a list of text, not "mine.py".'),
        ({"name": 3}, "name: should be text, not 3."),
        ({"head": {"hidden": [64, 0]}}, "[head] hidden.1: should be an integer (≥ 1), not 0."),
        ({"head": 3}, "[head]: should be a table, not 3."),
        (
            {"head": {"embeding_size": 3}},
            (
                "[head] embeding_size: unknown key (known: embedding_size, hidden, normalize,"
                " identity). Did you mean 'embedding_size'?"
            ),
        ),
        (
            {"split": {"test": "half"}},
            '[split] test: should be a number (≥ 0, < 1) or list of (text or integer), not "half".',
        ),
        (
            {"split": {"test": 1.5}},
            "[split] test: should be a number (≥ 0, < 1) or list of (text or integer), not 1.5.",
        ),
        (
            {"split": {"test": [True]}},
            "[split] test: should be a number (≥ 0, < 1) or list of (text or integer), not [true].",
        ),
        ({"split": {"validation": 1}}, "[split] validation: should be a number (≥ 0, < 1), not 1."),
        ({"sampler": {"classes": 1}}, "[sampler] classes: should be an integer (≥ 2), not 1."),
        (
            {"augmentation": {"crop_scale": [0.5]}},
            "[augmentation] crop_scale: should be a list [number, number], not [0.5].",
        ),
        (
            {"augmentation": {"crop_scale": [0.5, 0.2]}},
            "[augmentation]: crop_scale must be two numbers 0 < smallest ≤ largest ≤ 1.",
        ),
        ({"optimizer": {"lr": float("inf")}}, "[optimizer] lr: should be a number (> 0), not inf."),
        ({"optimizer": {"lr": float("nan")}}, "[optimizer] lr: is nan, which is not a number."),
        (
            {"optimizer": {"lr_factor": {"hed": 2}}},
            (
                "[optimizer] lr_factor.hed: unknown key (known: backbone, head, combiner, loss,"
                " generator). Did you mean 'head'?"
            ),
        ),
        (
            {"optimizer": {"lr_factor": {"head": -2}}},
            "[optimizer] lr_factor.head: should be a number (≥ 0), not -2.",
        ),
        (
            {"optimizer": {"options": {"weight_dcay": 1}}},
            "[optimizer] options.weight_dcay: AdamW takes no such argument (it takes: ",
        ),
        ({"schedule": {"name": "cosin"}}, "[schedule] name: there is no schedule 'cosin' (known: "),
        (
            {"schedule": {"name": "StepLR", "options": {"step_size": 2}, "warmup": 0.1}},
            "[schedule] warmup: goes with constant, linear and cosine, not with StepLR.",
        ),
        ({"phase": [{"epochs": 0}]}, "[[phase]] 0.epochs: should be an integer (≥ 1), not 0."),
        (
            {"phase": [{"train": ["heads"]}]},
            (
                '[[phase]] 0.train.0: should be "backbone" or "head" or "combiner" or "loss" or'
                ' "generator", not "heads". Did you mean \'head\'?'
            ),
        ),
        ({"phase": [{"train": []}]}, "[[phase]] train: train must name at least one part."),
        (
            {"phase": [{"epoch": 1}]},
            (
                "[[phase]] 0.epoch: unknown key (known: name, epochs, train, lr, generator_lr,"
                " synthetic). Did you mean 'epochs'?"
            ),
        ),
        ({"phase": {"epochs": 1}}, "[[phase]]: should be a list of table, not { epochs = 1 }."),
        (
            {"train": {"precision": "bf61"}},
            (
                '[train] precision: should be "no" or "bf16" or "fp16", not "bf61". Did you mean'
                " 'bf16'?"
            ),
        ),
        (
            {"train": {"device": None}},
            '[train] device: should be "auto" or "cpu" or "cuda", not none.',
        ),
        (
            {"evaluate": {"metrics": ["everything.bst"]}},
            (
                "[evaluate] metrics: There is no metric 'everything.bst'. Did you mean"
                " 'everything.best'?"
            ),
        ),
        (
            {"evaluate": {"metrics": ["recall_at_0"]}},
            "[evaluate] metrics: recall_at_0 looks at no neighbour; the smallest is recall_at_1.",
        ),
        (
            {"evaluate": {"metrics": ["map", {"name": "core.recal_at", "k": 5}]}},
            (
                "[evaluate] metrics.1 name: There is no metric 'core.recal_at'. Did you mean"
                " 'core.recall_at'?"
            ),
        ),
        (
            {"evaluate": {"metrics": [{"name": "recal_at", "k": 5}]}},
            "[evaluate] metrics.0 name: There is no metric 'recal_at'. Did you mean 'recall_at'?",
        ),
        (
            {"evaluate": {"metrics": [{"name": "core.recall_at", "kk": 5}]}},
            (
                "[evaluate] metrics.0 kk: core.recall_at has no such parameter (it has: k). Did you"
                " mean 'k'?"
            ),
        ),
        (
            {"evaluate": {"metrics": [{"name": "core.recall_at", "k": 0}]}},
            "[evaluate] metrics.0 k: should be an integer (≥ 1), not 0.",
        ),
        (
            {"evaluate": {"metrics": [{"name": "core.recall_at", "k": "5"}]}},
            '[evaluate] metrics.0 k: should be an integer (≥ 1), not "5". Write it without quotes.',
        ),
        (
            {"evaluate": {"metrics": [{"name": "map_at_r", "k": 5}]}},
            "[evaluate] metrics.0 k: core.map_at_r has no such parameter (it has: none).",
        ),
        (
            {"evaluate": {"metrics": [{"k": 5}]}},
            '[evaluate] metrics.0 must name a metric: name = "PLUGIN.NAME".',
        ),
        (
            {"evaluate": {"metrics": ["map", 3]}},
            "[evaluate] metrics.1: should be text or table, not 3.",
        ),
    ],
)
def test_one_mistake_is_one_sentence(
    table: dict[str, Any], problems: Problems, changes: dict[str, Any], sentence: str
) -> None:
    plugins = table["plugins"]
    merged = {k: v for k, v in {**table, **changes}.items() if v is not None}
    if merged.get("plugins") != plugins:  # the names of its parts are unknown without it
        merged.update(
            data={"name": "core.digits"},
            backbone={"name": "core.convnet"},
            loss={"name": "pml.multi_similarity"},
        )
    found = problems(merged)
    assert len(found) == 1, found
    assert found[0].startswith(sentence) and found[0].endswith((".", "?"))


COMBINER = {"combiner": {"name": "everything.cosine"}}
GENERATOR = {"generator": {"name": "everything.middle"}}
OWN = {**GENERATOR, "generator_optimizer": {"lr": 0.5}}
FIXED = {"loss": {"name": "everything.fixed"}}


def several(*losses: str) -> dict[str, Any]:
    return {
        "loss": {
            "name": "everything.several",
            "losses": [
                {"name": f"everything.{x}"} | ({"scale": 1} if x == "margin" else {})
                for x in losses
            ],
        }
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**COMBINER, **FIXED},
            [
                "[combiner] everything.cosine",
                "takes a `distance`, and everything.fixed takes none",
                "everything.margin",
            ],
        ),
        (
            {**COMBINER, **several("margin", "fixed")},
            ["[combiner] everything.cosine", "everything.several takes none"],
        ),
        (
            {**GENERATOR, **FIXED},
            [
                "[generator] everything.middle",
                "everything.fixed takes no `ref_emb`",
                "everything.margin",
            ],
        ),
        ({**GENERATOR, **several("margin", "fixed")}, ["everything.several takes no `ref_emb`"]),
        (
            {"miner": {"name": "everything.all_pairs"}, **FIXED},
            [
                "[miner] everything.all_pairs",
                "everything.fixed has no use for them",
                "everything.margin",
            ],
        ),
        (
            {
                **COMBINER,
                "loss": {
                    "name": "everything.margin",
                    "scale": 1,
                    "distance": "everything.euclidean",
                },
            },
            ["[loss] distance: [combiner] everything.cosine is the distance already"],
        ),
        (
            {**COMBINER, "head": {"identity": True}},
            ["[head] identity: a [combiner] brings its own head"],
        ),
        (
            {**COMBINER, "head": {"hidden": [8]}},
            ["[head] hidden: a [combiner] brings its own head"],
        ),
        (
            {**COMBINER, "head": {"normalize": False}},
            ["[head] normalize: a [combiner] brings its own head"],
        ),
        ({"learner": {"name": "everything.centre"}}, ["either a [loss] or a [learner], not both"]),
        ({"loss": None}, ["either a [loss] or a [learner]; it has neither"]),
        (
            {
                "loss": None,
                "learner": {"name": "everything.centre"},
                "miner": {"name": "everything.all_pairs"},
            },
            ["[miner] goes with a [loss]"],
        ),
        (
            {
                "loss": None,
                "learner": {"name": "everything.centre"},
                "augmentation": {"horizontal_flip": 0.5},
            },
            ["[augmentation]", "with a [learner]"],
        ),
        (
            {
                "backbone": {"name": "everything.same", "frozen": True},
                "augmentation": {"horizontal_flip": 0.5},
            },
            [
                "[augmentation] changes images anew in each epoch",
                "[backbone] frozen = true",
                "computed once",
            ],
        ),
        (
            {
                "backbone": {"name": "everything.same", "frozen": True},
                "phase": [{"train": ["backbone"]}],
            },
            ["[[phase]] train: trains only the backbone", "frozen = true"],
        ),
        (
            {"phase": [{"train": ["generator"]}]},
            ["trains only a generator, and the recipe has no [generator]"],
        ),
        (
            {"generator_optimizer": {"lr": 1}},
            ["[generator_optimizer] is of no use without a [generator]"],
        ),
        (
            {**OWN, "optimizer": {"lr_factor": {"generator": 2, "head": 3}}},
            ["[optimizer] lr_factor.generator", "[generator_optimizer]"],
        ),
        (
            {**GENERATOR, "generator_optimizer": {"lr_factor": {"generator": 2, "head": 3}}},
            ["[generator_optimizer] lr_factor.head", "[optimizer] lr_factor"],
        ),
        (
            {**OWN, "phase": [{"train": ["generator"], "lr": 0.1}]},
            ["[[phase]] train: lr is instead of [optimizer] lr", "Use generator_lr"],
        ),
        (
            {"phase": [{"generator_lr": 0.1}]},
            ["[[phase]] train: generator_lr is of no use without a [generator]"],
        ),
        (
            {**OWN, "phase": [{"train": ["head"], "generator_lr": 0.1}]},
            [
                "[[phase]] train: generator_lr",
                "the generator does not train",
                'add "generator" to train',
            ],
        ),
        ({"train": {"real_weight": 1}}, ["[train] real_weight is of no use without a [generator]"]),
        (
            {"train": {"loss_weight": 2}},
            ["[train] loss_weight is of no use without a [generator] or a [combiner]"],
        ),
        ({"train": {"coupling": "joint"}}, ["[train] coupling is of no use without a [generator]"]),
        (
            {"train": {"patience": 3}, "split": {"by": "class", "validation": 0}},
            ["[train] patience needs a validation part", "[split] validation above 0"],
        ),
    ],
)
def test_what_cannot_go_together(
    table: dict[str, Any], problems: Problems, changes: dict[str, Any], words: list[str]
) -> None:
    found = problems({k: v for k, v in {**table, **changes}.items() if v is not None})
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    "changes",
    [
        COMBINER,
        {**COMBINER, "train": {"loss_weight": 2}},
        {**GENERATOR, "train": {"loss_weight": 2}},
        {**COMBINER, **several("margin", "margin")},
        {**GENERATOR, **several("margin")},
        {
            **GENERATOR,
            "train": {"real_weight": 1, "coupling": "joint"},
            "generator_optimizer": {"lr": 1},
        },
        {
            **OWN,
            "phase": [
                {"train": ["generator"], "generator_lr": 0.1},
                {"lr": 0.1, "generator_lr": 0.2},
            ],
        },
        {
            **GENERATOR,
            "optimizer": {"lr_factor": {"generator": 2}},
            "phase": [{"train": ["generator"], "lr": 0.1}],
        },
        {"miner": {"name": "everything.all_pairs"}},
        {"augmentation": {"horizontal_flip": 0.5}},
        {"backbone": {"name": "everything.same", "frozen": True}, "augmentation": {}},
        {"loss": None, "learner": {"name": "everything.centre"}},
        {"evaluate": {"metrics": ["everything.best", "recall_at_17"]}},
        {
            "evaluate": {
                "metrics": [
                    "map",
                    {"name": "core.recall_at", "k": 5},
                    {"name": "precision_at", "k": 2},
                ]
            }
        },
        {"split": {"test": [1, "2"]}, "head": {"identity": True}},
        {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}, "lr_factor": {"head": 10}}},
        {"schedule": {"name": "StepLR", "options": {"step_size": 2}}},
    ],
)
def test_what_does_go_together(
    table: dict[str, Any], problems: Problems, changes: dict[str, Any]
) -> None:
    assert problems({k: v for k, v in {**table, **changes}.items() if v is not None}) == ()


def test_a_wrong_table_hides_nothing_of_the_others_and_invents_nothing(
    table: dict[str, Any], problems: Problems
) -> None:
    found = problems(
        {
            **table,
            **COMBINER,
            "loss": {"name": "everything.fixed"},
            "head": {"identity": True, "hidden": 3},
            "train": {"patience": 1, "epochs": 0},
            "split": {"by": "class", "validation": 0.0},
        }
    )
    assert len(found) == 5, found
    assert len(problems({**table, "loss": 3})) == 1


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    def refused(content: bytes | None) -> str:
        path = tmp_path / "recipe.toml"
        if content is None:
            path = tmp_path / "none.toml"
        else:
            path.write_bytes(content)
        with pytest.raises(RecipeError) as caught:
            read_recipe(path)
        assert str(path) in str(caught.value) and len(caught.value.problems) == 1
        return caught.value.problems[0]

    assert refused(None) == "it cannot be read: No such file or directory."
    assert refused(b"\xff\xfe\x00") == "it cannot be read: it is not UTF-8 text."
    assert refused(b"[data\n").startswith("it is not valid TOML: Expected ']'")
    assert "line 2" in refused(b"a = 1\nb = \n")
    assert refused(b"a = " + b"[" * 100_000) == "it is not valid TOML: it is nested too deeply."
    assert refused(b"a = " + b"9" * 5000).startswith("it is not valid TOML: Exceeds the limit")
    with pytest.raises(RecipeError, match="Is a directory"):
        read_recipe(tmp_path)


def test_a_byte_order_mark_and_windows_lines_are_no_mistake(tmp_path: Path) -> None:
    text = (
        '\ufeffname = "é"\r\n[data]\r\nname = "core.digits"\r\n[backbone]\r\nname ='
        ' "core.convnet"\r\n[loss]\r\nname = "pml.contrastive"\r\n'
    )
    (tmp_path / "recipe.toml").write_bytes(text.encode())
    assert read_recipe(tmp_path / "recipe.toml").name == "é"


def test_dates_have_no_place(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("name = 2024-01-01\n")
    with pytest.raises(
        RecipeError,
        match=r"name: is a date or time, which nothing here takes. If it is text, put it in quotes",
    ):
        read_recipe(tmp_path / "recipe.toml")


def test_plugin_files_are_found_beside_the_recipe_then_here(
    tmp_path: Path, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    recipe = tmp_path / "sub" / "recipe.toml"
    source = Path(table["plugins"][0]).read_text(encoding="utf-8")
    text = (
        '{}[data]\nname = "{p}.items"\n[backbone]\nname = "{p}.same"\n[loss]\nname = "{p}.fixed"\n'
    )
    (tmp_path / "sub" / "beside.py").write_text(source)
    (tmp_path / "here.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    recipe.write_text(text.format('plugins = ["beside.py"]\n', p="beside"))
    assert read_recipe(Path("sub/recipe.toml")).plugins == [str(tmp_path / "sub" / "beside.py")]
    recipe.write_text(text.format('plugins = ["here.py"]\n', p="here"))
    assert read_recipe(recipe).plugins == [str(tmp_path / "here.py")]
    # given by --plugin as well as in the recipe: the same file once
    assert len(read_recipe(recipe, plugins=["here.py"]).plugins) == 2
    recipe.write_text(text.format("", p="here"))
    assert read_recipe(recipe, plugins=["here.py"]).plugins == [str(tmp_path / "here.py")]
    recipe.write_text(text.format('plugins = ["gone.py"]\n', p="gone"))
    with pytest.raises(PluginError, match=r"gone\.py does not exist"):
        read_recipe(recipe)
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe, ["seed=a"])
    assert len(caught.value.problems) == 2


def test_a_recipe_keeps_its_plugins_and_is_compared_by_what_it_says(table: dict[str, Any]) -> None:
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


def test_frozen_is_the_host_s_and_never_the_backbone_s(table: dict[str, Any]) -> None:
    recipe = check_recipe({**table, "backbone": {**table["backbone"], "frozen": True}})
    assert recipe.backbone.frozen and "frozen" not in recipe.backbone.table
    assert tomllib.loads(to_toml(recipe))["backbone"] == {**table["backbone"], "frozen": True}
    assert recipe.build("backbone", features=2).features == 2


def test_every_problem_of_the_metrics_is_told_at_once(
    table: dict[str, Any], problems: Problems
) -> None:
    wrong = [
        "recal_at_1",
        {"name": "core.recall_at", "k": 0, "depth": 3},
        {"name": "core.precison_at"},
    ]
    found = problems({**table, "evaluate": {"metrics": wrong}})
    assert [sentence.partition(": ")[0] for sentence in found] == [
        "[evaluate] metrics",
        "[evaluate] metrics.1 depth",
        "[evaluate] metrics.1 k",
        "[evaluate] metrics.2 name",
    ]


def test_a_metric_s_parameters_survive_set_and_toml(tmp_path: Path, table: dict[str, Any]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    entry = '{ name = "core.recall_at", k = 5 }'
    for text in (f'["map_at_r", {entry}]', f"[{entry}]"):
        recipe = read_recipe(path, [f"evaluate.metrics={text}"])
        assert recipe.evaluate.metrics[-1] == {"name": "core.recall_at", "k": 5}
        again = tmp_path / "again.toml"
        again.write_text(to_toml(recipe), encoding="utf-8")
        assert read_recipe(again) == recipe
        last = len(recipe.evaluate.metrics) - 1
        changed = read_recipe(again, [f"evaluate.metrics.{last}.k=7"])
        assert changed.evaluate.metrics[-1] == {"name": "core.recall_at", "k": 7}
