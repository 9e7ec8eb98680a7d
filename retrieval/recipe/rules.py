"""Checks of a recipe's names, and of tables that cannot be used together.

Each message names both sides of a conflict and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from retrieval.errors import PluginError, RetrievalError
from retrieval.host.factory import Factory
from retrieval.host.plugins import Plugins
from retrieval.host.python_parts import DICTIONARY, OBJECT

if TYPE_CHECKING:
    from retrieval.recipe.tables import Tables


def check_names(recipe: Tables) -> list[str]:
    """Return problems with the names of optimisers, schedule, transforms and metrics."""
    from retrieval.host.lazy import load_compiler
    from retrieval.recipe.optimizers import check_optimizer, check_schedule

    if recipe.train.compile:
        load_compiler()
    problems = check_optimizer(recipe.optimizer, "[optimizer]")
    problems += check_schedule(recipe.schedule, "[schedule]")
    if recipe.generator_optimizer:
        problems += check_optimizer(recipe.generator_optimizer, "[generator_optimizer]")
    for number, named in enumerate(recipe.evaluate.metrics):
        problems += _check_metric(recipe.loaded, named, "[evaluate] metrics", f".{number}")
    problems += _check_metric(recipe.loaded, recipe.train.monitor, "[train] monitor")
    for number, transform in enumerate(recipe.augmentation.transforms):
        problems += recipe.loaded.check(
            "augmentations", transform, f"[augmentation] transforms.{number}"
        )
    return problems


def _check_metric(
    plugins: Plugins, named: str | dict[str, Any], where: str, number: str = ""
) -> list[str]:
    """Return the problems of a metric that `[evaluate] metrics` or `[train] monitor` names."""
    from retrieval.model.metrics import metric

    if not isinstance(named, str):
        return plugins.check("metrics", named, where + number)
    try:
        if "." in named:
            return plugins.find("metrics", named).check({}, where + number)[1]
        metric(named)
    except RetrievalError as error:
        return [f"{where}: {error}"]
    return []


def option_hint(recipe: Tables, place: Sequence[str | int]) -> str:
    """Return advice for an unknown key, such as `accumulate` or an optimiser's argument."""
    from retrieval.recipe.optimizers import takes

    if place == ("train", "accumulate"):
        return (
            " Adding up the gradients of several batches does not equal a large batch: a loss of"
            " pairs would never compare items of different batches. Set the batch size in"
            " [sampler], and [train] chunk to the number of rows that fit into memory."
        )
    section: Any = getattr(recipe, str(place[0]), None) if len(place) == 2 else None
    if not hasattr(section, "options") or str(place[1]) in type(section).model_fields:
        return ""
    if not takes(
        "schedule" if place[0] == "schedule" else "optimizer", section.name, str(place[1])
    ):
        return ""
    return f" It is an argument of {section.name}: write options.{place[1]}."


def check_together(recipe: Tables, present: Iterable[str]) -> list[str]:
    """Return conflicts between a recipe's tables; `present` are the component tables it has."""
    present = set(present)
    problems = []
    if ("loss" in present) == ("learner" in present):
        problems.append(
            "a recipe needs either a [loss] or a [learner]"
            + (", not both: remove one." if "loss" in present else "; it has neither.")
        )
    elif "learner" in present:
        problems += [
            f"[{name}] needs a [loss], and a [learner] cannot use it. Remove one of the two."
            for name in ("combiner", "miner", "generator")
            if name in present
        ]
    if recipe.data.name == f"{OBJECT}.{DICTIONARY}" and recipe.split.by != "given":
        problems.append(
            f'[split] by = "{recipe.split.by}" would mix the sides of the dictionary that is the'
            ' dataset. Set by = "given", or give one dataset.'
        )
    return (
        problems
        + _loss(recipe)
        + _generator(recipe, present)
        + _rates(recipe, present)
        + _training(recipe, present)
    )


