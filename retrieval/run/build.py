"""Build the parts that a checked recipe names, and load weights into them.

Weights come from the run itself, if it is resumed or reopened, or from another run (`[train]
start_from`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.data.datasets import Dataset, check_dataset, usable_dataset
from retrieval.data.loading import as_batch_sampler
from retrieval.errors import DataError, PluginError, RecipeError, did_you_mean
from retrieval.host.factory import calling
from retrieval.host.python_parts import is_object
from retrieval.model.checked_parts import (
    as_backbone,
    check_backbone,
    check_distances,
    check_generator,
    check_head,
    check_kind,
    check_learner,
    check_text_encoder,
    model_parts,
)
from retrieval.model.contracts import Backbone, BatchSampler, Combiner, Generator, Learner
from retrieval.model.model import Model, TextPart, build_head, evaluation_mode
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Evaluate
from retrieval.run import checkpoint_format
from retrieval.run.folder import weights_files


def build_dataset(recipe: Recipe) -> Dataset:
    """Return the recipe's dataset.

    Raises:
        DataError: files are missing or wrong, or items are unusable (see `usable_dataset`).
        RecipeError: `[evaluate]` names metadata columns that no item has.
    """
    # a dataset's factory may import a library that draws from Python's generator
    with checkpoint_format.python_random_kept():
        dataset = check_dataset(recipe.build("data"), recipe.data.name)
    check_columns(recipe.evaluate, dataset)
    return usable_dataset(dataset, f"The dataset {recipe.data.name}")


def check_columns(evaluate: Evaluate, dataset: Dataset) -> None:
    """Check that the dataset's items have the metadata columns that `[evaluate]` names.

    Raises:
        RecipeError: no item has some of the columns; the message lists them.
    """
    lists = ("levels", "relevant", "ignored")
    columns = [(key, name) for key in lists for name in getattr(evaluate, key)]
    for key in ("exclude", "tags", "by"):
        name = getattr(evaluate, key)
        if name is not None:
            columns.append((key, name))
    if not columns:
        return
    existing = sorted({str(name) for row in dataset.metadata or [] for name in row})
    if existing:
        listing = f"they have: {', '.join(existing)}"
    else:
        listing = "they have none"
    problems = [
        f"[evaluate] {key}: the data have no metadata column '{name}'"
        f" ({listing}).{did_you_mean(name, existing)}"
        for key, name in columns
        if name not in existing
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
        # arrays (N, F) and one item (F,) both end in the width; reading an item may open a file
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
    # a warning must not change the numbers that the training draws after it
    with torch.random.fork_rng(devices=[]), checkpoint_format.python_random_kept():
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
    return _add_text(_image_model(recipe, dataset), recipe)


def _image_model(recipe: Recipe, dataset: Dataset) -> Model:
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
        # nothing to combine: the distance of the codes is the plain one, which needs no rescorer
        if combiner.plain:
            return Model(backbone, built, None)
        return Model(backbone, built, check_distances(combiner, name, built, backbone.features))
    if recipe.head.identity:
        return Model(backbone, nn.Identity())
    head = recipe.head
    with calling(f"[head] embedding_size = {head.embedding_size}, hidden = {head.hidden}"):
        layers = build_head(backbone.features, head.embedding_size, head.hidden, head.normalise)
    return Model(backbone, layers)


def _add_text(model: Model, recipe: Recipe) -> Model:
    """Return a model with the recipe's part for texts, if it has one."""
    table = recipe.text
    if table is None:
        return model
    encoder = recipe.build("text")
    features = check_text_encoder(encoder, table.name)
    width = code_size(model)
    head: nn.Module = nn.Identity()
    if not table.identity:
        head = build_head(features, width, table.hidden, recipe.head.normalise)
    elif features != width:
        raise RecipeError(
            f"[text] identity = true: {table.name} gives {features} features, but the embedding of"
            f" an image has {width} numbers. Remove identity, or change [head]."
        )
    model.text = TextPart(encoder, head, table.frozen)
    return model


def code_size(model: Model) -> int:
    """Return the number of columns of the model's codes, the output of its head."""
    # measured, because a combiner's head may give codes of another width than its embeddings
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
    # by identity: a head that the generator copies is its own, and allowed
    parts = {id(part) for part in (*model.modules(), *model.parameters())}
    if any(id(part) in parts for part in (*generator.modules(), *generator.parameters())):
        raise PluginError(
            f"{type(generator).__name__}.bind(head) registers the head as a submodule, so the"
            " head's weights would be saved and trained twice. Store it in a tuple instead:"
            " self._head = (head,)."
        )


