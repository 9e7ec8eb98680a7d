"""`[evaluate]`, the metrics of validation and test."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from retrieval.recipe.section import Count, Section


class Rerank(Section):
    """`[evaluate] rerank`: k-reciprocal re-ranking."""

    k1: Count = Field(20, description="Number of neighbours that must be reciprocal.")
    k2: Count = Field(6, description="Number of neighbours over which an encoding is averaged.")
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.3, description="Weight λ of the original distance against the Jaccard distance."
    )


class Expansion(Section):
    """`[evaluate] expand`, `augment`: replace an item by the mean of itself and its neighbours."""

    k: Count = Field(5, description="Number of neighbours.")
    alpha: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="A neighbour's weight is its cosine to this power α. With 0, all are equal.",
    )


class Evaluate(Section):
    """`[evaluate]`: the metrics of validation and test."""

    metrics: list[str | dict[str, Any]] = Field(
        ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"],
        description=(
            "Metrics by name; a plugin's metric as `PLUGIN.NAME`, with parameters as `{ name ="
            ' "core.recall_at", k = 5 }`.'
        ),
    )
    clusters: bool = Field(
        False, description="Adds NMI and F1 of k-means clusters, with k = number of classes."
    )
    exclude: str | None = Field(
        None,
        description=(
            "A column of the metadata, such as `camera`. For each query, gallery items with the"
            " same value are left out, as in cross-camera, cross-vendor or cross-session search."
        ),
    )
    exclude_label: Literal["any", "same"] = Field(
        "any",
        description=(
            "Which of those items are left out: those of `any` label, or only those of the `same`"
            " label as the query, so that the others stay as distractors (as in the protocols of"
            " Market-1501 and VeRi-776)."
        ),
    )
    levels: list[str] = Field(
        [],
        description=(
            "Columns of metadata with coarser classes, finest first, such as `genus`, `family`."
            " `ndcg_at_K` then grades an item by the finest level that it shares with the query;"
            " the label itself is the finest level."
        ),
    )
    tags: str | None = Field(
        None,
        description=(
            "A column of metadata with several labels per item, separated by `;`. Items match if"
            " they share a label; `ndcg_at_K` grades by the number of shared labels. Training"
            " compares items by their one label, not by these."
        ),
    )
    by: str | None = Field(
        None,
        description=(
            "A column of metadata, such as `vendor`. Adds metrics for the queries of each value."
        ),
    )
    gallery_items: Count | None = Field(
        None,
        description=(
            "Number of random test items of each class in the gallery; the others are queries."
            " Metrics are means over `repetitions`. 1 is the protocol of VehicleID. The default is"
            " the data's own roles."
        ),
    )
    repetitions: Count = Field(10, description="Number of random galleries with `gallery_items`.")
    open_set: list[Annotated[float, Field(ge=0.0, le=1.0)]] = Field(
        [],
        description=(
            "False acceptance rates. Adds DIR@FAR, the share of known queries that are found, at"
            " thresholds that accept this share of queries whose class is not in the gallery."
        ),
    )
    rerank: Rerank | None = Field(
        None,
        description=(
            "Adds metrics after k-reciprocal re-ranking: `{ k1 = 20, k2 = 6, weight = 0.3 }`."
        ),
    )
    expand: Expansion | None = Field(
        None,
        description=(
            "Adds metrics with each query replaced by the mean of itself and its neighbours:"
            " `{ k = 5, alpha = 3.0 }`."
        ),
    )
    augment: Expansion | None = Field(
        None, description="The same for the gallery's items: `{ k = 5, alpha = 3.0 }`."
    )
    latency: bool = Field(
        False, description="Adds the search time per query in milliseconds, on this machine."
    )
    batch: Count = Field(256, description="Number of images encoded at a time.")