def _loss(recipe: Tables) -> list[str]:
    """Return conflicts of the loss with combiner, generator and miner."""
    problems: list[str] = []
    if recipe.loss is None:
        return problems
    plugins, loss, name = recipe.loaded, recipe.loss.table, recipe.loss.name
    combiner, miner, generator = (
        part.name if part else "" for part in (recipe.combiner, recipe.miner, recipe.generator)
    )

    def alternatives(test: Callable[[Factory], bool]) -> str:
        names = [f.name for f in plugins.factories("losses").values() if test(f)]
        own = name.partition(".")[0] + "."
        names.sort(key=lambda full_name: not full_name.startswith(own))  # the same plugin's first
        return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")

    if combiner and not plugins.every(
        "losses", loss, lambda f: not any(p.per_width for p in f.parameters)
    ):
        problems.append(
            f"[combiner] {combiner} compares whole codes, but {name} trains shortened embeddings."
            " Remove one of the two."
        )
    elif combiner:
        if not _measures(plugins, loss):
            problems.append(
                f"[combiner] {combiner} needs a loss that takes a `distance`, and {name} takes"
                f" none. Use one that does: {alternatives(lambda f: f.takes('distance'))}."
            )
        problems += [
            f"[{table}] distance: [combiner] {combiner} is the distance already. Remove one of the"
            " two."
            for table, part in (("loss", recipe.loss), ("miner", recipe.miner))
            if part and "distance" in part.parameters
        ]
    if generator and not plugins.every("losses", loss, lambda f: f.supports_ref_emb):
        problems.append(
            f"[generator] {generator} extends the reference set, and {name} takes no `ref_emb`. "
            f"Use a loss that does: {alternatives(lambda f: f.supports_ref_emb)}."
        )
    elif generator and not plugins.every("losses", loss, lambda f: f.supports_miner):
        problems.append(
            f"[generator] {generator} makes a negative for each triplet, but {name} picks its own"
            " pairs. Use a loss that takes triplets:"
            f" {alternatives(lambda f: f.supports_ref_emb and f.supports_miner)}."
        )
    if generator and recipe.train.mine == "after":
        if recipe.miner is None:
            problems.append('[train] mine = "after" needs a [miner]. Add one, or remove the key.')
        elif not plugins.every("miners", recipe.miner.table, lambda f: f.supports_ref_emb):
            problems.append(
                f'[train] mine = "after" needs a miner that picks from a reference set, but {miner}'
                ' takes no `ref_emb`. Use mine = "before", or another miner.'
            )
    if miner and not plugins.every("losses", loss, lambda f: f.supports_miner):
        problems.append(
            f"[miner] {miner} picks pairs or triplets, but {name} has no use for them. Remove the"
            f" [miner], or use a loss that takes them: {alternatives(lambda f: f.supports_miner)}."
        )
    return problems


def _measures(plugins: Plugins, values: Any) -> bool:
    """Return whether a loss, or every loss that it wraps, takes a distance."""
    wrapped: list[Any] = []
    try:
        factory = plugins.find(
            "losses", str(values.get("name") if isinstance(values, dict) else values)
        )
    except PluginError:
        return True  # reported already
    if factory.takes("distance"):
        return True
    for p in factory.parameters:
        if p.part == "losses" and isinstance(values, dict) and p.name in values:
            wrapped += values[p.name] if isinstance(values[p.name], list) else [values[p.name]]
    return bool(wrapped) and all(_measures(plugins, loss) for loss in wrapped)


