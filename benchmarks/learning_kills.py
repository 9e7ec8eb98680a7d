"""SIGKILL of the worker at random moments: what comes out is what an undisturbed worker makes.

    OMP_NUM_THREADS=1 python benchmarks/learning_kills.py    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/learning_kills.py --quick    # four kills, keeps nothing

An index of digits with feedback of 60 simulated users stands before one of two steps: to learn and
to open a trial, or to switch and to open the watch. A worker is killed after a random time, up
to once three times while it works; then a worker does the rest. Generations, what is served,
trials, their heads and verdicts must be those of a worker that nobody killed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.feedback.interleaving import load_head, team_draft
from retrieval.feedback.record import CLICKED, FEEDBACK_FILE, FeedbackRecord, Search
from retrieval.index.index import Index, open_index

from bench import Kept, chosen, markdown, one_thread, page, resume_arguments
from feedback import Users, loaded, make_index
from retrieval_feedback.worker import Worker

KILLS = 200
STAGES = ("learn", "switch")
LEARNERS = ("feedback.low_rank", "feedback.diagonal")
DONE = ("waits", "learned nothing", "on trial")
Row = dict[str, Any]


def play(index: Index, record: FeedbackRecord, users: Users, searches: int, seed: int) -> None:
    """Note searches and clicks as a server does that explores every search."""
    served = index.follow()
    trials = record.open_trials()
    for number in range(searches):
        user, query = users.query()
        near = index.search(users.vectors[query], 51)
        hits = [hit.id for hit in near if hit.id != str(query)]
        teams = challenger = ""
        trial = next((trial for trial in trials if users.rng.random() < trial.share), None)
        if trial is not None:
            rows = load_head(trial.head)(users.vectors[[query, *map(int, hits)]])
            order = np.argsort(((rows[1:] - rows[0]) ** 2).sum(axis=1), kind="stable")
            ranking = [hits[row] for row in order]
            hits, teams = team_draft(hits, ranking, 10, lambda: users.rng.random() < 0.5)
            challenger = trial.challenger
        hits = hits[:10]
        id = f"{seed}-{number}"
        keys = (id, 1e9 + number, f"u{user % 60}", served.sha256, served.sha256)
        record.note_searches([Search(*keys, None, str(query), tuple(hits), challenger, teams)])
        clicks = users.clicked(user, query, np.array(list(map(int, hits))))
        if clicks:
            record.add(id, f"u{user % 60}", dict.fromkeys(map(str, clicks), CLICKED))


def work(folder: Path) -> None:
    """Let the worker do what it can."""
    path = folder / FEEDBACK_FILE
    with open_index(folder, threads=1) as index, FeedbackRecord.open(path) as file:
        worker = Worker(index, file, LEARNERS)
        with file.worker_lock():
            while worker.step().action not in DONE:
                pass


def state(folder: Path) -> None:
    """Write what the index serves and what the record says of trials to a file beside."""
    path = folder / FEEDBACK_FILE
    with open_index(folder, threads=1) as index, FeedbackRecord.open(path) as file:
        facts = {
            "generations": [[g.number, g.bundle, g.state] for g in index.store.generations()],
            "vector": hashlib.sha256(index.vector(index.scan(limit=1)[0].id).tobytes()).hexdigest(),
            "trials": [
                [t.n, t.kind, t.challenger, t.incumbent, t.verdict, t.cutoff, sorted(t.voters)]
                for t in file.trials()
            ],
            "counts": file.counts(),
        }
    folder.with_suffix(".json").write_text(json.dumps(facts))


def apart(function: Callable[[Path], None], folder: Path, seconds: float | None = None) -> bool:
    """Run a function in a process of its own; kill it after some seconds; return if it was."""
    process = multiprocessing.get_context("fork").Process(target=function, args=(folder,))
    process.start()
    process.join(seconds)
    was_alive = process.is_alive()
    if was_alive and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if not was_alive and process.exitcode:
        raise SystemExit(f"The worker failed on {folder}.")
    return was_alive


def outcome(folder: Path) -> Row:
    apart(work, folder)
    apart(state, folder)
    facts: Row = json.loads(folder.with_suffix(".json").read_text())
    return facts


def prepare(scratch: Path) -> dict[str, Path]:
    """Return folders of an index before each stage."""
    folders = {stage: scratch / stage for stage in STAGES}

    def build(folder: Path) -> None:
        vectors, labels, taste = loaded("digits", Path())
        rows = np.arange(len(vectors))
        users = Users("hidden", vectors, labels, taste, rows, 0)
        with (
            make_index(scratch, vectors, rows) as index,
            FeedbackRecord.open(scratch / "index" / FEEDBACK_FILE, create=True) as record,
        ):
            play(index, record, users, 130, 0)
            shutil.copytree(scratch / "index", folders["learn"])
            worker = Worker(index, record, LEARNERS)
            assert worker.step().action == "on trial"
            play(index, record, users, 250, 1)
        shutil.copytree(scratch / "index", folders["switch"])

    apart(build, scratch)
    return folders


def measured(kills: int, kept: Kept | None) -> list[Row]:
    """Kill workers; return a row for each."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = prepare(Path(name))
        expected = {}
        seconds = {}
        for stage, folder in folders.items():
            whole = Path(shutil.copytree(folder, Path(name) / f"{stage}-whole"))
            started = time.monotonic()
            apart(work, whole)
            seconds[stage] = time.monotonic() - started
            expected[stage] = outcome(whole)
        assert expected["switch"]["trials"][0][4] == "switched"
        jobs = [(number,) for number in range(kills)]
        for (number,) in kept.missing(jobs) if kept else jobs:
            stage = STAGES[number % len(STAGES)]
            rng = np.random.default_rng(number)
            folder = Path(shutil.copytree(folders[stage], Path(name) / f"kill-{number}"))
            killed = 0
            for _ in range(int(rng.integers(1, 4))):
                killed += apart(work, folder, float(rng.random() * seconds[stage]))
            row = {
                "number": number,
                "stage": stage,
                "killed": killed,
                "same": outcome(folder) == expected[stage],
            }
            shutil.rmtree(folder)
            rows.append(row)
            if kept:
                kept.add(row)
    return rows


def render(rows: list[Row]) -> str:
    table = [
        [
            stage,
            f"{len(group)}",
            f"{sum(row['killed'] for row in group)}",
            f"{sum(not row['same'] for row in group)}",
        ]
        for stage in STAGES
        if (group := chosen(rows, stage=stage))
    ]
    return page(f"""
        # Killed workers

        `python benchmarks/learning_kills.py`. *Killed* counts the workers that SIGKILL met at work;
        *differences* the runs after which generations, what is served, or trials with their heads,
        voters and verdicts were not those of an undisturbed worker, or a mark was lost.

        {markdown(["before", "runs", "killed", "differences"], table)}
    """)


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="see above")
    options = parser.parse_args()
    one_thread()
    if options.quick:
        print(*measured(4, None), sep="\n")
        return
    kept = Kept("learning_kills", options, ("number",))
    if not options.write:
        measured(KILLS, kept)
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
