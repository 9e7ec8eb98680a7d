"""TOML → a checked recipe. Every problem of the file in one error, with 'did you mean'.

The tables of the host are the classes below; the tables of plugins (`Component`) are checked against the
signature of the factory that they name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from retrieval.errors import DataError, PluginError, RecipeError, RetrievalError
from retrieval.factory import KINDS
from retrieval.overrides import apply_overrides
from retrieval.plugins import Plugins, load_plugins
from retrieval.trust import require
from retrieval.values import Place, shown, validate

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
Trainable = Literal["backbone", "head", "combiner", "loss", "generator"]
Component = dict[str, Any]
"""`name = "PLUGIN.NAME"` and the parameters that `retrieval plugins show NAME` lists."""

COMPONENTS = {
    "data": "datasets",
    "backbone": "backbones",
    "combiner": "combiners",
    "loss": "losses",
    "miner": "miners",
    "generator": "generators",
    "learner": "learners",
}
"""The recipe's tables that plugins make, and the kind that each holds."""


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Split(Section):
    """`[split]`: which items train, which choose, which are held out."""

    by: Literal["given", "class", "item"] = Field(
        "given",
        description="`given`: the dataset's own split; `class`: training and test classes are disjoint, the usual zero-shot protocol; `item`: items of every class on both sides.",
    )
    test: Fraction | list[str | int] = Field(
        0.5,
        description='With `by = "class"`, the fraction of the classes, or the very classes, that are held out; with `item`, the fraction of each class\'s items. Unused with `given`.',
    )
    validation: Fraction = Field(
        0.2,
        description="Part of the *training* side that is kept for early stopping and every choice; 0 for none.",
    )
    validation_by: Literal["item", "class"] = Field(
        "item",
        description="Whether that part is taken from every class (`item`) or is whole classes (`class`).",
    )
    seed: int = Field(
        0,
        description="Seed of the split; independent of the run's seed, so that several seeds share a split.",
    )


class Sampler(Section):
    """`[sampler]`: a batch is P classes × M items."""

    classes: Annotated[int, Field(ge=2)] = Field(16, description="P, classes in a batch.")
    items: Count = Field(4, description="M, items of each class in a batch.")
    batches: Count | None = Field(
        None,
        description="Batches in an epoch; by default as many as there are training items divided by P × M.",
    )


class Augmentation(Section):
    """`[augmentation]`: random changes to training images (torchvision.transforms.v2)."""

    crop_scale: tuple[float, float] | None = Field(
        None, description="Random resized crop: smallest and largest part of the image's area; none: no crop."
    )
    crop_ratio: tuple[float, float] = Field(
        (0.75, 1.3333), description="Smallest and largest aspect ratio of that crop."
    )
    horizontal_flip: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="Probability of a mirror image."
    )

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return self.crop_scale is not None or self.horizontal_flip > 0

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError("crop_scale must be two numbers 0 < smallest ≤ largest ≤ 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio must be two numbers 0 < smallest ≤ largest")
        return self


class Head(Section):
    """`[head]`: features → embedding, where no combiner or learner brings its own."""

    embedding_size: Count = Field(64, description="Width of the embedding.")
    hidden: list[Count] = Field(
        [], description="Widths of hidden layers (ReLU between them); none: a linear map."
    )
    normalize: bool = Field(True, description="Unit vectors: Euclidean and cosine order are then the same.")
    identity: bool = Field(False, description="No head at all: the features are the embedding.")


class Optimizer(Section):
    """`[optimizer]`: any of `torch.optim` by its class name."""

    name: str = Field("AdamW", description="A class of `torch.optim`.")
    lr: Annotated[float, Field(gt=0)] = Field(1e-3, description="Learning rate.")
    lr_factor: dict[Trainable, Annotated[float, Field(ge=0)]] = Field(
        {}, description="Multiplies the rate of a part: `{ head = 10, loss = 100 }`."
    )
    options: dict[str, Any] = Field(
        {}, description="Further arguments of that class, such as `weight_decay`."
    )


