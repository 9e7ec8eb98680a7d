"""The recipe's table `[evaluate]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from retrieval.recipe.section import Section


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
