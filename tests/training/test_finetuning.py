"""Fine-tuning: parameter groups, schedules, averages, LoRA, the monitored metric, the verdict."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RecipeError
from retrieval.export.export_run import export
from retrieval.host.plugins import create
from retrieval.recipe.read import Recipe, check_recipe, read_recipe
from retrieval.run import checkpoint_format
from retrieval.run.open import Run, build_run
from retrieval.run.resume import Position
from retrieval.training.build_optimizers import exempt_names, stages
from retrieval.training.check import run_one_batch
from retrieval.training.process import Monitor, make_accelerator
from retrieval.training.step import Step
from retrieval.training.trainer import train_run
from scipy import stats
from trained_weights import (
    SMALL,
    STILL,
    fit,
    load,
    log,
    moved,
    reported,
    same,
    start,
    summary,
    weights,
)

PLAIN: dict[str, Any] = {**STILL, "sampler": {"classes": 4, "items": 4, "batches": 3}}
HEAD_THEN_WHOLE = [
    {"name": "head", "epochs": 2, "train": ["head", "loss"]},
    {"name": "whole", "epochs": 2, "lr": 1e-4},
]


def step_of(recipe: Recipe, tmp_path: Path) -> Step:
    """The step of a recipe's first phase."""
    run = build_run(tmp_path, recipe)
    return Step(run.model, run.objective, recipe, recipe.phases[0], 3, make_accelerator(recipe))


@pytest.mark.parametrize(
    ("name", "values", "count", "last"),
    [
        ("core.convnet", {}, 6, "stages.17.weight"),
        ("core.torchvision", {"model": "resnet18", "size": 64}, 5, "network.layer4.0.conv1.weight"),
        ("core.timm", {"model": "vit_tiny_patch16_224", "size": 32}, 13, "blocks.11.norm1.weight"),
        ("core.timm", {"model": "tf_efficientnet_lite0", "size": 64}, 9, "conv_head.weight"),
        ("core.timm", {"model": "convnext_atto", "size": 64}, 5, "stages.3.downsample.0.weight"),
    ],
)
def test_the_stages_of_a_net_are_its_blocks(name, values, count, last):
    if name == "core.timm":
        pytest.importorskip("timm")
    net = create("backbone", name, **values)
    by_stage = stages(net)
    assert len(by_stage) == count and by_stage[-1][0].endswith(last)
    names = sorted(name for stage in by_stage for name in stage)
    assert names == sorted(name for name, _ in net.named_parameters())


def test_rates_and_decays_follow_part_stage_pattern_and_dimensions(make, tmp_path):
    optimizer = {
        "lr": 0.01,
        "lr_factor": {"head": 10, "stages:1": 0.5, "backbone.layers.1.*": 3},
        "layer_decay": 0.1,
        "weight_decay": {"backbone": 0.3, "vectors": 0.0},
        "options": {"weight_decay": 0.7},
    }
    step = step_of(make(backbone={"name": "toolbox.net"}, optimizer=optimizer), tmp_path)
    names = {id(p): name for name, p in step.model.named_parameters()}
    actual = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in step.optimizers["metric"].param_groups
        for p in group["params"]
    }
    expected = {
        "backbone.layers.0.weight": (0.01 * 0.5 * 0.1**2, 0.3),
        "backbone.layers.0.bias": (0.01 * 0.5 * 0.1**2, 0.0),
        "backbone.layers.1.weight": (0.01 * 3 * 0.1**2, 0.0),
        "backbone.layers.1.bias": (0.01 * 3 * 0.1**2, 0.0),
        "backbone.layers.4.weight": (0.01 * 0.1, 0.3),
        "backbone.layers.4.bias": (0.01 * 0.1, 0.0),
        "head.0.weight": (0.1, 0.7),
        "head.0.bias": (0.1, 0.0),
    }
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value), name


def test_tokens_and_positions_of_a_transformer_count_as_vectors():
    """They are the parameters that timm's own recipes do not decay, and the registers."""
    pytest.importorskip("timm")
    net = create("backbone", "core.timm", model="vit_little_patch16_reg4_gap_256", pool="mean")
    undecayed = exempt_names(net) & {name for name, _ in net.named_parameters()}
    assert undecayed == {"network.network.pos_embed", "network.network.reg_token"}
    listed = {f"network.network.{name}" for name in net.network.network.no_weight_decay()}
    assert listed <= exempt_names(net)


