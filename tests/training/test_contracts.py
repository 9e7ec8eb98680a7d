"""If a plugin's part breaks its contract, the error is one sentence and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from refusals import refusal
from retrieval.errors import DataError, PluginError
from retrieval.model.model import combiner_warnings
from retrieval.recipe.read import check_recipe
from retrieval.training.check import run_one_batch
from retrieval.training.trainer import train_run

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


FITTED = {"loss": None, "learner": of("learner", "right")}
FAULTS = {
    ("loss", "loss"): {
        "vector": ["gave a tensor of shape (12,) and type float32", "a scalar", "Take its mean."],
        "float": ["must give a scalar", "Do not call item()"],
        "dictionary": ["gave a dict;", "define compute_loss"],
        "none": ["gave None;"],
        "nan": ["On a trial batch of phase", "loss is nan", "loss broken.loss"],
        "detached": ["without a gradient", "Was it detached"],
        "raises": ["failed: KeyError: 'no such key'", "broken.py, line ", "retrieval --debug"],
        "memory": ["ran out of memory", "[sampler] classes × items"],
        "in_place": ["The gradient of loss broken.loss failed: RuntimeError", "inplace operation"],
    },
    ("miner", "miner"): {
        "lists": ["gave a tuple of 3 (a list of 4", "int64 tensors"],
        "two": ["gave a tuple of 2", "it must give (anchor, positive, negative) or"],
        "high": ["indices from 12 to 15, but the 12 items are numbered"],
        "floats": ["type float32"],
        "lengths": ["shape (3,)", "of equal length"],
        "device": ["on meta (the codes are on cpu)"],
    },
    ("backbone", "same"): {
        "width": ["gave a tensor of shape (12, 5)", "shape (12, 7)"],
        "preprocessing": ["preprocessing = a tuple of 2 (8, 8)"],
        "raises": ["TypeError"],
    },
    ("generator", "generator"): {
        "narrow": ["generator broken.generator gave", "a synthetic feature a triplet"],
        "objective": ["generator broken.generator's objective gave", "Take its mean."],
        "replaces": ["has replaces = 'anchor'"],
        "bind": ["generator broken.generator, called as bind(head), failed"],
    },
}
CALLS = {
    "no_forward": ["failed: NotImplementedError: it defines no forward"],
    "wrong_call": ["failed: TypeError", "positional argument"],
    "object": ["is an object of type int, which cannot be called"],
}
COMBINERS = {
    "no_head": ["combiner broken.combiner gave None as the head"],
    "flat": ["combiner broken.combiner's compute_mat gave a tensor of shape (6,)"],
    "rows": ["combiner broken.combiner's pairwise_distance gave a tensor of shape (3, 3)"],
    "objective": ["gave a tensor of shape ()", "a scalar (or None), and metrics"],
    "metrics": ["combiner broken.combiner gave", "the metric 'width'"],
}
LEARNERS = {
    "fit": ["learner broken.learner failed: AttributeError: nothing to"],
    "refuses": ["broken.learner cannot be fitted on 18 items", "do not serve."],
    "alone": ["learner broken.learner gave a Linear from to_model_parts"],
    "combiner": ["gave 3 as its combiner"],
}
METRICS = {
    "number": ["metric broken.number gave 1.0; it must give one number per query"],
}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({key: of(part, how)}, [f"{key} broken.{part}", *words])
        for (key, part), faults in FAULTS.items()
        for how, words in faults.items()
    ),
    *(({"loss": {"name": f"broken.{n}"}}, [f"broken.{n}", *words]) for n, words in CALLS.items()),
    *((combined(how), words) for how, words in COMBINERS.items()),
    (
        {**combined("right"), "combiner": {"name": "broken.no_build_head"}},
        ["must define build_head(features)"],
    ),
    *(({**FITTED, "learner": of("learner", how)}, words) for how, words in LEARNERS.items()),
    ({**FITTED, "learner": {"name": "broken.no_parts"}}, ["without transform, to_model_parts"]),
    *(({"evaluate": {"metrics": [f"broken.{how}"]}}, words) for how, words in METRICS.items()),
]


def table(**tables: Any) -> dict[str, Any]:
    return {k: v for k, v in {**BASE, **tables}.items() if v is not None}


def check_sentence(call: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((PluginError, DataError)) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", "?", "…")), sentence
    assert not sentence.endswith(".."), sentence
    assert all(word in sentence for word in words), sentence


def named(case: Any) -> str:
    return json.dumps(case)[:70] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("tables", "words"), CASES, ids=named)
def test_a_broken_contract_is_one_sentence(tables, words, tmp_path):
    check_sentence(lambda: train_run(tmp_path / "run", check_recipe(table(**tables))), words)


@pytest.mark.parametrize(
    "tables",
    [
        {"miner": of("miner", "right"), "generator": of("generator", "right")},
        {**combined("right"), "evaluate": {"metrics": ["broken.right"]}},
        FITTED,
    ],
    ids=["generator", "combiner", "learner"],
)
def test_the_same_parts_unbroken_train(tables, tmp_path):
    assert train_run(tmp_path / "run", check_recipe(table(**tables))).best.is_file()


@pytest.mark.parametrize("hook", ["run_start(run)", "epoch_end(run, epoch)", "run_end(metrics)"])
def test_a_hook_that_fails_is_one_sentence(hook, tmp_path):
    file = tmp_path / "hooked.py"
    head = "from retrieval.plugin import hookimpl\n@hookimpl\n"
    file.write_text(f"{head}def retrieval_{hook}:\n    return {{}}['gone']\n")
    recipe = check_recipe(table(plugins=[BROKEN, str(file)]))
    says = f"retrieval_{hook.partition('(')[0]} failed: KeyError: 'gone' ({file}, line 4)."
    assert refusal(PluginError, train_run, tmp_path / "run", recipe).startswith(
        f"A plugin's {says}"
    )


def test_commands_exit_with_2_and_show_a_traceback_only_with_debug(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(tomli_w.dumps(table(loss=of("loss", "raises"))))
    for command in ("check", "train"):
        outcome = cli(command, "recipe.toml")
        assert outcome.code == 2 and "Traceback" not in outcome.err
        says = "Error: The loss broken.loss failed: KeyError: 'no such key' ("
        assert outcome.err.startswith(says)
    traced = cli("--debug", "check", "recipe.toml")
    assert traced.code == 2 and "Traceback (most recent call last)" in traced.err
    assert "raise" in traced.err
    assert traced.err.splitlines()[-1] == cli("check", "recipe.toml").err.strip()
    large = "99999999999999999999"
    for value, says in (
        (f"seed={large}", "seed: "),
        (f"split.seed=-{large}", "seed: "),
        ("train.epochs=1e400", "epochs: "),
        ("head.embedding_size=9223372036854775808", "embedding_size: "),
        ("head.embedding_size=9000000000000000", "[head] embedding_size = 9000000000000000"),
    ):
        outcome = cli("check", "recipe.toml", "--set", value)
        assert outcome.code == 2 and "Traceback" not in outcome.err, outcome
        assert says in outcome.err


REFUSES = {**FITTED, "learner": of("learner", "refuses")}
NARROW = {**FITTED, "backbone": of("same", "width")}
RAISES = {**FITTED, "backbone": of("same", "raises")}
BEFORE_TRAINING = [
    (REFUSES, ["broken.learner cannot be fitted on 18 items", "do not serve."]),
    (NARROW, ["backbone broken.same gave", "of shape (18, 7)"]),
    (RAISES, ["backbone broken.same failed: TypeError", "broken.py, line "]),
    ({"loss": of("loss", "nan")}, ["loss is nan (loss broken.loss)"]),
]


@pytest.mark.parametrize(("tables", "words"), BEFORE_TRAINING, ids=named)
def test_check_says_what_train_says(tables, words):
    check_sentence(lambda: run_one_batch(check_recipe(table(**tables))), words)


def test_a_combiner_may_return_one_warning_as_text_and_must_not_return_none():
    class Silent:
        def warnings(self, metrics):
            return metrics.get("warnings")

    assert combiner_warnings(Silent(), {"warnings": "Train longer."}, "It") == ["Train longer."]
    with pytest.raises(PluginError, match="It failed: TypeError: 'NoneType' object is not iter"):
        combiner_warnings(Silent(), {}, "It")
