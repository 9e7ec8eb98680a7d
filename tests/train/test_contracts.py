"""A part that breaks its contract is one sentence: the plugin's name, what it gave, what it should
give; never a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from retrieval.errors import DataError, PluginError
from retrieval.recipe.read import check_recipe
from retrieval.training.check import run_one_batch
from retrieval.training.trainer import train

BROKEN = str(Path(__file__).with_name("broken.py"))
BASE: dict[str, Any] = {
    "plugins": [BROKEN],
    "data": {"name": "broken.items"},
    "split": {"by": "item"},
    "sampler": {"classes": 3, "items": 4, "batches": 1},
    "backbone": {"name": "broken.same"},
    "head": {"embedding_size": 4},
    "loss": {"name": "broken.loss"},
    "train": {"epochs": 1},
    "evaluate": {"metrics": ["recall_at_1"]},
}


def of(part: str, how: str) -> dict[str, Any]:
    return {"name": f"broken.{part}", "how": how}


def combined(how: str) -> dict[str, Any]:
    return {"combiner": of("combiner", how), "loss": {"name": "broken.measured"}}


LOSSES = [
    (
        of("loss", "vector"),
        ["gave a tensor of shape (12,) and type float32", "must give a scalar", "Take its mean."],
    ),
    (of("loss", "float"), ["must give a scalar", "Do not call item()"]),
    (of("loss", "dictionary"), ["gave a dict;", "define compute_loss"]),
    (of("loss", "none"), ["gave None;"]),
    (of("loss", "nan"), ["On a trial batch of phase", "loss is nan", "loss broken.loss"]),
    (of("loss", "detached"), ["without a gradient", "Was it detached"]),
    (
        of("loss", "raises"),
        ["failed: KeyError: 'no such key'", "broken.py, line ", "retrieval --debug"],
    ),
    (of("loss", "memory"), ["ran out of memory", "[sampler] classes × items"]),
    (
        of("loss", "in_place"),
        ["The gradient of loss broken.loss failed: RuntimeError", "inplace operation"],
    ),
    (
        {"name": "broken.no_forward"},
        ["loss broken.no_forward failed: NotImplementedError: it defines no forward"],
    ),
    ({"name": "broken.wrong_call"}, ["broken.wrong_call failed: TypeError", "positional argument"]),
    (
        {"name": "broken.object"},
        ["loss broken.object is an object of type int, which cannot be called"],
    ),
]
MINERS = [
    ("lists", ["gave a tuple of 3 (a list of 4", "int64 tensors"]),
    ("two", ["gave a tuple of 2", "it must give (anchor, positive, negative) or"]),
    ("high", ["indices from 12 to 15, and there are 12 items"]),
    ("floats", ["type float32"]),
    ("lengths", ["lengths 4, 3, 4", "of equal length"]),
    ("device", ["on meta (the codes are on cpu)"]),
]
OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"data": of("items", "short")},
        ["dataset broken.items", "45 labels, 48 keys, 48 arrays, 7 files"],
    ),
    ({"data": of("items", "flat")}, ["arrays has the shape (48,), and must be (N, F)"]),
    ({"data": of("items", "kind")}, ["kind is 'pictures'", '"image" or "features"']),
    (
        {"backbone": of("same", "width")},
        ["backbone broken.same gave a tensor of shape (12, 5)", "shape (12, 7)"],
    ),
    ({"backbone": of("same", "preprocessing")}, ["preprocessing = a tuple of 2 (8, 8)"]),
    ({"backbone": of("same", "raises")}, ["backbone broken.same", "TypeError"]),
    (
        {"generator": of("generator", "narrow")},
        ["generator broken.generator gave", "a synthetic feature a triplet"],
    ),
    (
        {"generator": of("generator", "objective")},
        ["generator broken.generator's objective gave", "Take its mean."],
    ),
    ({"generator": of("generator", "replaces")}, ["has replaces = 'anchor'"]),
    (
        {"generator": of("generator", "bind")},
        ["generator broken.generator, called as bind(head), failed"],
    ),
    (combined("no_head"), ["combiner broken.combiner gave None as the head"]),
    (combined("flat"), ["combiner broken.combiner's compute_mat gave a tensor of shape (6,)"]),
    (
        combined("rows"),
        ["combiner broken.combiner's pairwise_distance gave a tensor of shape (3, 3)"],
    ),
    (
        combined("objective"),
        ["combiner broken.combiner gave a tensor of shape ()", "a scalar (or None), and metrics"],
    ),
    (combined("metrics"), ["combiner broken.combiner gave", "the figure 'width'"]),
    (
        {**combined("right"), "combiner": {"name": "broken.no_build_head"}},
        ["must define build_head(features)"],
    ),
    (
        {"loss": None, "learner": of("learner", "fit")},
        ["learner broken.learner failed: AttributeError: nothing to"],
    ),
    (
        {"loss": None, "learner": of("learner", "refuses")},
        ["broken.learner refuses", "do not serve."],
    ),
    (
        {"loss": None, "learner": of("learner", "alone")},
        ["learner broken.learner gave a Linear from to_model_parts"],
    ),
    ({"loss": None, "learner": of("learner", "combiner")}, ["gave 3 as its combiner"]),
    ({"loss": None, "learner": {"name": "broken.no_parts"}}, ["without transform, to_model_parts"]),
    (
        {"evaluate": {"metrics": ["broken.number"]}},
        ["metric broken.number gave 1.0; it must give one number per query"],
    ),
    ({"evaluate": {"metrics": ["broken.nan"]}}, ["metric broken.nan gave NaN or infinite values"]),
]
CASES = [
    *(({"loss": loss}, words) for loss, words in LOSSES),
    *(({"miner": of("miner", how)}, ["The miner broken.miner", *words]) for how, words in MINERS),
    *OTHERS,
]


def table(**tables: Any) -> dict[str, Any]:
    return {k: v for k, v in {**BASE, **tables}.items() if v is not None}


@pytest.mark.parametrize(
    ("tables", "words"), CASES, ids=lambda x: json.dumps(x)[:70] if isinstance(x, dict) else ""
)
def test_each_is_one_sentence(tables: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    recipe = check_recipe(table(**tables))
    with pytest.raises((PluginError, DataError)) as caught:
        train(tmp_path / "run", recipe)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", "?", "…")), sentence
    assert not sentence.endswith(".."), sentence
    for word in words:
        assert word in sentence, sentence


@pytest.mark.parametrize(
    "tables",
    [
        {"miner": of("miner", "right")},
        {"generator": of("generator", "right")},
        combined("right"),
        {"loss": None, "learner": of("learner", "right")},
        {"evaluate": {"metrics": ["broken.right"]}},
    ],
    ids=lambda tables: next(reversed(tables)),
)
def test_the_same_parts_unbroken_train(tables: dict[str, Any], tmp_path: Path) -> None:
    recipe = check_recipe(table(**tables))
    assert train(tmp_path / "run", recipe).best.is_file()


@pytest.mark.parametrize("hook", ["run_start(run)", "epoch_end(run, epoch)", "run_end(metrics)"])
def test_a_hook_that_fails(hook: str, tmp_path: Path) -> None:
    file = tmp_path / "hooked.py"
    file.write_text(
        f"from retrieval.plugin import hookimpl\n@hookimpl\ndef retrieval_{hook}:\n    return"
        " {}['gone']\n"
    )
    recipe = check_recipe(table(plugins=[BROKEN, str(file)]))
    with pytest.raises(PluginError) as caught:
        train(tmp_path / "run", recipe)
    name = f"retrieval_{hook.partition('(')[0]}"
    place = f"({file}, line 4)."
    assert str(caught.value).startswith(f"A plugin's {name} failed: KeyError: 'gone' {place}")


def test_on_the_command_line(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(tomli_w.dumps(table(loss=of("loss", "raises"))))
    for command in ("check", "train"):
        outcome = cli(command, "recipe.toml")
        assert outcome.code == 2 and "Traceback" not in outcome.err
        assert outcome.err.startswith(
            "Error: The loss broken.loss failed: KeyError: 'no such key' ("
        )
    traced = cli("--debug", "check", "recipe.toml")
    assert traced.code == 2 and "Traceback (most recent call last)" in traced.err
    assert (
        "raise" in traced.err
        and traced.err.splitlines()[-1] == cli("check", "recipe.toml").err.strip()
    )
    for value in (
        "seed=99999999999999999999",
        "split.seed=-99999999999999999999",
        "train.epochs=1e400",
        "head.embedding_size=9223372036854775808",
    ):
        outcome = cli("check", "recipe.toml", "--set", value)
        assert outcome.code == 2 and "Traceback" not in outcome.err, outcome
        assert f"{value.partition('=')[0].rpartition('.')[2]}: " in outcome.err
    huge = cli("check", "recipe.toml", "--set", "head.embedding_size=9000000000000000")
    assert huge.code == 2 and "[head] embedding_size = 9000000000000000" in huge.err


NARROW = {"backbone": of("same", "width"), "loss": None, "learner": of("learner", "right")}
BEFORE_TRAINING = [
    (
        {"loss": None, "learner": of("learner", "refuses")},
        ["broken.learner refuses", "do not serve."],
    ),
    (NARROW, ["backbone broken.same gave", "of shape (18, 7)"]),
    (
        {**NARROW, "backbone": of("same", "raises")},
        ["backbone broken.same failed: TypeError", "broken.py, line "],
    ),
    ({"loss": of("loss", "nan")}, ["loss is nan (loss broken.loss)"]),
]


@pytest.mark.parametrize(
    ("tables", "words"),
    BEFORE_TRAINING,
    ids=lambda x: json.dumps(x)[:70] if isinstance(x, dict) else "",
)
def test_check_says_what_train_says(tables: dict[str, Any], words: list[str]) -> None:
    recipe = check_recipe(table(**tables))
    with pytest.raises((PluginError, DataError)) as caught:
        run_one_batch(recipe)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", "?", "…")), sentence
    assert not sentence.endswith(".."), sentence
    for word in words:
        assert word in sentence, sentence
