"""The worker: learns a head from feedback, puts it on trial, and serves it once it is proven.

Everything that it decides follows from the record of feedback and from the index, so a worker that
is killed at any moment goes on where it was: a switch first moves the index, which may be repeated,
and then closes the trial.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.base.arrays import Floats32
from retrieval.bundle.bundle import Bundle
from retrieval.feedback.feedback_record import FeedbackRecord, JudgedSearch, Trial
from retrieval.feedback.interleaving import load_head
from retrieval.index.adapter_bundles import make_adapter_bundle, write_base
from retrieval.index.index import Index
from retrieval.store.items import BASE, VECTOR
from threadpoolctl import threadpool_limits

from retrieval_feedback.gate import (
    SEARCHES_PER_FALSE_ALARM,
    Evidence,
    error_rate,
    search_outcome,
    weigh,
)
from retrieval_feedback.triplets import (
    preferences,
    preferred_and_skipped,
    query_key,
    query_vector,
    triplet_vectors,
)

MIN_SEARCHES = 150
"""New judged searches before something is learned."""
MIN_VOTERS = 8
"""Voters before something is learned: three in four of them teach, and the others judge."""
MIN_TRIPLETS = 100
MAX_WATCHED_LEAD = 0.05
"""Largest lead that a watch asks for: a lead that was proven quickly owes a part to luck."""
_IDS = 1000


@dataclass(frozen=True)
class Step:
    """What one call of the worker did.

    Attributes:
        action: "waits", "learned nothing", "on trial", "went back", or the verdict of a trial:
            "switched", "refused", "rolled back" or "withdrawn".
        sentence: what happened, in a sentence.
        facts: evidence and other numbers.
    """

    action: str
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """Learns from the feedback of one index; see `step`.

    Args:
        index: the index, which is migrated.
        record: its feedback.
        learners: names of the learners that compete.
        explore: whether servers may interleave a challenger's hits with those of the incumbent.
            Without it, challengers are judged by how they order the hits that were shown.
    """

    def __init__(
        self, index: Index, record: FeedbackRecord, learners: Sequence[str], *, explore: bool = True
    ) -> None:
        self.index = index
        self.record = record
        self.learners = tuple(learners)
        self.explore = explore
        self._tried = 0

    def step(self) -> Step:
        """Do the next thing: judge the open trials, or learn from new feedback and open one.

        One process at a time may call it, within `FeedbackRecord.worker_lock`.

        Raises:
            RetrievalError: the index or the record cannot be used, or a learner is unknown.
        """
        served = self.index.follow()
        trials = self.record.trials(base_of(served))
        challenges = [trial for trial in trials if trial.kind == "challenge"]
        source = None
        if served.manifest.adapter is not None:
            source = next((t for t in reversed(challenges) if _serves(served, t)), None)
        if source is not None and source.tainted:
            self._serve(served, None)
            sentence = "Feedback behind the served metric was forgotten. The model serves alone."
            return Step("went back", sentence)
        steps = {}
        for trial in self.record.open_trials():
            steps[trial.kind] = self._judge(trial, served)
            if steps[trial.kind].action != "on trial":
                return steps[trial.kind]
        if source is not None and "watch" not in steps:
            self._watch(source, served, trials)
            return Step(
                "on trial", "The metric that is served is on trial against the model alone."
            )
        if "challenge" in steps:
            return steps["challenge"]
        return self._learn(served, challenges)

    # A trial

    def _judge(self, trial: Trial, served: Bundle) -> Step:
        """Weigh the evidence of an open trial, and act on a verdict."""
        if trial.tainted:
            return self._close(trial, "withdrawn", "feedback that it learned from was forgotten")
        evidence = self._weighed(trial)
        is_moved = trial.incumbent != served.sha256
        # After a switch, the worker may have been killed before it closed the trial.
        if is_moved and not (_serves(served, trial) and evidence.verdict == "better"):
            return self._close(trial, "withdrawn", "another model is served by now")
        if evidence.verdict == "better":
            if not is_moved:
                self._serve(served, trial.head)
            if trial.kind == "watch":
                reason = "what was served has lost its lead over it"
                return self._close(trial, "rolled back", reason, evidence)
            return self._close(trial, "switched", "it is better beyond doubt", evidence)
        if evidence.verdict == "refused":
            return self._close(trial, "refused", "it is no better", evidence)
        facts = {**trial.evidence, **asdict(evidence)}
        if facts != trial.evidence:
            self.record.note_evidence(trial.n, facts)
        return Step("on trial", f"{_title(trial)} is on trial: {_in_words(evidence)}.", facts)

    def _close(
        self, trial: Trial, verdict: str, reason: str, evidence: Evidence | None = None
    ) -> Step:
        facts = dict(trial.evidence)
        sentence = f"{_title(trial)}: {verdict}, because {reason}"
        if evidence is not None:
            facts |= asdict(evidence)
            sentence += f" ({_in_words(evidence)})"
        self.record.close_trial(trial.n, verdict, facts)
        return Step(verdict, f"{sentence}.", facts)

    def _weighed(self, trial: Trial) -> Evidence:
        """Return the evidence of the voters and queries that did not teach the challenger."""
        searches = self.record.judged(trial.base)
        taught_queries = {
            query_key(entry)
            for entry in searches
            if entry.n <= trial.cutoff and trial.voters & entry.marks.keys()
        }
        judging = [
            entry
            for entry in searches
            if entry.n > trial.cutoff
            and entry.search.served == trial.incumbent
            and query_key(entry) not in taught_queries
        ]
        credits = self._credits(trial, judging)
        outcomes = []
        for entry in judging:
            hits = entry.search.hits
            for voter, marks in sorted(entry.marks.items()):
                if entry.n in credits and voter not in trial.voters:
                    preferred, skipped = preferred_and_skipped(hits, marks)
                    if not trial.explore:
                        # Whoever skips or dislikes first places would favour what lowers them.
                        skipped = []
                    credit_of = dict(zip(hits, credits[entry.n], strict=True))
                    outcomes.append((voter, search_outcome(credit_of, preferred, skipped)))
        return weigh(outcomes, trial.alpha, watched=trial.evidence.get("watched"))

    def _credits(
        self, trial: Trial, searches: Sequence[JudgedSearch]
    ) -> dict[int, Sequence[float]]:
        """Return the credits of the hits of each search that judges a trial, by its number.

        Without exploring, a hit's credit is how far the challenger raises it, as a share of the
        page. The credits of a page sum to zero, and its first hits can only fall: whoever clicks at
        random favours neither ranking, and whoever prefers first hits favours the incumbent.
        """
        if trial.explore:
            explored = (s for s in searches if s.search.challenger == trial.challenger)
            return {entry.n: entry.search.credits for entry in explored}
        vectors = self._vectors(searches)
        head = load_head(trial.head)
        credits: dict[int, Sequence[float]] = {}
        for entry in searches:
            hits = entry.search.hits
            query = query_vector(entry, vectors)
            if query is None or entry.search.challenger or not vectors.keys() >= {*hits}:
                continue
            rows = head(np.stack([query, *(vectors[hit] for hit in hits)])).astype(np.float64)
            order = np.argsort(np.linalg.norm(rows[1:] - rows[0], axis=1), kind="stable")
            rise = (np.arange(len(hits)) - np.argsort(order)) / len(hits)
            credits[entry.n] = rise.tolist()
        return credits

    def _serve(self, served: Bundle, head: bytes | None) -> None:
        """Move the index to a head over the base of what is served, or to the base itself."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "bundle"
            if head is None:
                write_base(served, folder)
            else:
                make_adapter_bundle(served, head, folder)
            self.index.migrate(folder)

    def _watch(self, source: Trial, served: Bundle, trials: Sequence[Trial]) -> None:
        """Put what is served on trial against the base alone, for as long as it is served.

        It must keep a third of the lead with which it was proven, and at least the lead that its
        predecessor had to keep. The voters that taught it may judge as well: if anything, they
        delay an alarm.
        """
        watched = [min(source.evidence.get("lead", 0.0) / 3, MAX_WATCHED_LEAD)]
        for trial in trials:
            if trial.kind == "watch" and trial.incumbent == source.incumbent:
                watched.append(trial.evidence["watched"])
        self.record.begin_trial(
            Trial(
                kind="watch",
                base=source.base,
                challenger=source.base,
                head=None,
                incumbent=served.sha256,
                learner="base",
                alpha=1 / SEARCHES_PER_FALSE_ALARM,
                cutoff=max((s.n for s in self.record.judged(source.base)), default=0),
                explore=self.explore,
                evidence={"watched": max(watched)},
            )
        )

    # Learning

    def _learn(self, served: Bundle, challenges: Sequence[Trial]) -> Step:
        """Learn from three in four voters, and put the best candidate on trial."""
        from retrieval_feedback.heads import BASE_ALONE, compete, export_head, fit_learner

        base = base_of(served)
        searches = self.record.judged(base)
        # A tainted trial counts as if it had never been, so that a forgotten voter leaves no trace.
        earlier = [trial for trial in challenges if not trial.tainted]
        cutoff = max((trial.cutoff for trial in earlier), default=0)
        last = searches[-1].n if searches else 0
        new = sum(entry.n > max(cutoff, self._tried) for entry in searches)
        voters = {voter for entry in searches for voter in entry.marks}
        facts: dict[str, Any] = {"searches": len(searches), "new": new, "voters": len(voters)}
        if new < MIN_SEARCHES:
            missing = MIN_SEARCHES - new
            return Step("waits", f"Waiting for {missing} more judged searches.", facts)
        if len(voters) < MIN_VOTERS:
            return Step(
                "waits",
                f"Feedback of {len(voters)} voters, keys or users, cannot prove anything: some"
                f" would teach and the others judge. At least {MIN_VOTERS} are needed.",
                facts,
            )
        # Three in four voters teach, others each time, and the rest judges.
        hashes = {v: hashlib.sha256(f"{len(earlier) + 1} {v}".encode()).digest() for v in voters}
        teachers = {voter for voter in voters if hashes[voter][0] % 4 > 0}
        lessons = [
            replace(entry, marks={v: entry.marks[v] for v in entry.marks if v in teachers})
            for entry in searches
        ]
        vectors = self._vectors(lessons)
        triplets, teacher_of = triplet_vectors(preferences(lessons), vectors)
        facts |= {"teachers": len(teachers), "triplets": len(triplets)}
        if len(triplets) < MIN_TRIPLETS:
            return self._nothing(last, facts)
        with threadpool_limits(1):
            candidates = compete(triplets, teacher_of, load_head(head_bytes(served)), self.learners)
            facts["candidates"] = [candidate._asdict() for candidate in candidates]
            if not candidates or not candidates[0].is_promising:
                return self._nothing(last, facts)
            best = candidates[0]
            head = None
            if best.learner != BASE_ALONE:
                learner = fit_learner(best.learner, triplets[: round(best.window * len(triplets))])
                head = export_head(learner, triplets[:, 0])
        challenger = _name_of(head, base)
        if _name_of(head_bytes(served), base) == challenger:
            return self._nothing(last, facts)
        trial = self.record.begin_trial(
            Trial(
                kind="challenge",
                base=base,
                challenger=challenger,
                head=head,
                incumbent=served.sha256,
                learner=best.learner,
                alpha=error_rate(len(challenges) + 1),
                cutoff=last,
                explore=self.explore,
                voters=frozenset(teachers),
                evidence=facts,
            )
        )
        sentence = (
            f"{_title(trial)} is on trial: it learned {len(triplets):,} preferences of"
            f" {len(teachers)} voters, and decides {best.gain:+.1%} more of others' rightly."
        )
        return Step("on trial", sentence, facts)

    def _nothing(self, last: int, facts: Mapping[str, Any]) -> Step:
        # The same feedback would teach the same once more.
        self._tried = last
        sentence = "Nothing was learned that promises to be better than what is served."
        return Step("learned nothing", sentence, facts)

    def _vectors(self, searches: Sequence[JudgedSearch]) -> dict[str, Floats32]:
        """Return the base vectors of queries and hits by id."""
        name = VECTOR if self.index.bundle.manifest.adapter is None else BASE
        ids = {hit for entry in searches for hit in entry.search.hits if hit}
        ids |= {entry.search.item for entry in searches if entry.search.item}
        vectors = {}
        ordered = sorted(ids)
        for start in range(0, len(ordered), _IDS):
            batch = ordered[start : start + _IDS]
            for id, item in self.index.get(batch, arrays=True).items():
                if name in item.arrays:
                    vectors[id] = np.asarray(item.arrays[name], np.float32)
        return vectors