class Schedule(Section):
    """`[schedule]`: the learning rate over a phase's steps."""

    name: str = Field(
        "constant",
        description="`constant`, `cosine` or `linear` (both down to 0), or a class of `torch.optim.lr_scheduler`, stepped once an epoch.",
    )
    warmup: Fraction = Field(0.0, description="Part of the phase's steps in which the rate rises from 0.")
    options: dict[str, Any] = Field({}, description="Arguments of a `torch.optim.lr_scheduler` class.")


class Phase(Section):
    """`[[phase]]`: what trains, and for how long."""

    name: str = Field("train", description="What to call it in the log.")
    epochs: Count = Field(10, description="Epochs.")
    train: list[Trainable] = Field(
        ["backbone", "head", "combiner", "loss", "generator"],
        description="The parts that train; the others keep their weights (and batch statistics) as they are.",
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Learning rate of this phase, instead of `[optimizer] lr`: the generator's too, unless it has a `[generator_optimizer]`.",
    )
    generator_lr: Annotated[float, Field(gt=0)] | None = Field(
        None, description="The generator's learning rate in this phase, instead of what its optimiser says."
    )
    synthetic: bool = Field(
        True, description="Whether the generator's negatives enter the loss in this phase."
    )


class Train(Section):
    """`[train]`: how to train."""

    epochs: Count = Field(10, description="Epochs, where no `[[phase]]` is given.")
    precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="Mixed precision; `bf16` gains on CPUs too."
    )
    channels_last: bool = Field(
        False, description="Memory format of images; faster convolutions on CPUs and recent GPUs."
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient; none: no clipping."
    )
    patience: Count | None = Field(
        None, description="Stop after this many epochs without a better validation MAP@R; none: never early."
    )
    validate_every: Count = Field(1, description="Epochs between validations.")
    checkpoint_every: Count | None = Field(
        None, description="Steps between checkpoints; by default one at each epoch's end."
    )
    workers: Annotated[int, Field(ge=0)] = Field(0, description="Processes that load images.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes a GPU when there is one."
    )
    real_weight: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="With a generator: weight of the same loss on the real negatives, added to the one on synthetic ones.",
    )
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0,
        description="With a generator or a combiner: weight λ of the loss, on real and synthetic samples alike, against the generator's and the combiner's own objectives, as in DAML's J_gen + μ J_dis + λ J_m.",
    )
    mine: Literal["before", "after"] = Field(
        "before",
        description="With a generator and a miner: `before` generates from the triplets that the miner picks; `after` generates from each positive pair and a random negative, and the miner picks among real and synthetic samples.",
    )
    coupling: Literal["separate", "joint"] = Field(
        "separate",
        description="With a generator: `separate` steps each side on its own objective; `joint` lets both gradients flow everywhere.",
    )


class Evaluate(Section):
    """`[evaluate]`: the figures of validation and test."""

    metrics: list[str] = Field(
        ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"],
        description="Figures by name; a plugin's metric as `PLUGIN.NAME`.",
    )
    clusters: bool = Field(False, description="Also NMI and F1 of k-means clusters, k = number of classes.")
    batch: Count = Field(256, description="Images encoded at a time.")


