"""The error and power of the gate, by simulation, and the time to learn from 100,000 marks.

    OMP_NUM_THREADS=1 python benchmarks/learning.py    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/learning.py --quick    # a tenth of it, keeps nothing

*sticky* voters always click the same places, and most imitate the one before; the challenger is not
better. A voter of *gain* g prefers the challenger's hits in (1 + g) / 2 of the searches. *watch* is
of what was proven with a mean outcome of .3, so it must keep .05: outcomes of ½ or −½ whose mean is
the *gain*, after 100 searches in which it was .3. The time
is CPU time of one thread, from a record of 25,000 searches of 2,000 voters over Fashion-MNIST's
vectors (`feedback.py`; 128 numbers), with four clicks each.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.feedback.feedback_record import CLICKED, FEEDBACK_FILE, FeedbackRecord, Search
from retrieval.feedback.interleaving import team_draft
from threadpoolctl import threadpool_limits

from bench import Kept, markdown, one_thread, page, resume_arguments
from feedback import LEARNERS, loaded, make_index
from retrieval_feedback.gate import SEARCHES_PER_FALSE_ALARM, error_rate, search_outcome, weigh
from retrieval_feedback.triplets import preferred_and_skipped
from retrieval_feedback.worker import Worker

CASES = (("sticky", 0.0, 60), ("even", 0.0, 400), ("gain", 0.3, 60), ("gain", 0.2, 120))
CASES += (("gain", 0.1, 400), ("gain", -0.2, 100))
WATCHES = (("watch", 0.3, 200), ("watch", 0.05, 200), ("watch", 0.0, 200), ("watch", -0.3, 200))
TRIALS, MARKED = 1000, 25_000
SEARCHES = 4
"""Searches of each simulated judge."""
PROVEN, WATCHED, BEFORE, LONG = 0.3, 0.05, 100, 1000
Row = dict[str, Any]


def sticky(rng: np.random.Generator, voters: int) -> list[tuple[str, float]]:
    """Return outcomes of voters who click by place, and imitate each other."""
    outcomes = []
    places = rng.permutation(10)[:3]
    for voter in range(voters):
        if rng.random() < 0.3:
            places = rng.permutation(10)[: rng.integers(1, 8)]
        for _ in range(rng.geometric(0.2)):
            rankings = rng.permutation(20).astype(str), rng.permutation(20).astype(str)
            hits, credits = team_draft(*map(list, rankings), 10, lambda: rng.random() < 0.5)
            marks = {hits[place]: CLICKED for place in places}
            of_hit = dict(zip(hits, credits, strict=True))
            outcomes.append(
                (f"v{voter}", search_outcome(of_hit, *preferred_and_skipped(hits, marks)))
            )
    return outcomes


def gate(kind: str, gain: float, voters: int, trials: int) -> Row:
    """Return the verdicts of simulated trials at the first level."""
    verdicts = []
    searches = []
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        if kind == "sticky":
            outcomes = sticky(rng, voters)
        else:
            signs = np.where(rng.random(voters * SEARCHES) < (1 + gain) / 2, 1.0, -1.0)
            outcomes = [(f"v{n % voters}", sign) for n, sign in enumerate(signs.tolist())]
        evidence = weigh(outcomes, error_rate(1))
        verdicts.append(evidence.verdict)
        if evidence.verdict == "better":
            searches.append(evidence.searches)
    return {
        "trials": trials,
        "better": verdicts.count("better"),
        "refused": verdicts.count("refused"),
        "searches": float(np.median(searches)) if searches else None,
    }


def watch(gain: float, voters: int, trials: int) -> Row:
    """Return how often a watch raises an alarm within `LONG` searches, and after how many."""
    delays = []
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        leads = np.repeat([PROVEN, gain], [BEFORE, LONG])
        values = np.where(rng.random(len(leads)) < 0.5 + leads, -0.5, 0.5).tolist()
        outcomes = [(f"v{rng.integers(voters)}", value) for value in values]
        evidence = weigh(outcomes, 1 / SEARCHES_PER_FALSE_ALARM, watched=WATCHED)
        if evidence.verdict == "better":
            delays.append(evidence.searches - BEFORE)
    return {
        "trials": trials,
        "alarms": len(delays),
        "early": sum(delay <= 0 for delay in delays),
        "searches": float(np.median(delays)) if delays else None,
    }


def speed(marked: int) -> Row:
    """Return the time in which the worker learns from a record, and what it compared."""
    vectors, _, taste = loaded("fashion", Path())
    rng = np.random.default_rng(0)
    rows = np.arange(len(vectors))
    with (
        tempfile.TemporaryDirectory() as scratch,
        threadpool_limits(1),
        make_index(Path(scratch), vectors, rows) as index,
        FeedbackRecord.open(Path(scratch) / "index" / FEEDBACK_FILE, create=True) as record,
    ):
        sha = index.bundle.sha256
        for number in range(marked):
            query = int(rng.integers(len(vectors)))
            hits = rng.choice(rows, 10, replace=False)
            wanted = np.argsort(taste[hits] != taste[query], kind="stable")[:4]
            clicks = {str(hits[place]): CLICKED for place in wanted}
            ids = tuple(map(str, hits.tolist()))
            keys = (str(number), time.time(), f"v{rng.integers(2000)}", sha, sha)
            record.note_searches([Search(*keys, None, str(query), ids)])
            record.add(str(number), keys[2], clicks)
        marks = record.counts()["marks"]
        worker = Worker(index, record, LEARNERS)
        started = time.process_time()
        step = worker.step()
        seconds = time.process_time() - started
    return {
        "marks": marks,
        "triplets": step.facts["triplets"],
        "learner": step.facts["candidates"][0]["learner"],
        "seconds": round(seconds, 1),
    }


def render(rows: list[Row]) -> str:
    table = [
        [
            row["kind"],
            f"{row['gain']:+g}",
            f"{row['voters']}",
            f"{row['better'] / row['trials']:.1%}",
            f"{row['refused'] / row['trials']:.1%}",
            f"{row['searches']:,.0f}" if row["searches"] else "",
        ]
        for row in rows
        if row["kind"] not in ("speed", "watch")
    ]
    watches = [
        [
            f"{row['gain']:+g}",
            f"{row['alarms'] / row['trials']:.1%}",
            f"{row['searches']:,.0f}" if row["searches"] else "",
        ]
        for row in rows
        if row["kind"] == "watch"
    ]
    told = next((row for row in rows if row["kind"] == "speed"), None)
    speed_line = ""
    if told:
        speed_line = (
            f"From {told['marks']:,} clicks, the worker took {told['seconds']:.0f} s of one core to"
            f" learn the teaching voters' {told['triplets']:,} preferences, to compare all learners"
            f" on the latest of them, and to export the best, {told['learner']}."
        )
    return page(f"""
        # The gate, and how long learning takes

        `python benchmarks/learning.py`. {TRIALS:,} simulated trials at the first level, 2.5 %,
        looked at after each search; {SEARCHES} searches of each voter count. *Better* is the share
        of trials that were decided for the challenger, *searches* the median until then.

        {markdown(["voters", "gain", "judges", "better", "refused", "searches"], table)}

        As many simulated watches of what was proven with a lead of .3, which must keep .05. After
        {BEFORE} searches the *lead* is another one; *alarms* is the share of watches that take it
        back within {LONG:,} searches from then, *searches* the median until then.

        {markdown(["lead", "alarms", "searches"], watches)}

        {speed_line}
    """)


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="see above")
    options = parser.parse_args()
    one_thread()
    if options.quick:
        print(*(gate(*case, TRIALS // 10) for case in CASES), sep="\n")
        print(*(watch(*case[1:], TRIALS // 10) for case in WATCHES), speed(MARKED // 10), sep="\n")
        return
    kept = Kept("learning", options, ("kind", "gain", "voters"))
    for kind, gain, voters in kept.missing([*CASES, *WATCHES, ("speed", 0.0, 2000)]):
        if kind == "speed":
            result = speed(MARKED)
        elif kind == "watch":
            result = watch(gain, voters, TRIALS)
        else:
            result = gate(kind, gain, voters, TRIALS)
        kept.add({"kind": kind, "gain": gain, "voters": voters, **result})
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
