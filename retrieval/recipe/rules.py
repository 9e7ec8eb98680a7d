"""Checks of names, of the options of `torch.optim`, and of tables that exclude each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer, lr_scheduler

from retrieval.errors import RetrievalError, did_you_mean
from retrieval.host.factory import Factory
from retrieval.host.plugins import Plugins
from retrieval.host.python_parts import DICTIONARY, OBJECT
from retrieval.recipe.tables import Optimizer, Phase, Schedule, Tables

# The first call of these methods imports torch._dynamo, which takes a second, only to keep torch's
# compiler from them. Nothing here compiles an optimiser.
for _method in (TorchOptimizer.add_param_group, TorchOptimizer.zero_grad):
    _plain_method = inspect.unwrap(_method)
    vars(_plain_method).setdefault("__dynamo_disable", _plain_method)

SHAPES = ("constant", "linear", "cosine")
"""The built-in schedules."""

_UNUSABLE = ("LBFGS", "LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR")
"""Classes that no recipe can use: they need a closure, functions or other schedules."""


def check_names(recipe: Tables) -> list[str]:
    """Return problems with the names of optimisers, schedule, transforms and metrics."""
    problems = _check_optimizer(recipe.optimizer, "[optimizer]")
    problems += _check_schedule(recipe.schedule, "[schedule]")
    if recipe.generator_optimizer:
        problems += _check_optimizer(recipe.generator_optimizer, "[generator_optimizer]")
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
    """Return the problems of a metric in `[evaluate] metrics` or `[train] monitor`."""
    from retrieval.metrics.recall_map_ndcg import metric

    if not isinstance(named, str):
        return plugins.check("metrics", named, where + number)
    try:
        if "." in named:
            return plugins.find("metrics", named).check({}, where + number)[1]
        metric(named)
    except RetrievalError as error:
        return [f"{where}: {error}"]
    return []


def _classes(kind: str) -> dict[str, Any]:
    """Return torch's optimisers or schedules that a recipe can name."""
    module: Any = lr_scheduler
    base: type = lr_scheduler.LRScheduler
    if kind == "optimizer":
        module = torch.optim
        base = TorchOptimizer
    return {
        name: cls
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and cls is not base and name[0] != "_" and name not in _UNUSABLE
    }


def _takes(kind: str, name: str, key: str) -> bool:
    """Return whether torch's optimiser or schedule class `name` takes the argument `key`."""
    cls = _classes(kind).get(name)
    return cls is not None and key in inspect.signature(cls).parameters


def _option_problems(
    make: partial[Any], options: dict[str, Any], reserved: set[str], where: str
) -> list[str]:
    """Return every problem of options for `make`, which creates an object of a torch class.

    `reserved` are the arguments that no recipe sets.
    """
    name = make.func.__name__
    parameters = inspect.signature(make.func).parameters
    known = [name for name in parameters if name not in reserved]
    problems = [
        f"{where} options.{key}: {name} takes no such argument (it takes:"
        f" {', '.join(known)}).{did_you_mean(key, known)}"
        for key in options
        if key not in known
    ]
    problems += [
        f"{where} options.{key}: is required; {name} has no default for it."
        for key in known
        if key not in options and parameters[key].default is inspect.Parameter.empty
    ]
    if not problems:
        # torch's constructors check their values, so no list of limits is kept here
        try:
            make(**options)
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {name} refuses them: {error}.")
    return problems


def _check_optimizer(section: Optimizer, where: str) -> list[str]:
    """Return every problem of an `[optimizer]` table."""
    known = _classes("optimizer")
    if section.name not in known:
        return [
            f"{where} name: torch.optim has no '{section.name}' (known:"
            f" {', '.join(sorted(known))}).{did_you_mean(section.name, known)}"
        ]
    # an optimiser needs a parameter to be made
    make = partial(known[section.name], [Parameter(torch.zeros(1))], lr=section.lr)
    return _option_problems(make, section.options, {"params", "lr"}, where)


def _check_schedule(section: Schedule, where: str) -> list[str]:
    """Return every problem of a `[schedule]` table."""
    if section.name in SHAPES:
        return [
            f"{where} options.{key}: '{section.name}' takes no options." for key in section.options
        ]
    known = _classes("schedule")
    if section.name not in known:
        names = [*SHAPES, *sorted(known)]
        return [
            f"{where} name: there is no schedule '{section.name}' (known:"
            f" {', '.join(names)}).{did_you_mean(section.name, names)}"
        ]
    reserved = {"optimizer", "last_epoch"}
    # the monitored metric says whether larger values are better
    if section.name == "ReduceLROnPlateau":
        reserved.add("mode")
    make = partial(known[section.name], torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1))
    problems = _option_problems(make, section.options, reserved, where)
    if section.warmup:
        problems.append(
            f"{where} warmup: goes with constant, linear and cosine, not with {section.name}."
        )
    return problems


