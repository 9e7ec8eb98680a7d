"""The tables of a recipe, as written in TOML, with their keys, types and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from retrieval.host.factory import COMPONENTS
from retrieval.host.plugins import Plugins, load_plugins

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base class of a recipe's tables."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Range(Section):
    """One line of `[search]`: numbers from `low` to `high`, or one of `choices`."""

    low: int | float | None = Field(None, description="The smallest value.")
    high: int | float | None = Field(None, description="The largest value.")
    log: bool = Field(False, description="Draw evenly over the logarithm, as for a learning rate.")
    choices: list[str | int | float | bool] = Field(
        [], description="The values, instead of a range."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.choices:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("write either choices, or low and high")
        elif self.low is None or self.high is None or not self.low < self.high:
            raise ValueError("write two numbers low < high, or choices")
        elif self.log and self.low <= 0:
            raise ValueError("with log = true, low must be above 0")
        return self


def flat(search: Any) -> Any:
    """Return `[search]` by dotted keys, because TOML reads `loss.margin` as nested tables."""
    by_key: dict[str, Any] = {}

    def walk(place: str, value: Any) -> None:
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(inner, dict) for inner in value.values())
        ):
            for key, inner in value.items():
                walk(f"{place}.{key}", inner)
        else:
            by_key[place] = value

    if not isinstance(search, dict):
        return search
    for key, value in search.items():
        walk(key, value)
    return by_key


class Rerank(Section):
    """`[evaluate] rerank`: k-reciprocal re-ranking."""

    k1: Count = Field(20, description="Neighbours that must be reciprocal.")
    k2: Count = Field(6, description="Neighbours that an encoding is averaged over.")
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.3, description="λ, of the distance itself against the Jaccard distance."
    )


class Expansion(Section):
    """`[evaluate] expand`, `augment`: replace an item by the mean of itself and its neighbours."""

    k: Count = Field(5, description="Neighbours.")
    alpha: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="α: a neighbour's weight is its cosine to this power; 0: all weigh the same.",
    )


class Evaluate(Section):
    """`[evaluate]`: the metrics of validation and test."""

    metrics: list[str | dict[str, Any]] = Field(
        ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"],
        description=(
            "Figures by name; a plugin's metric as `PLUGIN.NAME`, with parameters as `{ name ="
            ' "core.recall_at", k = 5 }`.'
        ),
    )
    clusters: bool = Field(
        False, description="Also NMI and F1 of k-means clusters, k = number of classes."
    )
    exclude: str | None = Field(
        None,
        description=(
            "A column of the data's metadata, such as `camera`: gallery items that share its value"
            " with the query are left out for that query, as in cross-camera, cross-vendor or"
            " cross-session search."
        ),
    )
    exclude_label: Literal["any", "same"] = Field(
        "any",
        description=(
            "Of those items, which: those of `any` label; or only those of the `same` label as the"
            " query, the others staying as distractors, as Market-1501 and VeRi-776 are measured."
        ),
    )
    levels: list[str] = Field(
        [],
        description=(
            "Columns of metadata with coarser classes, finest first, such as `genus`, `family`:"
            " `ndcg_at_K` then grades an item by the finest level that it shares with the query;"
            " the label itself is the finest of all."
        ),
    )
    tags: str | None = Field(
        None,
        description=(
            "A column of metadata with several labels of an item, `;` between them: items match"
            " when they share one, and `ndcg_at_K` goes by how many."
        ),
    )
    by: str | None = Field(
        None,
        description=(
            "A column of metadata, such as `vendor`: also the metrics of each value's queries."
        ),
    )
    gallery_items: Count | None = Field(
        None,
        description=(
            "So many random test items of each class are the gallery, the others are queries, and"
            " metrics are means over `repetitions`, as VehicleID is measured with 1; none: the"
            " data's own roles."
        ),
    )
    repetitions: Count = Field(10, description="Random galleries, with `gallery_items`.")
    open_set: list[Annotated[float, Field(ge=0.0, le=1.0)]] = Field(
        [],
        description=(
            "False acceptance rates: also DIR@FAR, the share of known queries that are found, at"
            " thresholds that accept so many of those whose class the gallery lacks."
        ),
    )
    rerank: Rerank | None = Field(
        None,
        description=(
            "Also metrics after k-reciprocal re-ranking: `{ k1 = 20, k2 = 6, weight = 0.3 }`."
        ),
    )
    expand: Expansion | None = Field(
        None,
        description=(
            "Also metrics with each query as a mean of itself and its neighbours: `{ k = 5, alpha ="
            " 3.0 }`."
        ),
    )
    augment: Expansion | None = Field(
        None, description="The same of the gallery's items: `{ k = 5, alpha = 3.0 }`."
    )
    latency: bool = Field(
        False, description="Also milliseconds a query of each row's search, on this machine."
    )
    batch: Count = Field(256, description="Images encoded at a time.")


Trainable = Literal["backbone", "head", "combiner", "loss", "generator"]


class Component(Section):
    """A table that names a plugin's part; its other keys are that part's parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("", description="The part: `PLUGIN.NAME`.")

    @property
    def parameters(self) -> dict[str, Any]:
        """The part's parameters as in the file."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def table(self) -> dict[str, Any]:
        """Name and parameters, as `Plugins.build` takes them."""
        return {"name": self.name, **self.parameters}


class Backbone(Component):
    """`[backbone]`: maps images or vectors to features."""

    frozen: bool = Field(
        False, description="Keep the weights: the features are then computed once and kept on disk."
    )


class Split(Section):
    """`[split]`: which items are for training, validation and test."""

    by: Literal["given", "class", "item"] = Field(
        "given",
        description=(
            "`given`: the dataset's own split; `class`: training and test classes are disjoint, the"
            " usual zero-shot protocol; `item`: items of every class on both sides."
        ),
    )
    test: Fraction | list[str | int] = Field(
        0.5,
        description=(
            'With `by = "class"`, the fraction of the classes, or the very classes, that are held'
            " out; with `item`, the fraction of each class's items. Unused with `given`."
        ),
    )
    validation: Fraction = Field(
        0.2,
        description=(
            "Part of the *training* side that is kept for early stopping and every choice; 0 for"
            " none."
        ),
    )
    validation_by: Literal["item", "class"] = Field(
        "item",
        description=(
            "Whether that part is taken from every class (`item`) or is whole classes (`class`)."
        ),
    )
    seed: int = Field(
        0,
        description=(
            "Seed of the split; independent of the run's seed, so that several seeds share a split."
        ),
    )


class Sampler(Section):
    """`[sampler]`: a batch is P classes × M items."""

    classes: Annotated[int, Field(ge=2)] = Field(16, description="P, classes in a batch.")
    items: Count = Field(4, description="M, items of each class in a batch.")
    batches: Count | None = Field(
        None,
        description=(
            "Batches in an epoch; by default as many as there are training items divided by P × M."
        ),
    )


class Augmentation(Section):
    """`[augmentation]`: random changes to training images, applied in the order of the keys."""

    crop_scale: tuple[float, float] | None = Field(
        None,
        description=(
            "Random resized crop: smallest and largest part of the image's area; none: no crop."
        ),
    )
    crop_ratio: tuple[float, float] = Field(
        (0.75, 1.3333), description="Smallest and largest aspect ratio of that crop."
    )
    horizontal_flip: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="Probability of a mirror image."
    )
    transforms: list[str | dict[str, Any]] = Field(
        [],
        description=(
            'Further changes in order, by name: torchvision\'s (`"RandAugment"`, `{ name ='
            ' "RandomAffine", degrees = 15 }`; `retrieval plugins list --kind augmentations` shows'
            " them), a plugin's as `PLUGIN.NAME`. They are given the image in the size that the"
            " backbone takes, and keep it."
        ),
    )
    views: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="How often each item is in its batch, each time changed anew."
    )
    positives: Literal["class", "item"] = Field(
        "class",
        description=(
            "What is alike for loss and miner: items of one `class`, or only the views of one"
            " `item`, whose label is then not used (self-supervised); `[sampler] classes` counts"
            " items then."
        ),
    )

    mix: Literal["mixup", "cutmix"] | None = Field(
        None,
        description=(
            "Each image together with another of its batch: a weighted mean of the two (`mixup`),"
            " or a box of the other put into it (`cutmix`). The loss is the same mean of both"
            " labels' losses; it must be one that compares items with classes, not with one"
            " another."
        ),
    )
    mix_alpha: Annotated[float, Field(gt=0.0, le=100.0)] = Field(
        1.0,
        description=(
            "α of the Beta(α, α) that the weight of a batch is drawn from; small: mostly near 0"
            " or 1."
        ),
    )

    @property
    def active(self) -> bool:
        """True if the table changes images at all."""
        return bool(
            self.crop_scale is not None
            or self.horizontal_flip > 0
            or self.transforms
            or self.mix is not None
        )

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError("crop_scale must be two numbers 0 < smallest ≤ largest ≤ 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio must be two numbers 0 < smallest ≤ largest")
        return self


class Head(Section):
    """`[head]`: maps features to the embedding, unless a combiner or learner has its own head."""

    embedding_size: Count = Field(64, description="Width of the embedding.")
    hidden: list[Count] = Field(
        [], description="Widths of hidden layers (ReLU between them); none: a linear map."
    )
    normalize: bool = Field(
        True, description="Unit vectors: Euclidean and cosine order are then the same."
    )
    identity: bool = Field(False, description="No head at all: the features are the embedding.")


class Optimizer(Section):
    """`[optimizer]`: an optimiser of `torch.optim` by its class name."""

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
        description=(
            "`constant`, `cosine` or `linear` (both down to 0), or a class of"
            " `torch.optim.lr_scheduler`, stepped once an epoch."
        ),
    )
    warmup: Fraction = Field(
        0.0, description="Part of the phase's steps in which the rate rises from 0."
    )
    options: dict[str, Any] = Field(
        {}, description="Arguments of a `torch.optim.lr_scheduler` class."
    )


class Phase(Section):
    """`[[phase]]`: which parts train, and for how many epochs."""

    name: str = Field("train", description="What to call it in the log.")
    epochs: Count = Field(10, description="Epochs.")
    train: list[Trainable] = Field(
        ["backbone", "head", "combiner", "loss", "generator"],
        description=(
            "The parts that train; the others keep their weights (and batch statistics) as they"
            " are."
        ),
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=(
            "Learning rate of this phase, instead of `[optimizer] lr`: the generator's too, unless"
            " it has a `[generator_optimizer]`."
        ),
    )
    generator_lr: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description=(
            "The generator's learning rate in this phase, instead of what its optimiser says."
        ),
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
    compile: bool = Field(
        False,
        description=(
            "Let `torch.compile` make the backbone's kernels: minutes at the start, faster steps."
            " It needs a C++ compiler on a CPU."
        ),
    )
    deterministic: bool = Field(
        False,
        description=(
            "On a GPU: take only algorithms that give the same bits each time, so that a run"
            " repeats and resumes exactly there too; slower, and a part without one is refused. On"
            " a CPU runs do so anyway."
        ),
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient; none: no clipping."
    )
    patience: Count | None = Field(
        None,
        description=(
            "Stop after this many epochs without a better validation MAP@R; none: never early."
        ),
    )
    validate_every: Count = Field(1, description="Epochs between validations.")
    checkpoint_every: Count | None = Field(
        None, description="Steps between checkpoints; by default one at each epoch's end."
    )
    workers: Annotated[int, Field(ge=0)] = Field(0, description="Processes that load images.")
    start_from: str | None = Field(
        None,
        description=(
            "A run whose weights training starts from, such as `runs/a`; none: those that the parts"
            " come with."
        ),
    )
    start_parts: Annotated[list[Literal["backbone", "head", "combiner"]], Field(min_length=1)] = (
        Field(
            ["backbone", "head", "combiner"],
            description=(
                "The parts that take their weights from that run; each must have the same names and"
                " shapes there."
            ),
        )
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes a GPU when there is one."
    )
    sync_batch_norm: bool = Field(
        False,
        description=(
            "With several processes: batch norm takes mean and variance from the whole batch, as"
            " one process would, instead of from each process's share."
        ),
    )
    real_weight: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description=(
            "With a generator: weight of the same loss on the real negatives, added to the one on"
            " synthetic ones."
        ),
    )
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0,
        description=(
            "With a generator or a combiner: weight λ of the loss, on real and synthetic samples"
            " alike, against the generator's and the combiner's own objectives, as in DAML's J_gen"
            " + μ J_dis + λ J_m."
        ),
    )
    mine: Literal["before", "after"] = Field(
        "before",
        description=(
            "With a generator and a miner: `before` generates from the triplets that the miner"
            " picks; `after` generates from each positive pair and a random negative, and the miner"
            " picks among real and synthetic samples."
        ),
    )
    coupling: Literal["separate", "joint"] = Field(
        "separate",
        description=(
            "With a generator: `separate` steps each side on its own objective; `joint` lets both"
            " gradients flow everywhere."
        ),
    )


class _Loaded:
    """Holds a recipe's plugins, which are not compared or pickled with the recipe."""

    def __init__(self, plugins: Plugins | None = None) -> None:
        self.plugins = plugins

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Loaded)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[_Loaded], tuple[()]]:
        return _Loaded, ()