def test_a_frozen_stage_keeps_weights_and_batch_statistics(make, tmp_path):
    recipe = make(phase=[{"name": "upper", "epochs": 1, "freeze": "stages:1"}])
    changed = moved(start(tmp_path / "a", recipe), weights(fit(tmp_path, recipe)))
    assert {"model.backbone.layers.4.weight", "model.head.0.weight"} <= changed
    lower = ("model.backbone.layers.0", "model.backbone.layers.1")
    assert not [name for name in changed if name.startswith(lower)]


UNVALIDATED = {"split": {"by": "class", "validation": 0.0}}
PLATEAU = {"name": "ReduceLROnPlateau"}
FROZEN = {"backbone": {**STILL["backbone"], "frozen": True}}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"optimizer": {"lr_factor": {"backbone.layer.*": 2}}},
            "lr_factor: no parameter's name matches 'backbone.layer.*'",
        ),
        ({"phase": [{"freeze": "stages:9"}]}, "freeze: stages:9, but the backbone has only 2 st"),
        ({"schedule": {"warmup": "9 epochs"}}, "9 epochs takes 27 steps, .*'train' has only 6"),
        ({"phase": [{"freeze": ["backbone", "head", "loss"]}]}, "has parameters to train"),
    ],
)
def test_selectors_and_steps_that_the_model_does_not_have_are_refused(
    make, tmp_path, tables, sentence
):
    with pytest.raises(RecipeError, match=sentence):
        step_of(make(**tables), tmp_path)