class Recipe(Section):
    """A training run: `[data]`, `[backbone]`, and either a `[loss]` (trained by gradient) or a `[learner]` (fitted)."""

    name: str = Field("run", description="What to call the run, and later the bundle.")
    seed: int = Field(0, description="Seed of everything random but the split.")
    plugins: list[str] = Field([], description="Plugin files (relative to the recipe) or modules.")
    data: Component = Field(description="The dataset.")
    split: Split = Field(default_factory=Split)
    sampler: Sampler = Field(default_factory=Sampler)
    augmentation: Augmentation = Field(default_factory=Augmentation)
    backbone: Component = Field(
        description="The backbone; `frozen = true` computes its features once and keeps them on disk."
    )
    head: Head = Field(default_factory=Head)
    combiner: Component | None = Field(None, description="The distance over codes; it brings its own head.")
    loss: Component | None = Field(None, description="The loss.")
    miner: Component | None = Field(None, description="The miner.")
    generator: Component | None = Field(None, description="The generator of synthetic negatives.")
    learner: Component | None = Field(None, description="A learner, instead of a loss.")
    optimizer: Optimizer = Field(default_factory=Optimizer)
    generator_optimizer: Optimizer | None = Field(
        None, description="The generator's own optimiser; by default like `[optimizer]`."
    )
    schedule: Schedule = Field(default_factory=Schedule)
    phase: list[Phase] = Field(
        [], description="Phases in order; none: one that trains everything for `[train] epochs`."
    )
    train: Train = Field(default_factory=Train)
    evaluate: Evaluate = Field(default_factory=Evaluate)

    @property
    def frozen(self) -> bool:
        """Whether the backbone keeps its weights, so that its features are computed once."""
        return bool(self.backbone.get("frozen", False))

    @property
    def phases(self) -> list[Phase]:
        """The phases, the default one included."""
        return list(self.phase) or [Phase(epochs=self.train.epochs)]

    def component(self, table: str) -> Component | None:
        """Return a plugin's table without what the host reads of it (`frozen`)."""
        values: Component | None = getattr(self, table)
        return {k: v for k, v in values.items() if k != "frozen"} if values is not None else None


