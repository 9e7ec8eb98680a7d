"""The worker: from clicks to a metric that is served, and back; digits, and users with a taste."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from clicks import digits, feedback_file, make_index, play, precision
from retrieval.feedback.feedback_record import CLICKED, DISLIKED, FeedbackRecord, Search, Trial
from retrieval.index.index import open_index
from sklearn.datasets import load_digits

from retrieval_feedback.heads import BASE_ALONE, LEARNERS, compete, export_head, fit_learner
from retrieval_feedback.worker import MAX_WATCHED_LEAD, MIN_SEARCHES, Worker, base_of, head_bytes

FAST = ("feedback.low_rank", "feedback.diagonal")


@pytest.fixture(scope="session")
def empty(tmp_path_factory):
    """An index of digits without feedback."""
    folder = tmp_path_factory.mktemp("digits") / "index"
    make_index(folder).close()
    return folder


@pytest.fixture(scope="session")
def tried(empty, tmp_path_factory):
    """The same index with a metric on trial."""
    folder = tmp_path_factory.mktemp("tried") / "index"
    shutil.copytree(empty, folder)
    with working(folder) as worker:
        play(worker.index, worker.record, 170, 0)
        assert worker.step().action == "on trial"
    return folder


@pytest.fixture(scope="session")
def switched(tried, tmp_path_factory):
    """The same index after the switch, without a trial."""
    folder = tmp_path_factory.mktemp("switched") / "index"
    shutil.copytree(tried, folder)
    with working(folder) as worker:
        assert play_until(worker, "on trial") == "switched"
    return folder


@contextmanager
def working(folder, learners=FAST, explore=True):
    index = open_index(folder)
    with index, FeedbackRecord.open(feedback_file(index), create=True) as record:
        yield Worker(index, record, learners, explore=explore)


def play_until(worker, action, seed=100, **users):
    """Let users click until the worker does something else than `action`."""
    for turn in range(40):
        play(worker.index, worker.record, 25, seed + turn, **users)
        step = worker.step()
        if step.action != action:
            return step.action
    return action


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "index"))


def test_clicks_teach_a_metric_that_is_served_once_proven_and_watched(switched, tmp_path):
    with working(copy(switched, tmp_path)) as worker:
        assert precision(worker.index) > 0.44 + 0.1
        assert worker.step().action == "on trial"
        (watch,) = worker.record.open_trials()
        assert (watch.kind, watch.challenger, watch.head) == ("watch", watch.base, None)
        (challenge, _) = worker.record.trials()
        assert challenge.verdict == "switched"
        assert challenge.evidence["wealth"] >= challenge.evidence["needed"] == pytest.approx(40)
        assert (
            watch.evidence["watched"] == min(challenge.evidence["lead"] / 3, MAX_WATCHED_LEAD) > 0
        )
        assert json.dumps(challenge.evidence).count("v1") == 0, "evidence names no voter"
        # What is served is watched while something better is looked for.
        kinds = set()
        for turn in range(12):
            play(worker.index, worker.record, 25, 300 + turn)
            worker.step()
            kinds |= {trial.kind for trial in worker.record.open_trials()}
        assert worker.index.bundle.manifest.adapter is not None
        assert "rolled back" not in {trial.verdict for trial in worker.record.trials()}
        assert "watch" in kinds
        searches = worker.record.judged(watch.base)
        shown = [s for s in searches if s.search.challenger == watch.challenger]
        assert shown and len(shown) < 0.4 * sum(s.n > watch.cutoff for s in searches)


def test_a_metric_that_becomes_worse_goes_back(switched, tmp_path):
    x, _ = digits()
    # From now on the users want what the model without a head finds.
    distances = np.linalg.norm(x[:, None] - x[None, ::18], axis=2).argmin(axis=1)
    with working(copy(switched, tmp_path)) as worker:
        worker.step()
        for turn in range(40):
            play(worker.index, worker.record, 25, 300 + turn, taste=distances)
            if worker.step().action == "rolled back":
                break
        assert worker.index.bundle.manifest.adapter is None
        assert "watch" not in {trial.kind for trial in worker.record.open_trials()}


def test_clicks_at_random_never_switch(tmp_path, empty):
    rng = np.random.default_rng(0)
    with working(copy(empty, tmp_path)) as worker:
        before = worker.index.bundle.sha256
        for turn in range(12):
            play(worker.index, worker.record, 40, turn, taste=rng.integers(2, size=1797))
            assert worker.step().action != "switched"
        assert worker.index.bundle.sha256 == before


def test_the_order_of_shown_hits_is_evidence_without_exploring(tmp_path, empty):
    with working(copy(empty, tmp_path), explore=False) as worker:
        play(worker.index, worker.record, 170, 0)
        assert worker.step().action == "on trial"
        assert not worker.record.open_trials()[0].explore
        assert play_until(worker, "on trial") == "switched"


def click_places(index, record, places, mark=CLICKED):
    """Let voters who do not look mark places of pages that show the nearest digits."""
    x, _ = digits()
    rng = np.random.default_rng(0)
    sha = index.bundle.sha256
    for n in range(400):
        query = int(rng.integers(len(x)))
        hits = [hit.id for hit in index.search(x[query], 11) if hit.id != str(query)][:10]
        search = Search(f"p{n}", 1e9, f"v{n % 60}", sha, sha, None, str(query), tuple(hits))
        record.note_searches([search])
        record.add(search.id, search.voter, {hits[places(rng)]: mark})


@pytest.mark.parametrize(
    ("places", "mark", "low", "high"),
    [
        (lambda rng: min(int(rng.geometric(0.4)), 10) - 1, CLICKED, -1, -0.03),
        (lambda rng: int(rng.integers(10)), CLICKED, -0.1, 0.1),
        # Else, who dislikes the first hits would vote for whatever lowers them.
        (lambda _: 0, DISLIKED, 0, 0),
    ],
)
def test_without_exploring_marks_by_place_do_not_favour_the_challenger(
    empty, tmp_path, places, mark, low, high
):
    with working(copy(empty, tmp_path), explore=False) as worker:
        click_places(worker.index, worker.record, places, mark)
        x, _ = digits()
        head = export_head(fit_learner(FAST[0], np.stack([x[:300], x[300:600], x[600:900]], 1)), x)
        sha = worker.index.bundle.sha256
        worker.record.begin_trial(Trial("challenge", sha, "c", head, sha, FAST[0], 1e-9, 0))
        evidence = worker._weighed(worker.record.open_trials()[0])
        assert evidence.searches > 100
        assert low <= evidence.lead <= high


def test_little_feedback_and_few_voters_prove_nothing(tmp_path, empty):
    with working(copy(empty, tmp_path)) as worker:
        assert worker.step().facts == {"searches": 0, "new": 0, "voters": 0}
        play(worker.index, worker.record, 180, 0, voters=1)
        step = worker.step()
        assert (step.action, step.facts["voters"]) == ("waits", 1)
        assert "cannot prove anything" in step.sentence
        assert step.facts["new"] >= MIN_SEARCHES


def test_a_forgotten_voter_leaves_the_head_that_never_saw_them(tmp_path, empty):
    heads = {}
    for name in ("with", "without"):
        folder = Path(shutil.copytree(empty, tmp_path / name / "index"))
        with working(folder, LEARNERS) as worker:
            play(worker.index, worker.record, 90, 0)
            if name == "with":
                play(worker.index, worker.record, 60, 1, voter="loud", voters=4)
            play(worker.index, worker.record, 90, 2)
            assert worker.step().action == "on trial"
            if name == "with":
                first = worker.record.open_trials()[0]
                assert any(voter.startswith("loud") for voter in first.voters)
                for number in range(4):
                    worker.record.forget(voter=f"loud{number}")
                step = worker.step()
                assert (step.action, "forgotten" in step.sentence) == ("withdrawn", True)
                assert worker.step().action == "on trial"
                assert worker.record.open_trials()[0].challenger != first.challenger
            heads[name] = worker.record.open_trials()[0].head
    assert heads["with"] == heads["without"]


def test_what_a_forgotten_voter_taught_is_served_no_longer(switched, tmp_path):
    with working(copy(switched, tmp_path)) as worker:
        base = base_of(worker.index.bundle)
        (trial,) = worker.record.trials()
        worker.record.forget(voter=min(trial.voters))
        assert worker.step().action == "went back"
        assert worker.index.bundle.sha256 == base
        assert worker.step().action in ("on trial", "learned nothing")


def test_the_model_alone_is_nothing_that_a_forgotten_voter_taught(empty, tmp_path):
    with working(copy(empty, tmp_path)) as worker:
        play(worker.index, worker.record, 30, 0)
        base = worker.index.bundle.sha256
        voter = min(worker.record.judged()[0].marks)
        trial = worker.record.begin_trial(
            Trial(
                "challenge",
                base,
                base,
                None,
                "a head",
                "base",
                0.025,
                1000,
                voters=frozenset({voter}),
            )
        )
        worker.record.close_trial(trial.n, "switched", {})
        worker.record.forget(voter=voter)
        assert worker.record.trials()[0].tainted
        assert worker.step().action == "waits"


def test_a_rollback_by_the_operator_withdraws_the_trial(switched, tmp_path):
    with working(copy(switched, tmp_path)) as worker:
        worker.step()
        worker.index.rollback()
        assert worker.step().action == "withdrawn"
        assert worker.step().action != "switched"


@pytest.mark.parametrize("crash", ["migrate", "close"])
def test_a_worker_that_is_killed_while_it_switches_goes_on(tried, tmp_path, monkeypatch, crash):
    with working(copy(tried, tmp_path)) as worker:
        # Enough evidence, which nobody has looked at.
        for turn in range(8):
            play(worker.index, worker.record, 25, 100 + turn)
        head = worker.record.open_trials()[0].head

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            if crash == "migrate":
                patched.setattr("retrieval.store.local.LocalStore.switch", killed)
            else:
                patched.setattr(FeedbackRecord, "close_trial", killed)
            with pytest.raises(KeyboardInterrupt):
                worker.step()
    with working(tmp_path / "index") as worker:
        assert worker.step().action == "switched"
        assert head_bytes(worker.index.bundle) == head
        assert worker.step().action == "on trial"
        assert len(worker.index.store.generations()) == 2
        assert [trial.kind for trial in worker.record.trials()] == ["challenge", "watch"]


@pytest.mark.parametrize("name", LEARNERS)
def test_a_head_computes_what_its_learner_does_and_has_the_same_bytes_again(name):
    x, thickness = digits()
    rng = np.random.default_rng(0)
    rows = rng.integers(len(x), size=(30_000, 3))
    alike = thickness[rows[:, 0]] == thickness[rows[:, 1]]
    triplets = x[rows[alike & (thickness[rows[:, 0]] != thickness[rows[:, 2]])][:1500]]
    from retrieval.feedback.interleaving import load_head

    learner = fit_learner(name, triplets)
    head = export_head(learner, triplets[:, 0])
    np.testing.assert_allclose(load_head(head)(x[:50]), learner.transform(x[:50]), atol=1e-4)
    assert export_head(fit_learner(name, triplets), triplets[:, 0]) == head


def test_two_workers_at_once(tried, tmp_path, cli):
    folder = copy(tried, tmp_path)
    with working(folder) as worker, worker.record.worker_lock():
        done = cli("learn", folder)
    assert done.code == 2
    assert "learning from this feedback" in done.err


def test_the_command(tried, tmp_path, cli):
    folder = copy(tried, tmp_path)
    done = cli("learn", folder)
    assert done.code == 0, done.err
    assert done.out.startswith("Feedback: ")
    assert "Trial 1, of feedback.low_rank is on trial: 0 searches won" in done.out
    with working(folder) as worker:
        for turn in range(8):
            play(worker.index, worker.record, 25, 100 + turn)
    done = cli("learn", folder, "--json")
    assert [step["action"] for step in json.loads(done.out)["steps"]] == ["switched", "on trial"]
    done = cli("learn", folder, "--status", "--json")
    trials = json.loads(done.out)["trials"]
    assert [trial["verdict"] for trial in trials] == ["switched", "open"]
    assert (
        "Trial 1, challenge by feedback.low_rank: switched." in cli("learn", folder, "--status").out
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "There is no feedback at"),
        (["--feedback-file", "other.sqlite"], "There is no feedback at other.sqlite"),
    ],
)
def test_faults_are_sentences(empty, cli, options, sentence):
    done = cli("learn", empty, *options)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err


def test_a_learner_without_triplets_is_refused(empty, tmp_path, cli):
    folder = copy(empty, tmp_path)
    with working(folder) as worker:
        play(worker.index, worker.record, 170, 0)
    done = cli("learn", folder, "--learner", "core.pca")
    assert done.code == 2
    assert "core.pca has no partial_fit" in done.err
    with working(folder) as worker:
        assert worker.record.trials() == []


def test_a_killed_follower_leaves_everything_to_the_next(tried, tmp_path):
    folder = copy(tried, tmp_path)
    command = [sys.executable, "-m", "retrieval.cli", "learn", str(folder), "--follow"]
    with subprocess.Popen(
        [*command, "--every", "0.1"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert "is on trial" in process.stdout.readline()
        with working(folder) as worker:
            for turn in range(8):
                play(worker.index, worker.record, 25, 100 + turn)
            end = time.monotonic() + 60
            while worker.index.follow().manifest.adapter is None and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
            worker.step()
            assert worker.record.trials()[0].verdict == "switched"


def test_the_model_alone_competes_with_a_head_that_became_worse():
    x, _ = digits()
    labels = load_digits().target
    rng = np.random.default_rng(0)
    rows = rng.integers(len(x), size=(20_000, 3))
    alike = labels[rows[:, 0]] == labels[rows[:, 1]]
    triplets = x[rows[alike & (labels[rows[:, 0]] != labels[rows[:, 2]])][:1000]]
    voters = [f"v{number % 40}" for number in range(1000)]
    # The incumbent sees only how thick a digit is.
    candidates = compete(triplets, voters, lambda rows: rows.sum(axis=1, keepdims=True), FAST)
    (base,) = (candidate for candidate in candidates if candidate.learner == BASE_ALONE)
    assert base.is_promising and base.gain > 0.2
    # Against the base itself, it gains nothing.
    candidates = compete(triplets, voters, lambda rows: rows, FAST)
    (base,) = (candidate for candidate in candidates if candidate.learner == BASE_ALONE)
    assert (base.gain, base.error, base.is_promising) == (0.0, 0.0, False)
    assert candidates[0].learner != BASE_ALONE