def option_hint(recipe: Tables, table: Mapping[str, Any], path: Sequence[Any]) -> str:
    """Return advice for an unknown key, such as `accumulate` or an optimiser's argument."""
    # a key of other programs, for which there is no key of a similar name to suggest
    if path == ("train", "accumulate"):
        return (
            " Adding up the gradients of several batches does not equal a large batch: a loss of"
            " pairs would never compare items of different batches. Set the batch size in"
            " [sampler], and [train] chunk to the number of rows that fit into memory."
        )
    if len(path) != 2 or path[0] not in ("optimizer", "generator_optimizer", "schedule"):
        return ""
    if path[0] == "schedule":
        kind = "schedule"
    else:
        kind = "optimizer"
    fields = type(getattr(recipe, kind)).model_fields
    name = str(table[path[0]].get("name", fields["name"].default))
    key = str(path[1])
    if key in fields or not _takes(kind, name, key):
        return ""
    return f" It is an argument of {name}: write options.{key}."


def check_together(recipe: Tables, present: Collection[str]) -> list[str]:
    """Return conflicts between a recipe's tables; `present` names its tables of parts."""
    problems = [*_loss(recipe), *_parts(recipe, present), *_once(recipe, present)]
    problems += [*_training(recipe, present), *_evaluation(recipe), *_text(recipe)]
    for phase in recipe.phase:
        problems += _phase(recipe, phase, "generator" in present)
    return problems


def _parts(recipe: Tables, present: Collection[str]) -> Iterator[str]:
    """Yield conflicts of the loss, the learner, the head and the generator."""
    has_loss = "loss" in present
    has_learner = "learner" in present
    if has_loss and has_learner:
        yield "a recipe needs either a [loss] or a [learner], not both: remove one."
    if not has_loss and not has_learner:
        yield "a recipe needs either a [loss] or a [learner]; it has neither."
    for name in ("combiner", "miner", "generator"):
        if name in present and has_learner and not has_loss:
            yield f"[{name}] needs a [loss], and a [learner] cannot use it. Remove one of the two."
    head = recipe.head
    train = recipe.train
    own = recipe.generator_optimizer
    changed = {"identity": head.identity, "hidden": head.hidden, "normalise": not head.normalise}
    for key, is_set in changed.items():
        if is_set and "combiner" in present:
            yield f"[head] {key}: a [combiner] brings its own head. Remove one of the two."
    for key, is_set, users in (
        ("[generator_optimizer]", own, ["generator"]),
        ("[train] real_weight", train.real_weight, ["generator", "text"]),
        ("[train] coupling", train.coupling != "separate", ["generator"]),
        ("[train] mine", train.mine != "before", ["generator"]),
        ("[train] loss_weight", train.loss_weight != 1, ["generator", "combiner"]),
    ):
        if is_set and not any(user in present for user in users):
            yield f"{key} is of no use without a [{'] or a ['.join(users)}]. Remove it."
    # a factor that no optimiser reads would have no effect, and nobody would notice
    for part in own.lr_factor if own else ():
        if part != "generator":
            yield (
                f"[generator_optimizer] lr_factor.{part}: this optimiser trains only the generator."
                " Set the factor in [optimizer] lr_factor."
            )
    if own and "generator" in recipe.optimizer.lr_factor:
        yield (
            "[optimizer] lr_factor.generator: the generator has its own [generator_optimizer]. Set"
            " the learning rate there."
        )


def _once(recipe: Tables, present: Collection[str]) -> Iterator[str]:
    """Yield conflicts of a backbone whose features are computed only once."""
    train = recipe.train
    has_learner = "learner" in present
    frozen = recipe.backbone.frozen
    if frozen:
        reason = "[backbone] frozen = true"
    else:
        reason = "a [learner]"
    for key, is_set, effect in (
        ("[augmentation]", recipe.augmentation.active, "changes images in every epoch"),
        ("[train] compile", train.compile, "speeds up a training backbone"),
        ("[train] chunk", train.chunk, "saves memory of a training backbone"),
        ("[lora]", recipe.lora and frozen, "trains additions to the backbone"),
    ):
        if is_set and (frozen or has_learner):
            yield (
                f"{key} {effect}, but with {reason} its features are computed only once. Remove"
                f" {key.removeprefix('[train] ')}."
            )
    for key, value in (
        ("[lora]", recipe.lora),
        ("[train] ema", train.ema),
        ("[train] average_last", train.average_last),
    ):
        if value and has_learner:
            yield f"{key}: a [learner] is fitted once, without training steps. Remove {key}."


