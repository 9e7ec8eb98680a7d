"""Compare two rankings on one page of hits: team-draft interleaving, and the challenger's ranking.

Radlinski, Kurup and Joachims: How Does Clickthrough Data Reflect Retrieval Quality? (CIKM 2008),
algorithm 2. The weight of a click is how far the rankings disagree on the hit, so fewer clicks tell
them apart (Yue, Gao, Chapelle, Zhang and Joachims: Learning More Powerful Test Statistics for
Click-Based Retrieval Evaluation, SIGIR 2010). The coins of each page are independent of everything
else, so users who cannot see them give both rankings the same mean credit if they click by position
or at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.runtime import load_onnxruntime, session_options, start_session
from retrieval.bundle.graphs import check_graph
from retrieval.errors import DataError


def team_draft(
    incumbent: Sequence[str], challenger: Sequence[str], k: int, coin: Callable[[], bool]
) -> tuple[list[str], tuple[float, ...]]:
    """Interleave two rankings; return the first k ids, and the credit of each.

    In each round both rankings choose their best id that is not yet chosen; a coin decides which is
    first. If the coin had fallen the other way, another id would be in this position. The credit of
    an id, from -1 to 1, is half of (how far the challenger raises it, minus how far it raises that
    other id), as a share of the ranking. So each position has a mean credit of zero, whatever came
    before.

    Args:
        incumbent: ids of one ranking, best first, without repetition.
        challenger: ids of the other; ids that one ranking lacks are last in it.
        k: how many ids to choose.
        coin: returns True if the challenger is first in a round.
    """
    by_challenger = list(dict.fromkeys([*challenger, *incumbent]))
    by_incumbent = list(dict.fromkeys([*incumbent, *challenger]))
    ranks = {id: rank for rank, id in enumerate(by_incumbent)}
    rise = {id: ranks[id] - rank for rank, id in enumerate(by_challenger)}
    chosen: dict[str, float] = {}

    def round_of(first: Sequence[str], second: Sequence[str]) -> list[str]:
        best = next(id for id in first if id not in chosen)
        free = (id for id in second if id not in chosen and id != best)
        return [best, *islice(free, 1)]

    while len(chosen) < min(k, len(rise)):
        page = round_of(by_challenger, by_incumbent)
        other_page = round_of(by_incumbent, by_challenger)
        if not coin():
            page, other_page = other_page, page
        for id, other in zip(page, other_page, strict=True):
            chosen[id] = round((rise[id] - rise[other]) / (2 * len(rise)), 4)
    return list(chosen)[:k], tuple(chosen.values())[:k]


def load_head(head: bytes | None) -> Callable[[Floats32], Floats32]:
    """Return a function from base vectors (N, P) to a head's vectors (N, P'), on one thread.

    Args:
        head: ONNX graph from "input" to "vector"; None returns the base vectors themselves.

    Raises:
        DataError: the graph is refused or cannot be loaded.
    """
    if head is None:
        return lambda base: base
    runtime = load_onnxruntime()
    try:
        check_graph(head)
        session, _ = start_session(runtime, head, session_options(runtime, 1), ["cpu"])
    except Exception as fault:  # ONNX Runtime's errors share no public base class
        reason = " ".join(str(fault).split())[-400:]
        raise DataError(f"The head of the trial cannot be loaded: {reason}.") from fault

    def run(base: Floats32) -> Floats32:
        (vectors,) = session.run(["vector"], {"input": np.ascontiguousarray(base, np.float32)})
        return np.asarray(vectors, np.float32)

    return run
