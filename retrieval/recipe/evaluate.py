"""`[evaluate]`: what is measured, and by which protocol."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from retrieval.recipe.section import Count, Section


class Rerank(Section):
    """`[evaluate] rerank`: k-reciprocal re-ranking."""

    k1: Count = Field(20, description="Neighbours that must be reciprocal.")
    k2: Count = Field(6, description="Neighbours that an encoding is averaged over.")
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.3, description="λ, of the distance itself against the Jaccard distance."
    )


class Expansion(Section):
    """`[evaluate] expand`, `augment`: items as means of themselves and their neighbours."""

    k: Count = Field(5, description="Neighbours.")
    alpha: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="α: a neighbour's weight is its cosine to this power; 0: all weigh the same.",
    )


class Evaluate(Section):
    """`[evaluate]`: the figures of validation and test."""

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
            "A column of metadata, such as `vendor`: also the figures of each value's queries."
        ),
    )
    gallery_items: Count | None = Field(
        None,
        description=(
            "So many random test items of each class are the gallery, the others are queries, and"
            " figures are means over `repetitions`, as VehicleID is measured with 1; none: the"
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
            "Also figures after k-reciprocal re-ranking: `{ k1 = 20, k2 = 6, weight = 0.3 }`."
        ),
    )
    expand: Expansion | None = Field(
        None,
        description=(
            "Also figures with each query as a mean of itself and its neighbours: `{ k = 5, alpha ="
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
