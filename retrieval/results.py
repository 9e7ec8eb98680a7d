"""The types that the functions and methods of `retrieval` return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.data.findings import Findings
    from retrieval.evaluation.evaluate_run import CandidateStep, RunEvaluation
    from retrieval.evaluation.evaluation import Evaluation
    from retrieval.evaluation.verify_run import RunVerification
    from retrieval.export.export_backbone import BackboneEncoder
    from retrieval.serving.bundle import Bundle, Encoded
    from retrieval.serving.encoder import BundleEncoder
    from retrieval.serving.http.server import Serving
    from retrieval.serving.index.adding import Added, Summary
    from retrieval.serving.index.duplicates import Duplicates
    from retrieval.serving.index.hits import Hit, Hits
    from retrieval.serving.index.migrating import Migrated
    from retrieval.serving.store.contract import Generation, Item, Stats
    from retrieval.training.comparison.result import Comparison, Contestant

__all__ = [
    "Added",
    "BackboneEncoder",
    "Bundle",
    "BundleEncoder",
    "CandidateStep",
    "Comparison",
    "Contestant",
    "Duplicates",
    "Encoded",
    "Evaluation",
    "Findings",
    "Generation",
    "Hit",
    "Hits",
    "Item",
    "Migrated",
    "RunEvaluation",
    "RunVerification",
    "Serving",
    "Stats",
    "Summary",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "retrieval.data.findings": ["Findings"],
            "retrieval.evaluation.evaluate_run": ["CandidateStep", "RunEvaluation"],
            "retrieval.evaluation.evaluation": ["Evaluation"],
            "retrieval.evaluation.verify_run": ["RunVerification"],
            "retrieval.serving.bundle": ["Bundle", "Encoded"],
            "retrieval.serving.encoder": ["BundleEncoder"],
            "retrieval.serving.http.server": ["Serving"],
            "retrieval.export.export_backbone": ["BackboneEncoder"],
            "retrieval.serving.index.adding": ["Added", "Summary"],
            "retrieval.serving.index.duplicates": ["Duplicates"],
            "retrieval.serving.index.hits": ["Hit", "Hits"],
            "retrieval.serving.index.migrating": ["Migrated"],
            "retrieval.serving.store.contract": ["Generation", "Item", "Stats"],
            "retrieval.training.comparison.result": ["Comparison", "Contestant"],
        },
    )
