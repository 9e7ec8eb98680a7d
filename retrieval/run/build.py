"""Build the parts that a checked recipe names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from retrieval.data.datasets import Dataset, check_dataset, usable_dataset
from retrieval.data.loading import as_batch_sampler
from retrieval.errors import PluginError, RecipeError, did_you_mean
from retrieval.host.factory import calling
from retrieval.host.python_parts import is_object
from retrieval.model.contracts import Backbone, BatchSampler, Combiner, Generator
from retrieval.model.model import Model, build_head, evaluation_mode
from retrieval.model.products import (
    as_backbone,
    check_backbone,
    check_distances,
    check_generator,
    check_head,
    check_kind,
)
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Evaluate
from retrieval.run.checkpoint import python_random_kept


def build_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's dataset.

    Raises:
        DataError: files are missing or wrong, or items are unusable (see `usable_dataset`).
        RecipeError: `[evaluate]` names metadata columns that no item has.
    """
    with python_random_kept():
        dataset = check_dataset(recipe.build("data"), recipe.data.name)
    check_columns(recipe.evaluate, dataset)
    return usable_dataset(dataset, f"The dataset {recipe.data.name}")


def check_columns(evaluate: Evaluate, dataset: Dataset) -> None:
    """Check that the dataset's items have the metadata columns that `[evaluate]` names.

    Raises:
        RecipeError: no item has some of the columns; the message lists them.
    """
    columns = [("levels", name) for name in evaluate.levels]
    for key in ("exclude", "tags", "by"):
        if (name := getattr(evaluate, key)) is not None:
            columns.append((key, name))
    if not columns:
        return
    known = sorted({str(name) for row in dataset.metadata or [] for name in row})
    if known:
        listing = f"they have: {', '.join(known)}"
    else:
        listing = "they have none"
    problems = [
        f"[evaluate] {key}: the data have no metadata column '{name}'"
        f" ({listing}).{did_you_mean(name, known)}"
        for key, name in columns
        if name not in known
    ]
    if problems:
        raise RecipeError(problems)


def build_sampler(recipe: Recipe) -> BatchSampler:
    """Return the sampler that chooses the items of the recipe's batches."""
    sampler = recipe.sampler
    size = sampler.classes * sampler.items
    return as_batch_sampler(recipe.build("sampler"), sampler.name, recipe.seed, size)


def build_backbone(recipe: Recipe, dataset: Dataset) -> Backbone:
    """Return the recipe's backbone.

    Raises:
        RecipeError: the backbone does not accept the dataset's items.
    """
    width = None
    if dataset.kind == "features":
        first: Any = dataset.arrays
        if first is None:
            first = dataset[0]
        width = int(first.shape[-1])
    elif recipe.loaded.find("backbones", recipe.backbone.name).takes("features"):
        raise RecipeError(
            f"[backbone] {recipe.backbone.name} takes vectors, but [data] {recipe.data.name}"
            " returns images."
        )
    backbone_object = recipe.build("backbone", features=width)
    if is_object(recipe.backbone.name):
        backbone_object = as_backbone(backbone_object, recipe.backbone.name, width)
    backbone = check_backbone(backbone_object, recipe.backbone.name)
    if dataset.kind == "features" and backbone.preprocessing is not None:
        raise RecipeError(
            f"[backbone] {recipe.backbone.name} takes images, but [data] {recipe.data.name}"
            " returns vectors. Use core.features."
        )
    return backbone


