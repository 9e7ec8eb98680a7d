"""Off-the-shelf models: pretrained backbones by name, and other encoders at an address.

An address is `PLUGIN.BACKBONE:MODEL?PARAMETER=VALUE&…`, or begins with the name of an encoder that
a plugin offers, as `vectors:FILE` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from retrieval.base.arrays import Array, Floats32, Ints
from retrieval.data.datasets import Dataset, Subset
from retrieval.data.features import backbone_features
from retrieval.errors import BundleError, DataError, PluginError, RecipeError, did_you_mean
from retrieval.host.factory import calling
from retrieval.host.plugins import Plugins
from retrieval.model.checked_parts import check_backbone
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model
from retrieval.recipe.read import apply_overrides, naming
from retrieval.run.build import differing_tensors

_BATCH = 256


class ItemEncoder(Protocol):
    """Embeds items of a dataset by a model that is not trained here."""

    def __call__(self, dataset: Dataset, items: Ints, /) -> Array:
        """Return the vectors (N, D), compared by Euclidean distance, of items by index (N,).

        Raises:
            DataError: an item cannot be embedded.
        """


def backbone_at(plugins: Plugins, address: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and parameters of the backbone at an address, or `None` for an encoder's.

    An address with a colon sets `pretrained` and `normalise` to true, if the backbone has these
    parameters. Vectors of length 1 have the same order by Euclidean distance and by cosine.

    Raises:
        PluginError: an address without a colon names no backbone.
        RecipeError: the parameters cannot be read.
    """
    name, colon, rest = address.partition(":")
    if colon:
        factory = plugins.named("backbones", name)
    else:
        factory = plugins.find("backbones", name)
    if factory is None:
        return None
    model, _, query = rest.partition("?")
    table: dict[str, Any] = {"backbone": {}}
    if colon:
        known = {p.name for p in factory.parameters}
        table["backbone"] = {key: True for key in ("pretrained", "normalise") if key in known}
        if model:
            table["backbone"]["model"] = model
    apply_overrides(table, [f"backbone.{text}" for text in query.split("&") if text])
    return name, table["backbone"]


def encoder_at(plugins: Plugins, address: str) -> ItemEncoder:
    """Return the encoder at an address, whose vectors are checked.

    Raises:
        PluginError: there is no such encoder.
        RecipeError: the parameters do not fit the backbone.
        BundleError: the backbone's weights are random, or it takes vectors.
        DataError: the address is wrong, or the model cannot be loaded.
    """
    if named := backbone_at(plugins, address):
        backbone = named_backbone(plugins, *named, random_weights=False)
        return partial(_checked, address, partial(_features, Model(backbone, nn.Identity())))
    scheme, _, rest = address.partition(":")
    factories = {name.partition(".")[2]: f for name, f in plugins.factories("encoders").items()}
    if scheme not in factories or not rest:
        hint = "" if scheme in factories else did_you_mean(scheme, factories)
        raise PluginError(
            f"{address} names no model. Write PLUGIN.BACKBONE:MODEL, such as"
            " core.timm:resnet50.a1_in1k, or an address that begins with"
            f" {', '.join(f'{name}:' for name in factories)}.{hint}"
        )
    with naming(address):
        return partial(_checked, address, factories[scheme].build({"address": address}))


def _checked(address: str, encoder: ItemEncoder, dataset: Dataset, items: Ints) -> Floats32:
    """Return an encoder's vectors (N, D) of items by index (N,), after checking them.

    Raises:
        DataError: a vector is not finite, or an item cannot be embedded.
        PluginError: the encoder fails, or returns something else.
    """
    with calling(f"The model {address}"):
        vectors = np.asarray(encoder(dataset, items))
    if vectors.ndim != 2 or len(vectors) != len(items) or vectors.dtype.kind not in "fiu":
        raise PluginError(
            f"The model {address} gave {vectors.dtype} {vectors.shape} for {len(items):,} items,"
            " and must give one vector of numbers for each."
        )
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite
        checked: Floats32 = vectors.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(checked).all(axis=1))
    if len(bad):
        key = dataset.keys[int(items[bad[0]])]
        raise DataError(f"The model {address} gave NaN or infinity for {key}.")
    return checked


def _features(model: Model, dataset: Dataset, items: Ints) -> Floats32:
    """Return the features (N, F) of a frozen backbone, from the cache or computed now."""
    if dataset.kind != "image":
        raise DataError("It embeds images, but the data hold vectors.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = backbone_features(model, Subset(dataset, items), device, _BATCH).arrays
    return np.asarray(features, np.float32)


def named_backbone(
    plugins: Plugins, name: str, parameters: Mapping[str, Any], random_weights: bool
) -> Backbone:
    """Return an image backbone by name; refuse random weights unless `random_weights` is true.

    The backbone is built with two seeds; weights that differ are random. This check misses the
    random weights of a factory that seeds torch itself.

    Raises:
        PluginError: the backbone does not exist, or breaks its contract.
        RecipeError: the parameters do not fit the backbone.
        BundleError: the backbone takes vectors, or its weights are random.
    """
    factory = plugins.find("backbones", name)
    takes_vectors = f"{name} takes vectors, not images, so it cannot encode photos."
    if factory.takes("features"):
        raise BundleError(takes_vectors)
    if "name" in parameters:
        raise RecipeError("[backbone] name: the backbone is already named. Leave it out.", name)
    table = {**parameters, "name": name}
    if problems := plugins.check("backbones", table, "[backbone]"):
        raise RecipeError(problems, name)

    def build(seed: int) -> Backbone:
        with naming(name), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return check_backbone(plugins.build("backbones", table), name)

    backbone = build(0)
    if backbone.preprocessing is None:
        raise BundleError(takes_vectors)
    if not random_weights and (drawn := differing_tensors(backbone, build(1))):
        raise BundleError(
            f"The weights of {name} are random: {len(drawn)} of its {len(backbone.state_dict())}"
            f" tensors differ from one build to the next, such as '{drawn[0]}'. Load pretrained"
            f" weights by a parameter (`retrieval plugins show {name}` lists them), train it"
            " (retrieval train), or export it as a baseline (retrieval export --random-weights; in"
            " Python retrieval.load(…, random_weights=True))."
        )
    return backbone