def load_weights(model: Model, state: Mapping[str, Any], path: Path) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        DataError: the weights do not match the model.
    """
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        detail = (str(error).splitlines() or ["?"])[-1].strip().rstrip(".")
        raise DataError(
            f"{path}: the checkpoint does not match the model: {detail}. The recipe or a plugin has"
            " changed since training."
        ) from error


def take_weights(model: Model, recipe: Recipe) -> None:
    """Load into a model the weights of the run that `[train] start_from` names, if it is set.

    `[train] start_parts` names the parts to load. A recipe with a learner loads only the backbone.

    Raises:
        RecipeError: the run does not exist, or some of its weights do not match the model's in name
            or shape; the message lists the first eight.
        DataError: the run's checkpoint is damaged.
    """
    if recipe.train.start_from is None:
        return
    source = Path(recipe.train.start_from)
    if source.is_file():
        files = [source]
    else:
        files = weights_files(source)
    if not files:
        raise RecipeError(
            f"[train] start_from: {source} is neither a checkpoint nor a run with a checkpoint."
        )
    loaded: dict[str, Tensor] = checkpoint_format.load_checkpoint(files[0])["model"]
    parts = [
        part for part in recipe.train.start_parts if recipe.learner is None or part == "backbone"
    ]
    faults = {part: _mismatches(part, model.state_dict(), loaded) for part in parts}
    if problems := [problem for sentences in faults.values() for problem in sentences]:
        matching = ", ".join(f'"{part}"' for part in parts if not faults[part])
        advice = f"Load only the parts that match: [train] start_parts = [{matching}]."
        raise RecipeError(
            [
                *(f"[train] start_from: {problem}" for problem in problems[:8]),
                advice if matching else "No part matches. Name a run of the same model.",
            ]
        )
    model.load_state_dict(
        {name: value for name, value in loaded.items() if name.partition(".")[0] in parts},
        strict=False,
    )


def _mismatches(part: str, built: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """Return a sentence for each weight of a part that one model lacks, or whose shapes differ."""
    problems = []
    for name in dict.fromkeys([*built, *loaded]):
        if not name.startswith(f"{part}."):
            continue
        shape, loaded_shape = (tuple(w[name].shape) if name in w else None for w in (built, loaded))
        if shape is None:
            problems.append(f"that run has {name} {loaded_shape}, but this model does not.")
        elif loaded_shape is None:
            problems.append(f"this model has {name} {shape}, but that run does not.")
        elif shape != loaded_shape:
            problems.append(f"{name} has shape {loaded_shape} in that run, but {shape} here.")
    return problems


def build_learner(recipe: Recipe, features: int) -> Learner:
    """Return the recipe's learner, unfitted."""
    assert recipe.learner is not None
    learner = recipe.build("learner", features=features)
    check_learner(learner, recipe.learner.name)
    return cast(Learner, learner)


def fitted_state(learner: Learner) -> dict[str, Any]:
    """Return a fitted estimator's learned attributes that are arrays, numbers, text or `None`.

    scikit-learn ends the names of learned attributes with an underscore, such as `components_`.
    """
    state: dict[str, Any] = {}
    for name, value in vars(learner).items():
        if not name.endswith("_") or name.startswith("_"):
            continue
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            state[name] = torch.from_numpy(np.array(value))
        elif isinstance(value, bool | int | float | str) or value is None:
            state[name] = value
    return state


def load_learned(recipe: Recipe, dataset: Dataset, path: Path) -> Model:
    """Return the model of a fitted learner, rebuilt from its checkpoint without fitting again.

    Raises:
        DataError: the checkpoint is missing, damaged, or belongs to another recipe.
    """
    state = checkpoint_format.load_checkpoint(path, checkpoint_format.TRAIN_AGAIN)
    backbone = build_backbone(recipe, dataset)
    learner = build_learner(recipe, backbone.features)
    for name, value in state.get("learner", {}).items():
        setattr(learner, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    assert recipe.learner is not None
    name = recipe.learner.name
    try:
        head, combiner = model_parts(learner, name, backbone.features)
    except PluginError as error:
        raise DataError(
            f"{path} lacks what the learner {name} needs: {error.__cause__ or error}."
            f" {checkpoint_format.TRAIN_AGAIN}"
        ) from error
    model = Model(backbone, head, combiner)
    load_weights(model, state, path)
    return model.eval()