def drawn_at_random(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Return the names of the backbone's tensors that are initialised at random.

    The backbone is built with two seeds, and its tensors are compared. This comparison misses the
    tensors of a factory that seeds torch itself. The result is empty if `[train] start_from` loads
    the backbone's weights.
    """
    if recipe.train.start_from is not None and "backbone" in recipe.train.start_parts:
        return []
    builds = []
    with torch.random.fork_rng(devices=[]), python_random_kept():
        for seed in (0, 1):
            torch.manual_seed(seed)
            builds.append(build_backbone(recipe, dataset))
    return differing_tensors(*builds)


def differing_tensors(backbone: Backbone, other: Backbone) -> list[str]:
    """Return the names of the tensors that differ between two builds of a backbone."""
    tensors = other.state_dict()
    return [
        name
        for name, value in backbone.state_dict().items()
        if name not in tensors or not torch.equal(value, tensors[name])
    ]


def build_model(recipe: Recipe, dataset: Dataset) -> Model:
    """Return the untrained model of a recipe with a loss."""
    backbone = build_backbone(recipe, dataset)
    if recipe.combiner is not None:
        name = recipe.combiner.name
        combiner_object = recipe.build(
            "combiner", features=backbone.features, embedding_size=recipe.head.embedding_size
        )
        combiner = check_kind(combiner_object, Combiner, name)
        with calling(f"The combiner {name}, called as build_head({backbone.features}),"):
            built = combiner.build_head(backbone.features)
        check_head(built, f"The combiner {name}", backbone.features)
        if combiner.plain:
            return Model(backbone, built, None)
        return Model(backbone, built, check_distances(combiner, name, built, backbone.features))
    if recipe.head.identity:
        return Model(backbone, nn.Identity())
    head = recipe.head
    with calling(f"[head] embedding_size = {head.embedding_size}, hidden = {head.hidden}"):
        layers = build_head(backbone.features, head.embedding_size, head.hidden, head.normalise)
    return Model(backbone, layers)


def code_size(model: Model) -> int:
    """Return the number of columns of the model's codes, the output of its head."""
    weight = next(iter(model.head.parameters()), torch.empty(0))
    with evaluation_mode(model.head), torch.no_grad():
        codes = model.head(torch.zeros(2, model.backbone.features, device=weight.device))
    return int(codes.shape[1])


class Objective(nn.Module):
    """The loss that trains a model, with an optional miner and an optional generator.

    Args:
        loss: called with codes, labels and the miner's indices, if there is a miner.
        miner: selects the pairs or triplets that the loss compares; called with codes and labels.
        generator: makes synthetic samples.
        classes: number of training classes.
    """

    def __init__(
        self,
        loss: nn.Module,
        miner: nn.Module | None = None,
        generator: Generator | None = None,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.loss = loss
        self.miner = miner
        self.generator = generator


def build_objective(recipe: Recipe, model: Model, classes: int) -> Objective:
    """Return the recipe's loss, miner and generator for a model and its training classes."""
    arguments: dict[str, Any] = {
        "features": model.backbone.features,
        "embedding_size": code_size(model),
        "classes": classes,
        "distance": model.combiner,
    }
    assert recipe.loss is not None
    loss = as_module(recipe.build("loss", **arguments), "loss", recipe.loss.name)
    miner = None
    if recipe.miner:
        miner = as_module(recipe.build("miner", **arguments), "miner", recipe.miner.name)
    generator = None
    if recipe.generator:
        generator = check_generator(recipe.build("generator", **arguments), recipe.generator.name)
        with calling(f"The generator {recipe.generator.name}, called as bind(head),"):
            _bind(generator, model)
    return Objective(loss, miner, generator, classes)


def loss_sizes(objective: Objective, width: int) -> str:
    """Return a hint on the sizes of a loss's weights, or "" if the loss has no weights."""
    shapes = [str(tuple(p.shape)) for p in objective.loss.parameters()]
    if not shapes:
        return ""
    return (
        f" Its weights have the shape {' and '.join(shapes)}. This recipe trains on"
        f" {objective.classes:,} classes (num_classes) with embeddings of width {width}"
        " (embedding_size)."
    )


class Called(nn.Module):
    """Wraps a loss or miner that is a plain callable as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the wrapped function."""
        return self.call(*arguments, **named)


def as_module(part_object: Any, part: str, name: str) -> nn.Module:
    """Return a loss or miner as a module.

    Raises:
        PluginError: the loss or miner cannot be called.
    """
    if isinstance(part_object, nn.Module):
        return part_object
    if not callable(part_object):
        raise PluginError(
            f"The {part} {name} is an object of type {type(part_object).__name__}, which cannot be"
            " called. Its factory must return a module whose forward takes embeddings and labels."
        )
    return Called(part_object)


def _bind(generator: Generator, model: Model) -> None:
    generator.bind(model.head)
    parts = {id(part) for part in (*model.modules(), *model.parameters())}
    if any(id(part) in parts for part in (*generator.modules(), *generator.parameters())):
        raise PluginError(
            f"{type(generator).__name__}.bind(head) registers the head as a submodule, so the"
            " head's weights would be saved and trained twice. Store it in a tuple instead:"
            " self._head = (head,)."
        )