def _training(recipe: Tables, present: Collection[str]) -> Iterator[str]:
    """Yield conflicts of data, augmentation, averages, optimisers and validation."""
    train = recipe.train
    augmentation = recipe.augmentation
    sampler = recipe.sampler
    if recipe.data.name == f"{OBJECT}.{DICTIONARY}" and recipe.split.by != "given":
        yield (
            f'[split] by = "{recipe.split.by}" would mix the sides of the dictionary that was'
            ' passed as the dataset. Set by = "given", or pass one dataset.'
        )
    if train.compile and train.sync_batch_norm:
        yield (
            "[train] compile: a compiled backbone cannot exchange batch norm's statistics between"
            " processes (sync_batch_norm = true). Remove one of the two."
        )
    if train.ema is not None and train.average_last is not None:
        yield "[train] ema and average_last exclude each other. Remove one of the two."
    # equal views would be positives at distance 0, from which nothing is learned
    if augmentation.views > 1 and not augmentation.active:
        yield (
            f"[augmentation] views = {augmentation.views}: nothing changes the images, so all views"
            " of an item are equal. Add a crop or transforms, or remove views."
        )
    by_item = augmentation.positives == "item"
    if by_item and augmentation.views == 1:
        yield (
            '[augmentation] positives = "item": only views of the same item are positives, but each'
            " item has one view. Set views to 2 or more."
        )
    if by_item and sampler.items != 1:
        yield (
            f'[sampler] items = {sampler.items}: with [augmentation] positives = "item" each item'
            " is its own class. Set items = 1, and classes to the number of items in a batch."
        )
    for table in ("combiner", "generator", "miner"):
        if augmentation.mix is not None and table in present:
            yield (
                f'[augmentation] mix = "{augmentation.mix}" gives items two labels, but a [{table}]'
                " needs one label per item. Remove one of the two."
            )
    for name in ("optimizer", "generator_optimizer"):
        optimizer: Optimizer | None = getattr(recipe, name)
        if optimizer is None or not optimizer.weight_decay:
            continue
        if not _takes("optimizer", optimizer.name, "weight_decay"):
            yield f"[{name}] weight_decay: {optimizer.name} takes none."
    for key, is_set in (
        ("[train] patience", train.patience),
        ("[train] monitor", "monitor" in train.model_fields_set),
        ("[schedule] ReduceLROnPlateau", recipe.schedule.name == "ReduceLROnPlateau"),
    ):
        if is_set and not recipe.split.validation and recipe.split.by != "given":
            yield f"{key} needs a validation part: set [split] validation above 0."


def _text(recipe: Tables) -> Iterator[str]:
    """Yield conflicts of texts with other tables."""
    text = recipe.text
    if text is None:
        return
    for table in ("combiner", "generator", "learner"):
        if getattr(recipe, table) is not None:
            yield f"[text] cannot be combined with a [{table}]. Remove one of the two."
    if recipe.miner is not None and not recipe.loaded.every(
        "miners", recipe.miner.table, lambda f: f.supports_ref_emb
    ):
        yield (
            f"[text] {recipe.miner.name} picks only among images. Use a miner that takes `ref_emb`,"
            " such as pml.multi_similarity, or remove the [miner]."
        )
    if recipe.augmentation.mix is not None:
        yield "[augmentation] mix: a mixed image has no text. Remove mix."
    if text.identity and text.hidden:
        yield "[text] identity = true: there is no head for hidden. Remove one of the two."
    if recipe.loss is not None and not recipe.loaded.every(
        "losses", recipe.loss.table, lambda f: f.supports_ref_emb and f.supports_miner
    ):
        yield (
            f"[text] {recipe.loss.name} compares only images with one another. Use a loss that"
            " takes `ref_emb` and `indices_tuple`, such as core.sigmoid_loss or core.info_nce."
        )


def _evaluation(recipe: Tables) -> Iterator[str]:
    """Yield conflicts of lists of relevant items with other ways to say what is relevant."""
    table = recipe.evaluate
    if table.ignored and not table.relevant:
        yield "[evaluate] ignored needs the lists of relevant items: set relevant."
    for key in ("exclude", "levels", "tags", "gallery_items", "open_set"):
        if table.relevant and getattr(table, key) not in (None, []):
            yield f"[evaluate] {key} cannot be combined with relevant. Remove one of the two."


