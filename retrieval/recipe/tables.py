"""The tables of a recipe, as written in TOML, with their keys, types and defaults."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from retrieval.errors import did_you_mean
from retrieval.host.factory import COMPONENTS
from retrieval.host.plugins import Plugins, load_plugins

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Trainable = Literal["backbone", "head", "combiner", "loss", "generator", "text"]


def selector(text: str) -> str:
    """Return `text` if it is a valid selector. Training checks that a parameter matches."""
    if text in (*get_args(Trainable), "vectors") or re.fullmatch(r"stages:[1-9]\d{0,2}", text):
        return text
    if ":" in text or not any(sign in text for sign in ".*?["):
        parts = get_args(Trainable)
        raise ValueError(
            f"{text!r} selects no parameters.{did_you_mean(text, [*parts, 'vectors'])} Write a"
            f' part ({", ".join(parts)}), "stages:N", "vectors", or a pattern of parameter names,'
            ' such as "backbone.*.bias"'
        )
    return text


Selector = Annotated[str, AfterValidator(selector)]
"""Text that selects parameters of the model and the loss.

The text is the name of a part; `stages:N` for the backbone's first N stages; `vectors` for
parameters of one dimension (biases and the scales of norms); or a shell pattern of full parameter
names, such as `backbone.*.bias`.
"""


class Section(BaseModel):
    """Base class of a recipe's tables; the text below a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        # plugins and hooks receive the recipe, which must stay as it was checked
        frozen=True,
        # a number in quotes is a mistake, which a silent conversion would hide
        strict=True,
        # TOML can write inf and nan
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            # a docstring is wrapped at the width of the code, which a page's table is not
            field.description = " ".join((field.description or "").split())


