"""The types that the functions and methods of `retrieval` return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval.bundle.bundle import Bundle as Bundle, Encoded as Encoded
    from retrieval.bundle.encoder import BundleEncoder as BundleEncoder
    from retrieval.evaluation.evaluate_run import (
        CandidateStep as CandidateStep,
        RunEvaluation as RunEvaluation,
    )
    from retrieval.evaluation.evaluation import Evaluation as Evaluation
    from retrieval.evaluation.verify_run import RunVerification as RunVerification
    from retrieval.export.export_backbone import BackboneEncoder as BackboneEncoder
    from retrieval.index.adding import Added as Added, Summary as Summary
    from retrieval.index.calibration import (
        Calibration as Calibration,
        KnownShares as KnownShares,
    )
    from retrieval.index.duplicates import Duplicates as Duplicates
    from retrieval.index.golden import GoldenReport as GoldenReport, QueryScore as QueryScore
    from retrieval.index.identify import Verdict as Verdict
    from retrieval.index.migrating import Migrated as Migrated
    from retrieval.index.queries_and_hits import Hit as Hit, Hits as Hits
    from retrieval.store.contract import (
        Generation as Generation,
        Item as Item,
        Stats as Stats,
    )
    from retrieval.training.comparison.result import (
        Comparison as Comparison,
        Contestant as Contestant,
    )
    from retrieval_lab.findings import Findings as Findings
    from retrieval_server.server import Serving as Serving
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