def _generator(recipe: Tables, present: set[str]) -> list[str]:
    """Return settings for a generator in a recipe without one."""
    if "generator" in present:
        return []
    problems = [
        f"[[phase]] {phase.name}: trains only a generator, but the recipe has no [generator]."
        for phase in recipe.phase
        if phase.train == ["generator"]
    ]
    if recipe.generator_optimizer is not None:
        problems.append("[generator_optimizer] is of no use without a [generator]. Remove it.")
    if recipe.train.real_weight:
        problems.append("[train] real_weight is of no use without a [generator]. Remove it.")
    if recipe.train.loss_weight != 1 and "combiner" not in present:
        problems.append(
            "[train] loss_weight is of no use without a [generator] or a [combiner]. Use the"
            " [optimizer]'s lr."
        )
    if recipe.train.coupling != "separate":
        problems.append("[train] coupling is of no use without a [generator]. Remove it.")
    if recipe.train.mine != "before":
        problems.append("[train] mine is of no use without a [generator]. Remove it.")
    return problems


def _rates(recipe: Tables, present: set[str]) -> list[str]:
    """Return learning rates that would have no effect."""
    problems = []
    own = recipe.generator_optimizer
    if own is not None:
        problems += [
            f"[generator_optimizer] lr_factor.{part}: this optimiser trains only the generator. Set"
            " the factor in [optimizer] lr_factor."
            for part in own.lr_factor
            if part != "generator"
        ]
        if "generator" in recipe.optimizer.lr_factor:
            problems.append(
                "[optimizer] lr_factor.generator: the generator has its own [generator_optimizer]."
                " Set the learning rate there."
            )
    for phase in recipe.phase:
        where = f"[[phase]] {phase.name}:"
        if phase.lr and phase.train == ["generator"] and own is not None:
            problems.append(
                f"{where} lr replaces [optimizer] lr, but only the generator trains in this phase,"
                " by [generator_optimizer]. Use generator_lr."
            )
        if phase.generator_lr and "generator" not in present:
            problems.append(f"{where} generator_lr is of no use without a [generator]. Remove it.")
        elif phase.generator_lr and "generator" not in phase.train:
            problems.append(
                f"{where} generator_lr is of no use because the generator does not train. Remove"
                ' it, or add "generator" to train.'
            )
    return problems


def _training(recipe: Tables, present: set[str]) -> list[str]:
    """Return conflicts of head, augmentation, compilation, phases and validation."""
    problems = []
    if "combiner" in present:
        changed = {
            "identity": recipe.head.identity,
            "hidden": bool(recipe.head.hidden),
            "normalize": not recipe.head.normalize,
        }
        problems += [
            f"[head] {name}: a [combiner] brings its own head. Remove one of the two."
            for name, is_set in changed.items()
            if is_set
        ]
    if recipe.augmentation.active and (recipe.backbone.frozen or "learner" in present):
        once = "[backbone] frozen = true" if recipe.backbone.frozen else "a [learner]"
        problems.append(
            f"[augmentation] changes images in every epoch, but with {once} their features are"
            " computed only once. "
            + ("Remove one of the two." if recipe.backbone.frozen else "Remove the [augmentation].")
        )
    problems += _compiled(recipe, present)
    problems += _chunked(recipe, present)
    problems += _views(recipe)
    if (mix := recipe.augmentation.mix) is not None:
        problems += [
            f'[augmentation] mix = "{mix}" gives items two labels, but a [{table}] needs one label'
            " per item. Remove one of the two."
            for table in ("combiner", "generator", "miner")
            if table in present
        ]
    for phase in recipe.phase:
        if not phase.train:
            problems.append(f"[[phase]] {phase.name}: train must name at least one part.")
        if phase.train == ["backbone"] and recipe.backbone.frozen:
            problems.append(
                f"[[phase]] {phase.name}: trains only the backbone, but [backbone] frozen = true"
                " keeps its weights fixed."
            )
    if not recipe.split.validation and recipe.split.by != "given":
        needed = {
            "[train] patience": recipe.train.patience is not None,
            "[train] monitor": "monitor" in recipe.train.model_fields_set,
            "[schedule] ReduceLROnPlateau": recipe.schedule.name == "ReduceLROnPlateau",
        }
        problems += [
            f"{key} needs a validation part: set [split] validation above 0."
            for key, is_set in needed.items()
            if is_set
        ]
    return problems + _finetuning(recipe, present)


