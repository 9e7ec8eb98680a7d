"""Compare two rankings on one page of hits: team-draft interleaving, and the challenger's ranking.

Radlinski, Kurup and Joachims: How Does Clickthrough Data Reflect Retrieval Quality? (CIKM 2008),
algorithm 2. A click counts by how far the rankings disagree on the hit, which tells them apart with
fewer clicks (Yue, Gao, Chapelle, Zhang and Joachims: Learning More Powerful Test Statistics for
Click-Based Retrieval Evaluation, SIGIR 2010). The coins of each page are independent of everything
else, so whoever cannot see them gives both rankings the same credit on average, whatever they click
and at whatever position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.runtime import load_onnxruntime, session_options, start_session
from retrieval.bundle.graphs import GraphError, check_graph
from retrieval.errors import DataError


def team_draft(
    incumbent: Sequence[str], challenger: Sequence[str], k: int, coin: Callable[[], bool]
) -> tuple[list[str], tuple[float, ...]]:
    """Interleave two rankings; return the first k ids, and the credit of each.

    In each round both rankings choose their best id that is not yet chosen; a coin decides which is
    first. Had the coin fallen otherwise, another id would be at the place. The credit, from -1 to
    1, is half of what the challenger raises the id by less what it raises the other one by, in
    shares of the ranking. So the mean credit of each place is zero whatever came before.

    Args:
        incumbent: ids of one ranking, best first, without repetition.
        challenger: ids of the other; ids that one ranking lacks are last in it.
        k: how many ids to choose.
        coin: returns True if the challenger is first in a round.
    """
    by_challenger = list(dict.fromkeys([*challenger, *incumbent]))
    by_incumbent = list(dict.fromkeys([*incumbent, *challenger]))
    places = {id: place for place, id in enumerate(by_incumbent)}
    raised = {id: places[id] - place for place, id in enumerate(by_challenger)}
    chosen: dict[str, float] = {}

    def turns(first: Sequence[str], second: Sequence[str]) -> list[str]:
        best = next(id for id in first if id not in chosen)
        free = (id for id in second if id not in chosen and id != best)
        return [best, *islice(free, 1)]

    while len(chosen) < min(k, len(raised)):
        shown, instead = turns(by_challenger, by_incumbent), turns(by_incumbent, by_challenger)
        if not coin():
            shown, instead = instead, shown
        for id, other in zip(shown, instead, strict=True):
            chosen[id] = round((raised[id] - raised[other]) / (2 * len(raised)), 4)
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
        reason = (
            str(fault) if isinstance(fault, GraphError) else " ".join(str(fault).split())[-400:]
        )
        raise DataError(f"The head of the trial cannot be loaded: {reason}.") from fault

    def run(base: Floats32) -> Floats32:
        (vectors,) = session.run(["vector"], {"input": np.ascontiguousarray(base, np.float32)})
        return np.asarray(vectors, np.float32)

    return run
