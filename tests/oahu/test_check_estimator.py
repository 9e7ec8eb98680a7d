"""scikit-learn's own checks of every learner from a stream, and the two that a learner of triplets
cannot pass.
"""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from retrieval_oahu import LEGO, OAHU, OASIS, OPML, RDML, Warm

SHORT = {"seeds": 50, "closure": 50}
SINGLE = OAHU(depth=2, hidden=8, embedding=4, **SHORT)  # type: ignore[arg-type]
LEARNERS = [
    OAHU(depth=2, hidden=8, embedding=4, dtype="float64", **SHORT),  # type: ignore[arg-type]
    Warm(**SHORT),  # type: ignore[arg-type]
    LEGO(**SHORT),  # type: ignore[arg-type]
    RDML(**SHORT),  # type: ignore[arg-type]
    OASIS(**SHORT),  # type: ignore[arg-type]
    OPML(),
]
TRIPLETS = (
    "partial_fit takes triplets (T, 3, F): a stream of them has neither rows nor labels, which the"
    " check gives it"
)


ROUNDING = (
    "compares to 1e-9, and products in float32 round by the order of rows: a machine's BLAS"
    " decides; dtype float64 passes"
)


def expected_failures(learner: Any) -> dict[str, str]:
    """Every check that fails, with the reason: both call `partial_fit(X, y)` with labelled rows."""
    return {"check_fit_score_takes_y": TRIPLETS, "check_n_features_in_after_fitting": TRIPLETS}


def of_single_precision(learner: Any) -> dict[str, str]:
    """The same, and one that rounding may fail."""
    return {**expected_failures(learner), "check_methods_sample_order_invariance": ROUNDING}


@parametrize_with_checks(LEARNERS, expected_failed_checks=expected_failures, xfail_strict=True)  # type: ignore[untyped-decorator]
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@parametrize_with_checks([SINGLE], expected_failed_checks=of_single_precision)  # type: ignore[untyped-decorator]
def test_scikit_learns_checks_of_single_precision(estimator, check):
    check(estimator)