class Range(Section):
    """One entry of `[search]`: a range of numbers from `low` to `high`, or `choices`."""

    low: int | float | None = None
    """The smallest value."""
    high: int | float | None = None
    """The largest value."""
    log: bool = False
    """Draw evenly on a logarithmic scale, as is usual for learning rates."""
    choices: list[str | int | float | bool] = Field([])
    """A list of values to try, instead of a range."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.choices:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("write either choices, or low and high")
        elif self.low is None or self.high is None or not self.low < self.high:
            raise ValueError("write two numbers low < high, or choices")
        elif self.log and self.low <= 0:
            raise ValueError("with log = true, low must be above 0")
        return self


def flat_search(search: Any) -> Any:
    """Return `[search]` by dotted keys; TOML reads `loss.margin` as nested tables."""
    if not isinstance(search, dict):
        return search
    by_key: dict[str, Any] = {}
    for key, value in search.items():
        # the entries of a table of keys are tables, those of a range are numbers, lists or booleans
        nested = isinstance(value, dict) and all(isinstance(x, dict) for x in value.values())
        if nested and value:
            inner = flat_search(value)
        else:
            inner = {}
        by_key |= {f"{key}.{k}": v for k, v in inner.items()} or {key: value}
    return by_key


class Component(Section):
    """A table that names a plugin's part; its other keys are that part's parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = ""
    """Full name of the part, `PLUGIN.NAME`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The part's parameters, as the recipe has them."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def table(self) -> dict[str, Any]:
        """Name and parameters in one dictionary, the form that `Plugins.build` expects."""
        return {"name": self.name, **self.parameters}


class Backbone(Component):
    """`[backbone]`: maps images or vectors to features."""

    frozen: bool = False
    """Keep the weights fixed; features are then computed once and cached on disk."""


class Split(Section):
    """`[split]`: which items are for training, validation and test."""

    by: Literal["given", "class", "item"] = "given"
    """`given` uses the dataset's own split. `class` holds out whole classes, the usual
    zero-shot protocol. `item` puts items of every class on both sides.
    """
    test: Fraction | list[str | int] = 0.5
    """With `by = "class"`, the fraction of classes to hold out, or a list of classes. With `by
    = "item"`, the fraction of each class's items. Unused with `by = "given"`.
    """
    validation: Fraction = 0.2
    """Fraction of the *training* side that is held out for early stopping; or 0."""
    validation_by: Literal["item", "class"] = "item"
    """Hold out items of every class (`item`) or whole classes (`class`)."""
    source: str | None = None
    """A column of metadata, such as `camera`, whose values are where items come from. A
    `validation` fraction of the sources, at least one, does not train: their validation items
    search those of the other sources, so that the best epoch is best for sources it has not seen.
    """
    seed: int = 0
    """Seed of the split. Runs with different top-level seeds thus share a split."""


class Sampler(Component):
    """`[sampler]`: which items a batch holds, by default P classes × M items."""

    name: str = "core.class_balanced"
    """Full name of the sampler, `PLUGIN.NAME`."""
    classes: Annotated[int, Field(ge=2)] = 16
    """Number of classes P in a batch."""
    items: PositiveInt = 4
    """Number of items M of each class in a batch."""
    batches: PositiveInt | None = None
    """Number of batches in an epoch, by default training items / (P × M)."""


class Augmentation(Section):
    """`[augmentation]`: random changes to training images, applied in the order of the keys."""

    crop_scale: tuple[float, float] | None = None
    """Smallest and largest share of the image's area that a random crop keeps."""
    # as in torchvision's RandomResizedCrop
    crop_ratio: tuple[float, float] = (0.75, 1.3333)
    """Smallest and largest aspect ratio of the crop."""
    horizontal_flip: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Probability of a mirror image."""
    transforms: list[str | dict[str, Any]] = Field([])
    """Further transforms in order: torchvision's by name (`"RandAugment"`, `{ name =
    "RandomAffine", degrees = 15 }`), a plugin's as `PLUGIN.NAME`. `retrieval plugins list
    --kind augmentations` lists all names. A transform receives the image in the backbone's
    input size and must keep that size.
    """
    views: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of differently augmented copies of each item in its batch."""
    positives: Literal["class", "item"] = "class"
    """Which items are positives for loss and miner: items of one `class`, or only the views of
    one `item` (self-supervised). With `item`, training ignores labels, and `[sampler] classes`
    is the number of items in a batch.
    """

    mix: Literal["mixup", "cutmix"] | None = None
    """Mix each image with another of its batch, by a weighted mean (`mixup`) or by pasting a
    box of the other image (`cutmix`). Training uses the weighted mean of the losses for both
    labels. The loss must compare items with classes, not with each other.
    """
    mix_alpha: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """α of the Beta(α, α) distribution from which each batch draws its mixing weight. Small
    values give weights near 0 or 1.
    """

    @property
    def active(self) -> bool:
        """Whether the table changes images at all."""
        return bool(
            self.crop_scale is not None
            or self.horizontal_flip > 0
            or self.transforms
            or self.mix is not None
        )

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError("crop_scale must be two numbers 0 < smallest ≤ largest ≤ 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio must be two numbers 0 < smallest ≤ largest")
        return self


class Head(Section):
    """`[head]`: maps features to the embedding, unless a combiner or learner has its own head."""

    embedding_size: PositiveInt = 64
    """Dimension of the embedding."""
    hidden: list[PositiveInt] = Field([])
    """Widths of hidden layers with ReLU. The default is a linear map."""
    normalise: bool = True
    """Scale embeddings to unit length; distance and cosine then order alike."""
    identity: bool = False
    """Use the features as the embedding, without a head."""


class Text(Component):
    """`[text]`: a second encoder, whose vectors of texts lie in the space of the images' vectors.

    The loss compares a batch's images, as its embeddings, with their texts, as its reference set.
    Each row of a batch draws one of its image's texts. A text is right for all images that have it.
    """

    column: str = "text"
    """The column of metadata that holds an image's texts: text, or a list of texts."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """What separates several texts in one value, such as `";"`; by default a line break."""
    frozen: bool = False
    """Keep the encoder's weights fixed; the features of all texts are then computed once."""
    hidden: list[PositiveInt] = Field([])
    """Widths of hidden layers with ReLU in the texts' own head. The default is a linear map."""
    identity: bool = False
    """Use the encoder's features as the embedding, without a head."""


class Optimizer(Section):
    """`[optimizer]`: an optimiser of `torch.optim` and its learning rates."""

    name: str = "AdamW"
    """A class of `torch.optim`."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    lr_factor: dict[str, NonNegativeFloat] = Field({})
    """Factors of the learning rate. A key is a part (`{ head = 10, loss = 100 }`), the
    backbone's first stages (`"stages:2" = 0.1`), `vectors` (biases, the scales of norms,
    and a transformer's tokens and positions), or a pattern of parameter names
    (`"backbone.*.bias" = 2`). If several keys cover a parameter, the last one applies.
    """
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each backbone stage learns at this factor times the rate of the next stage, and the last
    stage at this factor times `lr`.
    """
    weight_decay: dict[str, NonNegativeFloat] = Field({})
    """Weight decay by the same kinds of key as `lr_factor`. Parameters that no key covers use
    the `weight_decay` of `options`.
    """
    options: dict[str, Any] = Field({})
    """Further arguments of the optimiser's class, such as `weight_decay`."""

    @field_validator("weight_decay", mode="before")
    @classmethod
    def _by_part(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(
                f"write options.weight_decay = {value} for all parameters, or a table by part,"
                f" such as {{ backbone = {value} }}"
            )
        return value

    @field_validator("lr_factor", "weight_decay")
    @classmethod
    def _selectors(cls, values: dict[str, float]) -> dict[str, float]:
        for key in values:
            selector(key)
        return values


class Schedule(Section):
    """`[schedule]`: how the learning rate changes over the steps of a phase."""

    name: str = "constant"
    """`constant`; `cosine` or `linear`, which fall to 0; or a class of
    `torch.optim.lr_scheduler`, which is stepped once an epoch. `ReduceLROnPlateau` is stepped
    after each validation, with `[train] monitor`.
    """
    warmup: float | str = 0.0
    """Time to reach `lr`: a share of a phase, `"500 steps"` or `"2 epochs"`."""
    options: dict[str, Any] = Field({})
    """Arguments of a `torch.optim.lr_scheduler` class."""

    @field_validator("warmup")
    @classmethod
    def _length(cls, warmup: float | str) -> float | str:
        if isinstance(warmup, str):
            valid = re.fullmatch(r"[1-9]\d{0,8} (steps?|epochs?)", warmup) is not None
        else:
            valid = 0 <= warmup < 1
        if not valid:
            raise ValueError('write a share from 0 to below 1, "500 steps" or "2 epochs"')
        return warmup

    def warmup_steps(self, epochs: int, steps: int) -> int:
        """Return the number of warm-up steps in a phase of `epochs` epochs with `steps` each."""
        if not isinstance(self.warmup, str):
            return round(self.warmup * epochs * steps)
        number, unit = self.warmup.split()
        return int(number) * (steps if unit.startswith("epoch") else 1)


class Lora(Section):
    """`[lora]`: train low-rank additions to the backbone's layers instead of their weights."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Rank r of the matrix product B A that is added to a layer's weight."""
    alpha: PositiveInt | None = None
    """α of the scale α / r of each addition. The default is α = r."""
    dropout: Fraction = 0.0
    """Dropout probability of an addition's input in training."""
    modules: list[str] = Field(["*"])
    """Shell patterns of the layers that get an addition, such as `*.attn.qkv`."""


class Phase(Section):
    """`[[phase]]`: which parts train, and for how many epochs."""

    name: str = "train"
    """Name of the phase in the log."""
    epochs: PositiveInt = 10
    """Number of epochs."""
    train: list[Trainable] = Field(["backbone", "head", "combiner", "loss", "generator", "text"])
    """The parts that train. The others keep their weights and batch statistics."""
    freeze: list[Selector] = Field([])
    """Parameters that stay fixed although their part trains, selected by one key of `lr_factor`
    such as `"stages:2"`, or by a list of keys. A layer whose parameters all stay fixed also
    keeps its batch statistics.
    """
    augment: bool = True
    """Whether `[augmentation]` changes images in this phase. Without changes, and if the
    backbone has not trained yet, features are computed once, as with `frozen = true`.
    """
    lr: PositiveFloat | None = None
    """Learning rate of this phase, instead of `[optimizer] lr`; also the generator's, unless
    the recipe has a `[generator_optimizer]`.
    """
    generator_lr: PositiveFloat | None = None
    """The generator's learning rate in this phase, instead of its optimiser's."""
    synthetic: bool = True
    """Whether the loss uses the generator's negatives in this phase."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _listed(cls, freeze: Any) -> Any:
        if isinstance(freeze, str):
            return [freeze]
        return freeze


class Train(Section):
    """`[train]`: how to train."""

    epochs: PositiveInt = 10
    """Number of epochs, if the recipe has no `[[phase]]`."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: `bf16` for CPUs and recent GPUs, `fp16` for older GPUs."""
    chunk: PositiveInt | None = None
    """Number of images or vectors that pass through the model at a time, on each process. This
    saves memory, because only one chunk's activations are kept, but each chunk is computed
    twice. The loss still compares the whole batch, and the gradients are the same, except that
    batch norm in training sees one chunk at a time. The default is the whole batch.
    """
    channels_last: bool = False
    """Store images and weights with channels last, for faster convolutions."""
    compile: bool = False
    """Compile the backbone with `torch.compile`; a CPU needs a C++ compiler."""
    deterministic: bool = False
    """Use only deterministic GPU algorithms: a run repeats exactly, but slower."""
    clip_norm: PositiveFloat | None = None
    """Norm to which larger gradients are clipped. The default is no clipping."""
    patience: PositiveInt | None = None
    """End a phase after this many validations without a better value of `monitor`."""
    monitor: str | dict[str, Any] = "map_at_r"
    """The validation metric that decides the best epoch. Epoch 0 is the start of training."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay, such as 0.999, of a moving average of the weights. The run keeps the average."""
    average_last: Annotated[int, Field(ge=2)] | None = None
    """Number of last epochs of each phase whose weights are averaged."""
    validate_every: PositiveInt = 1
    """Number of epochs between validations."""
    checkpoint_every: PositiveInt | None = None
    """Number of steps between checkpoints. Each epoch ends with one in any case."""
    workers: NonNegativeInt = 0
    """Number of processes that load images."""
    start_from: str | None = None
    """Folder of a run, such as `runs/a`, whose weights training starts from."""
    start_parts: Annotated[list[Literal["backbone", "head", "combiner"]], Field(min_length=1)] = (
        Field(["backbone", "head", "combiner"])
    )
    """The parts whose weights come from that run. Names and shapes must match."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    sync_batch_norm: bool = False
    """Batch norm uses the batch of all processes, instead of each process's share."""
    real_weight: NonNegativeFloat = 0.0
    """With a generator, weight of an additional loss on real samples alone; with a [text], of an
    additional loss of the images with one another, by their labels.
    """
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """With a generator or a combiner, the weight λ of the loss (on real and synthetic samples).
    The objectives of generator and combiner have weight 1, as in DAML's (J_gen + μ J_dis) + λ
    J_m.
    """
    mine: Literal["before", "after"] = "before"
    """With a generator and a miner, when the miner picks. `before`: the miner picks triplets,
    and the generator makes a sample from each. `after`: the generator makes a sample from each
    positive pair and a random negative, and the miner picks among real and synthetic samples.
    """
    coupling: Literal["separate", "joint"] = "separate"
    """With a generator: `separate` trains the generator by its own objective, and all other
    parts by the loss. `joint` trains all parts by the sum of the two.
    """


class Evaluate(Section):
    """`[evaluate]`: the metrics of validation and test."""

    metrics: list[str | dict[str, Any]] = Field(
        ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"]
    )
    """Names of metrics. A plugin's metric has the name `PLUGIN.NAME`. A table sets parameters:
    `{ name = "core.recall_at", k = 5 }`.
    """
    clusters: bool = False
    """Adds NMI and F1 of k-means clusters, where k is the number of classes."""
    exclude: str | None = None
    """A column of metadata, such as `camera`. A query skips gallery items that share its value,
    as in cross-camera, cross-vendor or cross-session search.
    """
    exclude_label: Literal["any", "same"] = "any"
    """Which gallery items `exclude` skips. `any`: all that share the query's value. `same`:
    only those that also share the query's label, so that the others stay as distractors (the
    protocols of Market-1501 and VeRi-776).
    """
    relevant: list[str] = Field([])
    """Columns of metadata that list, separated by `;`, the keys of the gallery items that are
    relevant for a query, whatever the labels. A side without such lists goes by its labels.
    """
    ignored: list[str] = Field([])
    """Columns of metadata that list the keys of gallery items that leave a query's ranking, as junk
    images do (Oxford and Paris). Needs `relevant`.
    """
    levels: list[str] = Field([])
    """Columns of metadata with coarser classes than the label, from fine to coarse, such as
    `genus`, `family`. `ndcg_at_K` then grades an item by the finest class that it shares with the
    query: the label, or else the first such column.
    """
    tags: str | None = None
    """A column of metadata with several labels per item, separated by `;`. Items match if they
    share a label; `ndcg_at_K` grades by the number of shared labels. Training still uses each
    item's single label.
    """
    by: str | None = None
    """A column of metadata, such as `vendor`, for separate metrics of each value."""
    gallery_items: PositiveInt | None = None
    """Number of random test items of each class that form the gallery; the others are queries.
    Metrics are means over `repetitions` draws. 1 is the protocol of VehicleID. By default the
    roles in the data (query or gallery) decide.
    """
    repetitions: PositiveInt = 10
    """Number of random galleries that `gallery_items` draws."""
    open_set: list[Annotated[float, Field(ge=0.0, le=1.0)]] = Field([])
    """False acceptance rates. Each rate f adds DIR@FAR: the share of known queries that are
    identified, at a threshold that accepts at most the share f of the unknown queries. A query is
    unknown if its class is not in the gallery.
    """
    batch_size: PositiveInt = 256
    """Number of images encoded at a time."""


class _Loaded:
    """Holds a recipe's plugins, so that comparing or pickling the recipe ignores them."""

    def __init__(self, plugins: Plugins | None = None) -> None:
        self.plugins = plugins

    def __eq__(self, other: object) -> bool:
        # two recipes are equal if their tables are, whatever is loaded
        return isinstance(other, _Loaded)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[_Loaded], tuple[()]]:
        # the process that unpickles a recipe loads the plugins itself
        return _Loaded, ()


class Tables(Section):
    """A recipe's tables, each checked on its own; `retrieval.Recipe` also checks them together.

    A recipe needs `[data]`, `[backbone]`, and either a `[loss]` (trained by gradient) or a
    `[learner]` (fitted).
    """

    name: str = "run"
    """Name of the run and of its bundle."""
    seed: int = 0
    """Seed of everything random except the split."""
    plugins: list[str] = Field([])
    """Plugins: files `x.py` and folders `x/` beside the recipe, or modules `x`."""
    data: Component
    """The dataset."""
    split: Split = Field(default_factory=Split)
    sampler: Sampler = Field(default_factory=Sampler)
    augmentation: Augmentation = Field(default_factory=Augmentation)
    lora: Lora | None = None
    """Low-rank additions to the backbone's layers, whose own weights stay fixed."""
    backbone: Backbone
    """The backbone; `frozen = true` computes its features once."""
    head: Head = Field(default_factory=Head)
    combiner: Component | None = None
    """The distance between embeddings; a combiner has its own head."""
    loss: Component | None = None
    """The loss."""
    miner: Component | None = None
    """The miner."""
    generator: Component | None = None
    """The generator of synthetic negatives."""
    learner: Component | None = None
    """A learner, instead of a loss."""
    text: Text | None = None
    """The encoder of the images' texts, for search by words."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    generator_optimizer: Optimizer | None = None
    """The generator's own optimiser, by default `[optimizer]`'s settings."""
    schedule: Schedule = Field(default_factory=Schedule)
    phase: list[Phase] = Field([])
    """Phases in order. The default trains everything for `[train] epochs`."""
    train: Train = Field(default_factory=Train)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    search: dict[str, Range] = Field({})
    """Values that `retrieval compare --search N` tries for keys of the recipe: `loss.margin = {
    low = 0.01, high = 1.0, log = true }`, `optimizer.name = { choices = ["SGD", "AdamW"] }`.
    Training ignores this table.
    """
    _loaded: _Loaded = PrivateAttr(default_factory=_Loaded)

    @field_validator("search", mode="before")
    @classmethod
    def _flat(cls, search: Any) -> Any:
        return flat_search(search)

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        """Check that the run's name can be the name of a folder."""
        # Windows refuses these characters; a run may be copied there
        wrong = sorted({c for c in name if c in '/\\<>:"|?*' or not c.isprintable()})
        ends = name == name.strip() and not name.startswith(".")
        if wrong or not ends or not 1 <= len(name.encode()) <= 100:
            raise ValueError(
                f"{name!r} cannot be a folder's name: 1 to 100 bytes in UTF-8, no dot or space at"
                ' its start, no space at its end, and none of / \\ < > : " | ? *'
            )
        return name

    @property
    def batch_size(self) -> int:
        """Number of rows in a training batch over all processes: classes × items × views."""
        return self.sampler.classes * self.sampler.items * self.augmentation.views

    @property
    def phases(self) -> list[Phase]:
        """The recipe's phases, by default one that trains everything for `[train] epochs`."""
        return list(self.phase) or [Phase(epochs=self.train.epochs)]

    def from_features(self, number: int) -> bool:
        """Return whether a phase trains on backbone features that are computed only once."""
        phases = self.phases
        fixed = not any("backbone" in phase.train for phase in phases[: number + 1])
        return self.backbone.frozen or (
            fixed and not (self.augmentation.active and phases[number].augment)
        )

    @property
    def loaded(self) -> Plugins:
        """The plugins that the recipe was checked with; without a check, loaded on first use."""
        if self._loaded.plugins is None:
            self._loaded.plugins = load_plugins(self.plugins)
        return self._loaded.plugins

    @property
    def objects(self) -> dict[str, Any]:
        """The Python objects that replace named parts, by table."""
        if self._loaded.plugins is None:
            return {}
        return self._loaded.plugins.objects

    def with_plugins(self, plugins: Plugins) -> Self:
        """Return the same recipe with these plugins loaded."""
        copied = self.model_copy()
        copied._loaded = _Loaded(plugins)
        return copied

    def build(self, table: str, **known: Any) -> Any:
        """Build the part that a table names, nested parts first.

        Args:
            table: "data", "backbone", "loss" and so on; the recipe must have the table.
            known: values that the host supplies (`retrieval.host.factory.GIVEN`). A factory
                receives those that it has parameters for.

        Raises:
            PluginError: no plugin offers the part.
            RecipeError: the parameters are wrong, or the factory refuses them.
        """
        part: Component = getattr(self, table)
        return self.loaded.build(COMPONENTS[table], part.table, known)


def host_keys(table: str) -> set[str]:
    """Return the keys of a part's table that the host itself reads, such as `[backbone] frozen`."""
    sections: dict[str, type[Component]] = {
        "backbone": Backbone,
        "sampler": Sampler,
        "text": Text,
    }
    return set(sections.get(table, Component).model_fields) - {"name"}