def _phase(recipe: Tables, phase: Phase, has_generator: bool) -> Iterator[str]:
    """Yield conflicts of one phase."""
    where = f"[[phase]] {phase.name}:"
    views = recipe.augmentation.views
    only_generator = phase.train == ["generator"]
    if not phase.train:
        yield f"{where} train must name at least one part."
    if only_generator and not has_generator:
        yield f"{where} trains only a generator, but the recipe has no [generator]."
    if phase.train == ["backbone"] and recipe.backbone.frozen:
        yield (
            f"{where} trains only the backbone, but [backbone] frozen = true keeps its weights"
            " fixed."
        )
    if phase.lr and only_generator and recipe.generator_optimizer:
        yield (
            f"{where} lr replaces [optimizer] lr, but only the generator trains in this phase, by"
            " [generator_optimizer]. Use generator_lr."
        )
    if phase.generator_lr and not (has_generator and "generator" in phase.train):
        yield (
            f"{where} generator_lr is of no use unless a [generator] trains in this phase. Remove"
            ' it, or add "generator" to train.'
        )
    if views > 1 and not phase.augment:
        yield (
            f"{where} augment = false makes all views of an item equal, but [augmentation] views ="
            f" {views} needs different ones. Remove one of the two."
        )


def _loss(recipe: Tables) -> Iterator[str]:
    """Yield conflicts of the loss with combiner, generator and miner."""
    if recipe.loss is None:
        return
    plugins = recipe.loaded
    loss = recipe.loss.table
    name = recipe.loss.name
    combiner, miner, generator = (
        part.name if part else "" for part in (recipe.combiner, recipe.miner, recipe.generator)
    )

    def fits(test: Callable[[Factory], bool]) -> bool:
        """Return whether the loss, and every loss that it wraps, passes a test."""
        return plugins.every("losses", loss, test)

    def alternatives(test: Callable[[Factory], bool]) -> str:
        """Return the names of losses that pass a test, those of the same plugin first."""
        names = [f.name for f in plugins.factories("losses").values() if test(f)]
        own_plugin = name.partition(".")[0] + "."
        names.sort(key=lambda other: not other.startswith(own_plugin))
        return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")

    if combiner and not fits(lambda f: not any(p.per_width for p in f.parameters)):
        yield (
            f"[combiner] {combiner} compares whole codes, but {name} trains shortened embeddings."
            " Remove one of the two."
        )
    elif combiner:
        if not _takes_distance(plugins, loss):
            yield (
                f"[combiner] {combiner} needs a loss that takes a `distance`, and {name} takes"
                f" none. Use one that does: {alternatives(lambda f: f.takes('distance'))}."
            )
        for table, part in (("loss", recipe.loss), ("miner", recipe.miner)):
            if part and "distance" in part.parameters:
                yield (
                    f"[{table}] distance: [combiner] {combiner} is already the distance. Remove one"
                    " of the two."
                )
    if generator and not fits(lambda f: f.supports_ref_emb):
        yield (
            f"[generator] {generator} extends the reference set, and {name} takes no `ref_emb`. Use"
            f" a loss that does: {alternatives(lambda f: f.supports_ref_emb)}."
        )
    elif generator and not fits(lambda f: f.supports_miner):
        yield (
            f"[generator] {generator} makes a negative for each triplet, but {name} picks its own"
            " pairs. Use a loss that takes triplets:"
            f" {alternatives(lambda f: f.supports_ref_emb and f.supports_miner)}."
        )
    if generator and recipe.train.mine == "after":
        if recipe.miner is None:
            yield '[train] mine = "after" needs a [miner]. Add one, or remove the key.'
        elif not plugins.every("miners", recipe.miner.table, lambda f: f.supports_ref_emb):
            yield (
                f'[train] mine = "after" needs a miner that picks from a reference set, but {miner}'
                ' takes no `ref_emb`. Use mine = "before", or another miner.'
            )
    if miner and not fits(lambda f: f.supports_miner):
        yield (
            f"[miner] {miner} picks pairs or triplets, but {name} has no use for them. Remove the"
            f" [miner], or use a loss that takes them: {alternatives(lambda f: f.supports_miner)}."
        )


def _takes_distance(plugins: Plugins, values: Any) -> bool:
    """Return whether a loss, or else every loss that it wraps, takes a distance."""
    if isinstance(values, dict):
        table = values
    else:
        table = {"name": values}
    factory = plugins.named("losses", str(table.get("name")))
    # an unknown loss is reported by the check of its name
    if factory is None or factory.takes("distance"):
        return True
    parts = [table[p.name] for p in factory.parameters if p.part == "losses" and p.name in table]
    wrapped = [loss for part in parts for loss in (part if isinstance(part, list) else [part])]
    return bool(wrapped) and all(_takes_distance(plugins, loss) for loss in wrapped)