def test_the_rate_rises_in_the_warmup_and_the_run_says_how_long(make, tmp_path):
    recipe = make(**PLAIN, schedule={"name": "linear", "warmup": "2 steps"}, train={"epochs": 1})
    _, lines = reported(tmp_path / "run", recipe)
    note = "note: in phase 'train' the learning rate rises for 2 of 3 steps (warmup = \"2 steps\")."
    assert note in lines
    step, rates = step_of(make(**PLAIN, schedule={"warmup": "1 epochs"}), tmp_path), []
    for _ in range(4):
        step.update()
        rates.append(step.rates()["head"])
    assert rates == pytest.approx([5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_plateau_of_the_monitored_metric_lowers_the_rate(make, tmp_path):
    schedule = {**PLATEAU, "options": {"patience": 0, "factor": 0.5}}
    split, options = {"by": "class", "validation": 0.3}, {"epochs": 4}
    recipe = make(**PLAIN, schedule=schedule, optimizer={"lr": 1e-7}, split=split, train=options)
    lines = log(fit(tmp_path, recipe))
    scores = [line["validation_map_at_r"] for line in lines]
    rate, best, expected = 1e-7, -1.0, []
    for score in scores:
        rate, best = (rate, score) if score > best * (1 + 1e-4) else (rate / 2, best)
        expected.append(rate)
    assert expected[-1] < 1e-7
    # a record has the rate at the end of its epoch
    assert [line["lr"]["head"] for line in lines] == pytest.approx(expected)


def test_the_start_is_kept_if_training_makes_it_worse(make, tmp_path):
    recipe = make(**PLAIN, optimizer={"name": "SGD", "lr": 30.0}, seed=1)
    run, lines = reported(tmp_path / "run", recipe)
    result = summary(run.path)
    assert result["best_epoch"] == 0
    assert result["validation"]["map_at_r"] == result["start"] > result["with_trained"]
    assert not moved(weights(run.path, "best"), start(tmp_path / "again", recipe))
    assert lines[0].startswith("epoch 0 (the start): validation_recall_at_1 0.")
    assert any("No epoch has a better value: the run keeps its initial" in line for line in lines)
    assert not any(line["best"] for line in log(run.path))
    assert not lines[-1].startswith("Only")


def test_the_verdict_says_if_few_classes_were_validated(make, tmp_path):
    split = {"by": "class", "validation": 0.4, "validation_by": "class"}
    tables = {**PLAIN, "split": split, "sampler": {"classes": 3, "items": 4, "batches": 1}}
    _, lines = reported(tmp_path / "run", make(**tables, train={"epochs": 1}))
    assert lines[-1].startswith("The validation part has only 2 classes")


def test_the_verdict_says_whether_the_trained_backbone_beat_the_frozen_one(make, tmp_path):
    run, lines = reported(tmp_path / "two", make(**PLAIN, phase=HEAD_THEN_WHOLE))
    result = summary(run.path)
    scores = [line["validation_map_at_r"] for line in log(run.path)]
    assert result["with_frozen"] == max(scores[:2])
    assert result["with_trained"] == max(scores[2:])
    over_start, over_frozen = result["verdicts"]
    assert (over_start["against"], over_frozen["against"]) == ("start", "with_frozen")
    apart = result["with_trained"] - result["with_frozen"]
    assert over_frozen["difference"] == pytest.approx(apart)
    outside = abs(apart) > over_frozen["half"]
    assert (over_frozen["verdict"] == "undecided") != outside
    (line,) = [line for line in lines if "the frozen backbone with a trained head (" in line]
    assert f"{abs(apart):.4f} ± {over_frozen['half']:.4f} (95 % over classes)" in line
    frozen = log(fit(tmp_path, make(**{**PLAIN, **FROZEN}, train={"epochs": 2}), "frozen"))
    assert [line["validation_map_at_r"] for line in frozen] == scores[:2]


CLASSES = np.linspace(0.2, 0.8, 8)
"""Means of a frozen backbone on eight classes of ten queries."""


def judged(monitor: Monitor, trained: NDArray[np.float64]) -> tuple[Position, list[str]]:
    """Progress and last lines after a start, a head and a net with these means over classes."""
    progress = Position()
    for total, values in enumerate((CLASSES - 0.15, CLASSES, trained)):
        progress.total = total
        sums = ((10 * values).tolist(), [10] * 8)
        validation = {monitor.name: float(values.mean())}
        if monitor.note(progress, validation, total == 2, sums):
            progress.best_epoch = total
    return progress, monitor.sentences(progress, False, 8)


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize(
    ("shift", "spread", "verdict", "kept"),
    [
        (-0.001, 0.02, "undecided", 2),
        (0.001, 0.02, "undecided", 2),
        (-0.05, 0.02, "worse", 1),
        (0.05, 0.02, "better", 2),
    ],
)
def test_a_difference_within_its_spread_over_classes_is_undecided(
    shift, spread, verdict, kept, larger
):
    monitor = Monitor(check_recipe(SMALL))
    monitor.larger = larger
    if not larger:
        shift = -shift
    trained = CLASSES + shift + spread * np.resize([-1, 1], 8)
    progress, lines = judged(monitor, trained)
    found = monitor.verdicts(progress)[-1]
    interval = stats.ttest_rel(trained, CLASSES).confidence_interval(0.95)
    assert found.difference == pytest.approx(shift)
    assert found.half == pytest.approx((interval.high - interval.low) / 2)
    assert found.verdict == verdict
    if larger:
        assert progress.best_epoch == kept
        assert lines[0].startswith(f"Kept: epoch {kept}, ")
        words = {"undecided": "differ by", "worse": "is worse than", "better": "beat"}[verdict]
        assert words in lines[2] and lines[2].endswith("undecided.") == (verdict == "undecided")


def test_one_class_decides_nothing():
    monitor = Monitor(check_recipe(SMALL))
    progress = Position()
    for total, value in enumerate((0.1, 0.9)):
        progress.total = total
        if monitor.note(progress, {"map_at_r": value}, True, ([10 * value], [10])):
            progress.best_epoch = total
    (verdict,) = monitor.verdicts(progress)
    assert verdict.verdict == "undecided" and verdict.half is None
    assert "(one class, so no interval)" in monitor.sentences(progress, False, 1)[1]


def test_an_earlier_version_s_checkpoint_has_no_verdict():
    monitor = Monitor(check_recipe(SMALL))
    progress = Position(best=0.5, best_epoch=1, start=0.4, with_frozen=0.5, total=9)
    assert not monitor.note(progress, {"map_at_r": 0.4}, True, ([4.0], [10]))
    assert not monitor.verdicts(progress) and len(monitor.sentences(progress, False, 9)) == 1


def test_a_metric_whose_smaller_values_are_better_is_monitored(tmp_path, make):
    options = {"epochs": 3, "monitor": "toolbox.missed"}
    recipe = make(**PLAIN, train=options, head={"embedding_size": 2})
    run, lines = reported(tmp_path / "run", recipe)
    result = summary(run.path)
    values = [result["start"], *(line["validation_toolbox.missed"] for line in log(run.path))]
    assert result["best_epoch"] == values.index(min(values)) and max(values) > min(values)
    assert result["monitor"] == "toolbox.missed"
    assert all("validation_toolbox.missed" in line for line in lines if line.startswith("epoch"))


def test_a_frozen_backbone_with_random_weights_is_a_warning(make, tmp_path):
    frozen = {**PLAIN, **FROZEN}
    (warning,) = [line for line in run_one_batch(make(**frozen)) if line.startswith("warning")]
    assert "toolbox.net is frozen, but its weights are random" in warning
    source = fit(tmp_path, make(**PLAIN, train={"epochs": 1}), "source")
    options = {"epochs": 1, "start_from": str(source), "start_parts": ["backbone"]}
    assert not [line for line in run_one_batch(make(**frozen, train=options)) if "random" in line]


def test_ema_is_the_average_by_loops_and_is_kept(make, tmp_path, monkeypatch):
    recipe = make(**PLAIN, **UNVALIDATED, train={"epochs": 1, "ema": 0.3, "checkpoint_every": 1})
    states: list[dict[str, torch.Tensor]] = []
    expected = start(tmp_path / "a", recipe)
    call = Step.__call__

    def recorded(self: Step, *arguments: Any) -> Any:
        losses = call(self, *arguments)
        states.append({k: v.clone() for k, v in self.model.state_dict().items()})
        return losses

    monkeypatch.setattr(Step, "__call__", recorded)
    folder = fit(tmp_path, recipe)
    assert len(states) == 3
    for n, state in enumerate(states, 1):
        decay = min(0.3, (1 + n) / (10 + n))
        for name, value in state.items():
            key = f"model.{name}"
            expected[key] = decay * expected[key] + (1 - decay) * value
    kept = weights(folder, "best")
    assert moved(kept, weights(folder))
    for name, value in kept.items():
        torch.testing.assert_close(value, expected[name])
    opened = {f"model.{k}": v for k, v in Run.open(folder).model.state_dict().items()}
    assert not moved(opened, kept)


def test_the_mean_of_the_last_epochs_is_kept(make, tmp_path):
    second = weights(fit(tmp_path, make(**PLAIN, **UNVALIDATED, train={"epochs": 2}), "two"))
    recipe = make(**PLAIN, **UNVALIDATED, train={"epochs": 3, "average_last": 2})
    third, kept = weights(fit(tmp_path, recipe)), weights(tmp_path / "run", "best")
    assert moved(second, third)
    for name, value in kept.items():
        torch.testing.assert_close(value, (second[name] + third[name]) / 2)


def test_lora_trains_only_additions_and_its_bundle_equals_the_unmerged_net(make, tmp_path):
    pytest.importorskip("peft", reason="the extra lora is not installed")
    recipe = make(
        backbone={"name": "toolbox.net"},
        lora={"rank": 2, "alpha": 4, "modules": ["layers.4"]},
        optimizer={"lr": 0.05},
        **UNVALIDATED,
        train={"epochs": 2, "ema": 0.5},
    )
    before = start(tmp_path / "a", recipe)
    folder = fit(tmp_path, recipe)
    changed = {name for name in moved(before, weights(folder)) if "backbone" in name}
    # the batch statistics do not change either
    assert changed == {f"model.backbone.layers.4.lora_{x}.default.weight" for x in "AB"}
    run = Run.open(folder)
    assert not [name for name in run.model.state_dict() if "lora" in name]
    checkpoint_format.seed_everything(0)
    unmerged = build_run(tmp_path, recipe).model.eval()
    average = load(folder)["average"]
    state = {k.removeprefix("module."): v for k, v in average.items() if k != "n_averaged"}
    unmerged.load_state_dict(state)
    images = np.stack([run.dataset[i] for i in range(20)])[:, None]
    with torch.inference_mode():
        expected = unmerged(torch.from_numpy(images))[1].numpy()
    export(run, tmp_path / "bundle", progress=False)
    bundle = Bundle.open(tmp_path / "bundle", threads=1)
    np.testing.assert_allclose(bundle.encode(images).vector, expected, atol=1e-4)
    (folder / "checkpoints" / "best.safetensors").unlink()  # like a run that was stopped
    assert not [name for name in Run.open(folder).model.state_dict() if "lora" in name]


def test_unknown_lora_modules_are_refused_with_the_names_of_the_layers(make, tmp_path):
    pytest.importorskip("peft", reason="the extra lora is not installed")
    with pytest.raises(RecipeError, match=r"matches 'attn'. The names are layers.0, layers.4"):
        build_run(tmp_path, make(lora={"modules": ["attn"]}))


def everything(variant: str = "") -> dict[str, Any]:
    """Tables that use all options at once."""
    lora, plateau = variant == "lora", variant == "plateau"
    cosine = {"name": "cosine", "warmup": "2 steps"}
    return {
        "sampler": {"classes": 4, "items": 4, "batches": 3},
        "augmentation": {"crop_scale": [0.8, 1.0]},
        "backbone": {"name": "toolbox.net", "batch_norm": False, "dropout": 0.0},
        "optimizer": {
            "lr_factor": {"head": 3, "*.bias": 2},
            "layer_decay": 0.5,
            "weight_decay": {"backbone": 0.1, "vectors": 0},
        },
        "schedule": {**PLATEAU, "options": {"patience": 0}} if plateau else cosine,
        **({"lora": {"rank": 2, "dropout": 0.1}} if lora else {}),
        "train": {
            "checkpoint_every": 1,
            "monitor": "recall_at_2",
            **({"average_last": 2} if plateau else {"ema": 0.8}),
        },
        "phase": [
            {"name": "head", "epochs": 1, "train": ["head", "loss"], "augment": False},
            {"name": "whole", "epochs": 2, "lr": 1e-2, **({} if lora else {"freeze": "stages:1"})},
        ],
    }


@pytest.mark.parametrize("variant", ["", "lora", "plateau"])
def test_a_run_that_is_stopped_anywhere_goes_on_bit_for_bit(make, tmp_path, monkeypatch, variant):
    if variant == "lora":
        pytest.importorskip("peft", reason="the extra lora is not installed")
    recipe = make(**everything(variant))
    train_run(tmp_path / "whole", recipe)
    for step in (1, 3, 5, 8):
        folder = tmp_path / f"stopped{step}"
        monkeypatch.setenv("NAN_AT", str(step + 1))  # the loss of the next step is NaN
        with pytest.raises(Exception, match="Training stopped"):
            train_run(folder, recipe)
        monkeypatch.delenv("NAN_AT")
        train_run(folder, recipe, resume=True)
        for name in ("last", "best"):
            assert same(tmp_path / "whole", folder, name), (step, name)
        assert summary(tmp_path / "whole") == summary(folder)


def test_two_processes_fine_tune_as_one(make, trains_as_one):
    recipes = {}
    for variant in ("averaged", "plateau", *(["lora"] if find_spec("peft") else [])):
        table = everything(variant)
        table["optimizer"] |= {"name": "SGD", "lr": 0.05}
        if variant == "lora":
            table["lora"]["dropout"] = 0.0  # processes draw different numbers
        recipes[variant] = make(**table)
    trains_as_one(recipes, within=1e-4)


def test_the_recipe_on_the_page_trains_the_head_then_the_whole_net(tmp_path):
    """On small digits and for a few steps."""
    pytest.importorskip("timm", reason="the extra efficientnet is not installed")
    page = Path(__file__).parents[2].joinpath("docs", "engineer.md").read_text(encoding="utf-8")
    text = page.split(":caption: finetune.toml\n")[1].split("```")[0]
    (tmp_path / "finetune.toml").write_text(text, encoding="utf-8")
    small = [
        "backbone.size=64",
        "sampler.classes=3",
        "sampler.batches=2",
        "evaluate.batch_size=512",
    ]
    digits = ["data={name='core.digits'}", "phase.0.epochs=2", "phase.1.epochs=1"]
    recipe = read_recipe(tmp_path / "finetune.toml", [*digits, *small])
    run, lines = reported(tmp_path / "run", recipe)
    assert [line["phase"] for line in log(run.path)] == ["head", "head", "whole"]
    assert any(line.startswith("Kept: ") for line in lines)
    assert any("the frozen backbone with a trained head" in line for line in lines)