def read_recipe(
    path: Path, overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> tuple[Recipe, Plugins]:
    """Read and check a recipe file.

    Args:
        path: the TOML file.
        overrides: `key.path=value` texts, values as TOML (a bare word is text).
        plugins: further plugin files or modules, as from `--plugin`.

    Returns:
        The recipe, and the plugins it was checked with. Paths of plugin files in it are absolute.

    Raises:
        RecipeError: with every problem.
        PluginError: a plugin cannot be loaded, or the recipe brings one that the user does not know (see `retrieval.trust`).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RecipeError([f"it cannot be read: {reason}."], str(path)) from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecipeError([f"it is not valid TOML: {reason}."], str(path)) from None
    before = table.get("plugins")
    brought = {item for item in before if isinstance(item, str)} if isinstance(before, list) else set()
    apply_overrides(table, overrides, COMPONENTS)
    named = table.get("plugins", [])
    if isinstance(named, list) and (named or plugins):
        table["plugins"] = [_beside(path, item) if isinstance(item, str) else item for item in named]
        own = {_beside(Path(), item) for item in plugins}
        require(
            [_beside(path, item) for item in named if item in brought if _beside(path, item) not in own], path
        )
        table["plugins"] += [_beside(Path(), item) for item in plugins]
    return check_recipe(table, str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, a problem of a recipe that shows only when what it names is built is told with the recipe's file."""
    try:
        yield
    except RecipeError as error:
        if error.where is not None:
            raise
        raise RecipeError(error.problems, str(path)) from error
    except (DataError, PluginError) as error:
        if not str(error).startswith("["):  # not about a table of the recipe
            raise
        raise type(error)(f"{path}: {error}") from error


def check_recipe(table: Mapping[str, Any], where: str | None = None) -> tuple[Recipe, Plugins]:
    """Check a recipe that is already a table; see `read_recipe`."""
    from retrieval.rules import check_names, check_together, option_hint

    recipe, faults = _read_tables(table)
    problems = [_bracketed(fault) + option_hint(recipe, place) for place, fault in faults.items()]
    extra = table.get("plugins", [])
    try:
        plugins = load_plugins([p for p in extra if isinstance(p, str)] if isinstance(extra, list) else [])
    except RetrievalError as error:
        if problems:
            raise RecipeError([*problems, str(error)], where) from error
        raise
    for name, kind in COMPONENTS.items():
        values = table.get(name)
        if isinstance(values, Mapping):
            values = {k: v for k, v in values.items() if not (name == "backbone" and k == "frozen")}
            problems += plugins.check(kind, values, f"[{name}]")
    frozen = table["backbone"].get("frozen", False) if isinstance(table.get("backbone"), Mapping) else False
    if not isinstance(frozen, bool):
        problems.append(f"[backbone] frozen: should be true or false, not {shown(frozen)}.")
    problems += check_names(recipe, plugins)
    problems += check_together(recipe, plugins, {name for name in COMPONENTS if name in table})
    if problems:
        raise RecipeError(dict.fromkeys(problems), where)
    return recipe, plugins


def _read_tables(table: Mapping[str, Any]) -> tuple[Recipe, dict[Place, str]]:
    """Return the recipe and what is wrong with its tables.

    When something is wrong, the recipe holds what is right, so that the checks that come after see the rest.
    """
    values, faults = validate(Recipe, table)
    if not faults:
        return Recipe(**values), faults
    for name in COMPONENTS:
        if isinstance(table.get(name), str) and (name,) in faults:
            faults[name,] += f" Write: [{name}] name = {shown(table[name])}."
    kept = _without(table, {_entry(table, place) for place in faults})
    for name in ("data", "backbone"):
        kept.setdefault(name, {})
    values, rest = validate(Recipe, kept)
    if rest:  # what a wrong entry hid, such as a list that is too short without it
        values, _ = validate(
            Recipe, {k: v for k, v in kept.items() if not any(k == place[0] for place in rest)}
        )
    return (Recipe(**values) if values else Recipe(data={}, backbone={})), faults


def _entry(table: Mapping[str, Any], place: Place) -> Place:
    """Return the place to leave out for a fault: of a list of plain values the whole list."""
    value: Any = table
    for i, step in enumerate(place):
        if isinstance(value, list) and not isinstance(value[int(step)], Mapping):
            return place[:i]
        value = (
            value.get(step)
            if isinstance(value, Mapping)
            else value[int(step)]
            if isinstance(value, list)
            else None
        )
    return place


def _without(value: Any, wrong: set[Place], place: Place = ()) -> Any:
    """Return a copy of a table without the entries at some places."""
    if isinstance(value, Mapping):
        return {k: _without(v, wrong, (*place, k)) for k, v in value.items() if (*place, k) not in wrong}
    if isinstance(value, list):
        return [_without(v, wrong, (*place, i)) for i, v in enumerate(value) if (*place, i) not in wrong]
    return value


def _bracketed(problem: str) -> str:
    """`head.hidden: …` → `[head] hidden: …`, as the file is written."""
    key, _, rest = problem.partition(": ")
    table, dot, inner = key.partition(".")
    name = f"[[{table}]]" if table == "phase" else f"[{table}]"
    if dot:
        return f"{name} {inner}: {rest}"
    field = Recipe.model_fields.get(table)
    is_table = (
        table in COMPONENTS or table == "phase" or (field and isinstance(field.annotation, type(Section)))
    )
    return f"{name}: {rest}" if is_table or rest.startswith("there is no such table") else problem


def _beside(recipe: Path, item: str) -> str:
    """A plugin file is looked for beside the recipe, then where the command runs."""
    if not item.endswith(".py"):
        return item
    beside = recipe.parent / item
    return str((beside if beside.is_file() or not Path(item).is_file() else Path(item)).resolve())


def to_toml(recipe: Recipe) -> str:
    """Return the recipe as TOML: what is set, defaults left out, ready to be read again."""
    return tomli_w.dumps(_without_none(recipe.model_dump(exclude_unset=True)))


def _without_none(value: Any) -> Any:
    """TOML has no null: a key without a value is left out."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value


__all__ = [
    "COMPONENTS",
    "KINDS",
    "Recipe",
    "apply_overrides",
    "check_recipe",
    "naming",
    "read_recipe",
    "to_toml",
]
