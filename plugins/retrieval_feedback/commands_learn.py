"""`retrieval learn`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from retrieval.cli import say, say_json
from retrieval.cli.common import JSON, PATH, Number, command, loading
from retrieval.cli.index import INDEX, opened_index, tell

if TYPE_CHECKING:
    from retrieval.feedback.feedback_record import FeedbackRecord
    from retrieval.store.address import IndexPlace

    from retrieval_feedback.worker import Step, Worker

_DONE = ("waits", "learned nothing", "on trial")
"""Actions after which the worker can do no more until there is new feedback."""


@command(
    "learn",
    "retrieval learn photos.index",
    "retrieval learn photos.index --follow",
    "retrieval learn photos.index --status --json",
)
@INDEX
@click.option(
    "--feedback-file",
    "file",
    type=PATH,
    metavar="FILE",
    help="File of the feedback; by default feedback.sqlite in the folder INDEX.",
)
@click.option("--follow", is_flag=True, help="Go on until interrupted, as feedback comes in.")
@click.option(
    "--every", type=Number(min=0.1), default=30.0, help="With --follow: seconds between two looks."
)
@click.option(
    "--learner",
    "learners",
    multiple=True,
    metavar="PLUGIN.NAME",
    help="A learner of triplets that competes; repeatable. By default all four that are bundled.",
)
@click.option(
    "--no-explore",
    is_flag=True,
    help="Never show a metric that is on trial to anyone: judge it by how it orders the hits that"
    " were shown.",
)
@click.option("--status", is_flag=True, help="Only show the feedback and all trials.")
@JSON
def learn(
    path: IndexPlace,
    file: Path | None,
    follow: bool,
    every: float,
    learners: tuple[str, ...],
    no_explore: bool,
    status: bool,
    as_json: bool,
) -> None:
    """Learn a better metric for INDEX from the feedback of its users, and serve it once proven.

    'retrieval serve INDEX --feedback' collects the feedback. What is learned is tried on searches
    of others than those it learned from, and served only if it is better beyond doubt. What is
    served stays on trial against the model alone, which comes back if the lead is lost.
    """
    with loading():
        from retrieval.feedback.feedback_record import FeedbackRecord, feedback_file

        from retrieval_feedback.worker import Worker
    file = feedback_file(path, file)
    with opened_index(path) as index, FeedbackRecord.open(file) as record:
        if status:
            _show(path, record, as_json)
            return
        from retrieval_feedback.heads import LEARNERS

        worker = Worker(index, record, learners or LEARNERS, explore=not no_explore)
        with record.worker_lock():
            if follow:
                _follow(worker, every, as_json)
            steps = _steps(worker)
        counts = record.counts()
    lines = [f"Feedback: {_in_words(counts)}.", *(step.sentence for step in steps)]
    tell(path, as_json, *lines, feedback=counts, steps=[_facts(step) for step in steps])


def _steps(worker: Worker) -> list[Step]:
    """Let the worker do what can be done now."""
    steps = [worker.step()]
    while steps[-1].action not in _DONE:
        steps.append(worker.step())
    return steps


def _follow(worker: Worker, every: float, as_json: bool) -> None:
    from retrieval.store.contract import StoreUnavailable, TooSlow

    from retrieval_feedback.worker import Step

    sentence = ""
    while True:
        try:
            steps = _steps(worker)
        except (StoreUnavailable, TooSlow) as error:
            # Nothing is half-done: the next step goes on where this one was.
            steps = [Step("waits", f"{error} The worker goes on once that works again.")]
        for step in steps:
            if step.sentence == sentence:
                continue
            sentence = step.sentence
            if as_json:
                say_json(_facts(step))
            else:
                say(sentence)
        time.sleep(every)


def _show(path: IndexPlace, record: FeedbackRecord, as_json: bool) -> None:
    """Print the feedback and all trials."""
    counts = record.counts()
    lines = [f"Feedback: {_in_words(counts)}."]
    rows = []
    for trial in record.trials():
        verdict = trial.verdict or "open"
        rows.append(
            {
                **trial.evidence,
                "trial": trial.n,
                "kind": trial.kind,
                "learner": trial.learner,
                "verdict": verdict,
                "opened": trial.opened,
                "closed": trial.closed,
                "tainted": trial.tainted,
            }
        )
        lines.append(f"Trial {trial.n}, {trial.kind} by {trial.learner}: {verdict}.")
    tell(path, as_json, *lines, feedback=counts, trials=rows)


def _in_words(counts: dict[str, int]) -> str:
    return (
        f"{counts['marks']:,} marks by {counts['voters']:,} voters on {counts['judged']:,} of"
        f" {counts['searches']:,} searches"
    )


def _facts(step: Step) -> dict[str, Any]:
    return {"action": step.action, "sentence": step.sentence, **step.facts}