def _finetuning(recipe: Tables, present: set[str]) -> list[str]:
    """Return conflicts of `[lora]`, averages, weight decay and phases without augmentation."""
    from retrieval.recipe.optimizers import takes

    problems, train = [], recipe.train
    steps = {
        "[lora]": recipe.lora is not None,
        "[train] ema": train.ema is not None,
        "[train] average_last": train.average_last is not None,
    }
    if "learner" in present:
        problems += [
            f"{key}: a [learner] is fitted once, without training steps. Remove {key}."
            for key, is_set in steps.items()
            if is_set
        ]
    if recipe.lora is not None and recipe.backbone.frozen:
        problems.append(
            "[lora] trains additions to the backbone, but [backbone] frozen = true keeps it fixed."
            " Remove one of the two."
        )
    if train.ema is not None and train.average_last is not None:
        problems.append("[train] ema and average_last exclude each other. Remove one of the two.")
    for where, section in (
        ("[optimizer]", recipe.optimizer),
        ("[generator_optimizer]", recipe.generator_optimizer),
    ):
        if (
            section
            and section.weight_decay
            and not takes("optimizer", section.name, "weight_decay")
        ):
            problems.append(f"{where} weight_decay: {section.name} takes none.")
    for phase in recipe.phase:
        where = f"[[phase]] {phase.name}:"
        if "augment" in phase.model_fields_set and not recipe.augmentation.active:
            problems.append(f"{where} augment is of no use without an [augmentation]. Remove it.")
        elif not phase.augment and recipe.augmentation.views > 1:
            problems.append(
                f"{where} augment = false makes all views of an item equal, but [augmentation]"
                f" views = {recipe.augmentation.views} needs different ones. Remove one of the two."
            )
    return problems


def _compiled(recipe: Tables, present: set[str]) -> list[str]:
    """Return conflicts of `[train] compile`."""
    if not recipe.train.compile:
        return []
    problems = []
    if recipe.backbone.frozen or "learner" in present:
        once = "[backbone] frozen = true" if recipe.backbone.frozen else "a [learner]"
        problems.append(
            f"[train] compile speeds up a training backbone, but with {once} its features are"
            " computed only once. Remove compile."
        )
    if recipe.train.sync_batch_norm:
        problems.append(
            "[train] compile: a compiled backbone cannot exchange batch norm's statistics between"
            " processes (sync_batch_norm = true). Remove one of the two."
        )
    return problems


def _chunked(recipe: Tables, present: set[str]) -> list[str]:
    """Return conflicts of `[train] chunk`."""
    if recipe.train.chunk is None or not (recipe.backbone.frozen or "learner" in present):
        return []
    once = "[backbone] frozen = true" if recipe.backbone.frozen else "a [learner]"
    return [
        f"[train] chunk saves memory of a training backbone, but with {once} its features are"
        " computed only once. Remove chunk."
    ]


def _views(recipe: Tables) -> list[str]:
    """Return conflicts of `[augmentation] views` and `positives`."""
    augmentation, problems = recipe.augmentation, []
    if augmentation.views > 1 and not augmentation.active:
        problems.append(
            f"[augmentation] views = {augmentation.views}: nothing changes the images, so all views"
            " of an item are equal. Add a crop or transforms, or remove views."
        )
    if augmentation.positives == "item" and augmentation.views == 1:
        problems.append(
            '[augmentation] positives = "item": only views of the same item are positives, but each'
            " item has one view. Set views to 2 or more."
        )
    if augmentation.positives == "item" and recipe.sampler.items != 1:
        problems.append(
            f'[sampler] items = {recipe.sampler.items}: with [augmentation] positives = "item" each'
            " item is its own class. Set items = 1, and classes to the number of items in a batch."
        )
    return problems
