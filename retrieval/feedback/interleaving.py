"""Compare two rankings on one page of hits: team-draft interleaving, and the challenger's ranking.

Radlinski, Kurup and Joachims: How Does Clickthrough Data Reflect Retrieval Quality? (CIKM 2008),
algorithm 2. The coins of each page are independent of everything else, so whoever cannot see the
teams gives both the same credit on average, whatever they click and at whatever position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.runtime import load_onnxruntime, session_options, start_session
from retrieval.bundle.graphs import GraphError, check_graph
from retrieval.errors import DataError

CHALLENGER, INCUMBENT = "c", "i"


def team_draft(
    incumbent: Sequence[str], challenger: Sequence[str], k: int, coin: Callable[[], bool]
) -> tuple[list[str], str]:
    """Interleave two rankings; return the first k ids, and for each the team that chose it.

    In each round both teams choose the best id of their ranking that is not yet chosen; a coin
    decides who is first. If one ranking ends, the other chooses the rest.

    Args:
        incumbent: ids of one ranking, best first, without repetition.
        challenger: ids of the other.
        k: how many ids to choose.
        coin: returns True if the challenger is first in a round.
    """
    rankings = {CHALLENGER: iter(challenger), INCUMBENT: iter(incumbent)}
    chosen: dict[str, str] = {}
    while len(chosen) < k:
        if coin():
            turns = (CHALLENGER, INCUMBENT)
        else:
            turns = (INCUMBENT, CHALLENGER)
        before = len(chosen)
        for team in turns:
            id = next((id for id in rankings[team] if id not in chosen), None)
            if id is not None and len(chosen) < k:
                chosen[id] = team
        if len(chosen) == before:
            break
    return list(chosen), "".join(chosen.values())


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