def base_of(bundle: Bundle) -> str:
    """Return the SHA-256 of the bundle over whose vectors feedback is learned."""
    if bundle.manifest.adapter is None:
        return bundle.sha256
    return bundle.manifest.adapter.base


def head_bytes(bundle: Bundle) -> bytes | None:
    """Return the graph of a bundle's adapter, or None without one."""
    if bundle.manifest.adapter is None:
        return None
    return (bundle.path / bundle.manifest.adapter.file).read_bytes()


def _name_of(head: bytes | None, base: str) -> str:
    """Return what `Trial.challenger` says of a head."""
    if head is None:
        return base
    return hashlib.sha256(head).hexdigest()


def _serves(bundle: Bundle, trial: Trial) -> bool:
    return base_of(bundle) == trial.base and (
        _name_of(head_bytes(bundle), trial.base) == trial.challenger
    )


def _title(trial: Trial) -> str:
    if trial.kind == "challenge":
        return f"Trial {trial.n}, of {trial.learner}"
    return f"Trial {trial.n}, of the model alone"


def _in_words(evidence: Evidence) -> str:
    return (
        f"{evidence.wins:,} searches won and {evidence.losses:,} lost, by {evidence.voters:,}"
        f" voters; the evidence is {evidence.wealth:.3g}, and {evidence.needed:,.0f} decides"
    )