class Tables(Section):
    """A recipe's tables, each checked on its own; `retrieval.Recipe` is checked as a whole.

    A recipe needs `[data]`, `[backbone]`, and either a `[loss]` (trained by gradient) or a
    `[learner]` (fitted).
    """

    name: str = Field("run", description="What to call the run, and later the bundle.")
    seed: int = Field(0, description="Seed of everything random but the split.")
    plugins: list[str] = Field(
        [],
        description=(
            "Plugin files (`x.py`) and folders (`x/`), relative to the recipe, or modules (`x`)."
        ),
    )
    data: Component = Field(description="The dataset.")
    split: Split = Field(default_factory=Split)
    sampler: Sampler = Field(default_factory=Sampler)
    augmentation: Augmentation = Field(default_factory=Augmentation)
    backbone: Backbone = Field(
        description=(
            "The backbone; `frozen = true` computes its features once and keeps them on disk."
        )
    )
    head: Head = Field(default_factory=Head)
    combiner: Component | None = Field(
        None, description="The distance over codes; it brings its own head."
    )
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
    search: dict[str, Range] = Field(
        {},
        description=(
            "What `retrieval compare --search N` may try, by key: `loss.margin = { low = 0.01, high"
            ' = 1.0, log = true }`, `optimizer.name = { choices = ["SGD", "AdamW"] }`. Training'
            " itself does not read it."
        ),
    )
    _loaded: _Loaded = PrivateAttr(default_factory=_Loaded)

    @field_validator("search", mode="before")
    @classmethod
    def _flat(cls, search: Any) -> Any:
        return flat(search)

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        """Check that the run's name can be the name of a folder."""
        wrong = sorted({c for c in name if c in '/\\<>:"|?*' or not c.isprintable()})
        if (
            not name
            or name != name.strip()
            or name.startswith(".")
            or wrong
            or len(name.encode()) > 100
        ):
            raise ValueError(
                f"{name!r} cannot be a folder's name: 1 to 100 characters, no dot or space at its"
                ' start, no space at its end, and none of / \\ < > : " | ? *'
            )
        return name

    @property
    def batch_size(self) -> int:
        """Number of rows in a training batch over all processes: classes × items × views."""
        return self.sampler.classes * self.sampler.items * self.augmentation.views

    @property
    def phases(self) -> list[Phase]:
        """The phases; without any in the recipe, one that trains for `[train] epochs`."""
        return list(self.phase) or [Phase(epochs=self.train.epochs)]

    @property
    def loaded(self) -> Plugins:
        """The plugins that the recipe was checked with; an unchecked recipe loads them now."""
        if self._loaded.plugins is None:
            self._loaded.plugins = load_plugins(self.plugins)
        return self._loaded.plugins

    @property
    def objects(self) -> dict[str, Any]:
        """The Python objects that replace named parts, by table."""
        return {} if self._loaded.plugins is None else self._loaded.plugins.objects

    def with_plugins(self, plugins: Plugins) -> Self:
        """Return the same recipe with these plugins loaded."""
        copied = self.model_copy()
        copied._loaded = _Loaded(plugins)
        return copied

    def build(self, table: str, **known: Any) -> Any:
        """Build the part that a table names, nested parts first.

        Args:
            table: "data", "backbone", "loss" and so on; the recipe must have the table.
            known: values that the host knows (`retrieval.host.factory.GIVEN`). Each factory gets
                those that it has parameters for.

        Raises:
            PluginError: no plugin offers the part.
            RecipeError: the parameters do not fit, or the factory refuses them.
        """
        part: Component = getattr(self, table)
        return self.loaded.build(COMPONENTS[table], part.table, known)


def host_keys(table: str) -> set[str]:
    """Return the keys of a part's table that the host itself reads, such as `[backbone] frozen`."""
    return set(Backbone.model_fields) - {"name"} if table == "backbone" else set()
