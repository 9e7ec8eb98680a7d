"""Calibrate and identify: the p-value by loops, the rate of false alarms, and its limits."""

import json
import statistics

import makers
import numpy as np
import pytest
from click.testing import CliRunner
from retrieval.bundle.bundle import Bundle
from retrieval.cli.app import app
from retrieval.errors import DataError, StoreError
from retrieval.index.calibration import Calibration
from retrieval.index.index import open_index
from retrieval.store.contract import Item, TooSlow, patience, widths_of
from retrieval.store.folder import create_local
from retrieval.store.items import CALIBRATION
from scipy.stats import binom

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle", normalized=False)
    return Bundle.open(folder, threads=1)


@pytest.fixture
def index(tmp_path, bundle):
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as opened:
        yield opened


def put(index, vectors, labels, metadata=None):
    metadata = metadata or [{}] * len(labels)
    index.upsert(
        [
            Item(f"{n:04}", label, facts, arrays={"vector": vector.astype(np.float32)})
            for n, (vector, label, facts) in enumerate(zip(vectors, labels, metadata, strict=True))
        ]
    )


def clouds(rng, classes, size, noise=0.5):
    """Items of Gaussian classes, and the centres' labels."""
    labels = np.repeat([f"class {n:03}" for n in range(classes)], size)
    centres = rng.normal(size=(classes, 16))
    vectors = np.repeat(centres, size, axis=0) + noise * rng.normal(size=(len(labels), 16))
    return vectors.astype(np.float32), labels.tolist()


def distance(a, b):
    return float(np.linalg.norm(a.astype(np.float64) - b))


def rate_by_loops(query, vectors, labels, bursts, draws):
    """The median over draws of the jackknife+ p-value, by loops over plain lists."""
    first = min(zip(vectors, labels, strict=True), key=lambda entry: distance(query, entry[0]))
    nearest = distance(query, first[0])
    second = min(distance(query, v) for v, l in zip(vectors, labels, strict=True) if l != first[1])
    rates = []
    for draw in draws:
        count = 0
        for row in draw:
            score = min(
                (
                    distance(vectors[row], vectors[other])
                    for other in range(len(labels))
                    if labels[other] != labels[row]
                    and (bursts[row] is None or bursts[other] != bursts[row])
                ),
                default=np.inf,
            )
            limit = second if labels[row] == first[1] else nearest
            count += score <= limit
        rates.append((1 + count) / (len(draw) + 1))
    return statistics.median(rates)


@pytest.mark.parametrize("distinct", [None, "event"])
def test_the_rate_equals_the_formula(index, distinct):
    rng = np.random.default_rng(0)
    vectors, labels = clouds(rng, 12, 4)
    labels[5] = None
    bursts = [None if n % 5 == 0 else n % 7 for n in range(len(labels))]
    metadata = [{} if burst is None else {"event": burst} for burst in bursts]
    put(index, vectors, labels, metadata)
    calibration = index.calibrate(distinct=distinct, draws=5, seed=3, **QUIET)
    assert (calibration.classes, calibration.items, calibration.count) == (12, 47, 48)
    # The draws are told by the classes and distances, so find each probe's row by its distances.
    rows = [n for n, label in enumerate(labels) if label]
    labelled = [vectors[n] for n in rows], [labels[n] for n in rows]
    events = [bursts[n] if distinct else None for n in rows]
    draws = []
    for names, others in zip(calibration.labels, calibration.to_other, strict=True):
        draw = []
        for name, other in zip(names, others, strict=True):
            scores = {
                row: min(
                    distance(labelled[0][row], labelled[0][n])
                    for n in range(len(rows))
                    if labelled[1][n] != name and (events[row] is None or events[n] != events[row])
                )
                for row in range(len(rows))
                if labelled[1][row] == name
            }
            row = min(scores, key=lambda row: abs(scores[row] - other))
            assert scores[row] == pytest.approx(other, abs=1e-9)
            draw.append(row)
        draws.append(draw)
    for query in rng.normal(size=(20, 16)).astype(np.float32):
        verdict = index.identify(query, 0.3)
        expected = rate_by_loops(query, *labelled, events, draws)
        assert verdict.rate == expected
        label = min(zip(*labelled, strict=True), key=lambda entry: distance(query, entry[0]))[1]
        assert verdict.label == (label if expected <= 0.3 else None)
        assert verdict.hits[0].label == label


def test_own_distances_leave_the_item_and_its_burst_out(index):
    vectors = np.zeros((5, 16), np.float32)
    vectors[:, 0] = [0, 1, 3, 10, 30]
    put(index, vectors, ["a", "a", "a", "b", "c"], [{"e": n} for n in (1, 1, 2, 3, 4)])
    plain = index.calibrate(draws=31, **QUIET)
    seen = dict(zip(plain.to_other[:, 0].tolist(), plain.to_own[:, 0].tolist(), strict=True))
    assert seen == {10: 1, 9: 1, 7: 2}
    assert np.isnan(plain.to_own[:, 1:]).all()
    bursts = index.calibrate(distinct="e", draws=31, **QUIET)
    seen = dict(zip(bursts.to_other[:, 0].tolist(), bursts.to_own[:, 0].tolist(), strict=True))
    assert seen == {10: 3, 9: 2, 7: 2}


def test_exchangeable_classes_keep_the_rate(bundle, tmp_path):
    """Of strangers from the same distribution of classes, the share `far` gets a label."""
    repetitions, far = 200, 0.1
    rng = np.random.default_rng(5)
    accepted = 0
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        for _ in range(repetitions):
            vectors, labels = clouds(rng, 30, 3)
            put(index, vectors[:-3], labels[:-3])
            index.calibrate(draws=3, **QUIET)
            accepted += index.identify(vectors[-1], far).label is not None
    low, high = binom.interval(0.99, repetitions, far)
    assert low <= accepted <= high


def test_a_class_of_digits_that_is_left_out(bundle, tmp_path):
    pixels, digits = makers.digits()
    vectors = bundle.encode(pixels[:500, None]).vector
    shares = []
    for stranger in range(10):
        known = digits[:500] != stranger
        folder = tmp_path / f"{stranger}"
        create_local(folder, bundle, widths_of(bundle))
        with open_index(folder, threads=1) as index:
            put(index, vectors[known], digits[:500][known].astype(str).tolist())
            index.calibrate(**QUIET)
            verdicts = [index.identify(vector, 0.1) for vector in vectors[~known][:8]]
        shares.append(np.mean([verdict.label is not None for verdict in verdicts]))
    # The bound of the jackknife+ is twice the rate.
    assert 0 < np.mean(shares) < 0.2


def test_the_score_of_a_hit_is_the_share_of_strangers_that_are_farther(index):
    rng = np.random.default_rng(0)
    vectors, labels = clouds(rng, 12, 4)
    put(index, vectors, labels)
    calibration = index.calibrate(draws=5, **QUIET)
    for query in rng.normal(size=(5, 16)).astype(np.float32):
        hits = index.search(query, 20, scores=True)
        assert [hit._replace(score=None) for hit in hits] == index.search(query, 20)
        for hit in hits:
            draws = [
                (1 + sum(other <= hit.distance for other in draw)) / (len(draw) + 1)
                for draw in calibration.to_other.tolist()
            ]
            assert hit.score == 1 - statistics.median(draws)
        assert 0 <= hits[-1].score <= hits[0].score < 1
        assert repr(hits).splitlines()[0].split() == ["distance", "score", "label", "id"]
        assert "<th>score</th>" in hits._repr_html_()
    assert index.search(vectors[0], scores=True, filter="label = 'none'") == []
    # What is measured anew is used at once.
    index.delete([f"{n:04}" for n in range(4, 48, 2)])
    newer = index.calibrate(draws=1, **QUIET)
    (hit,) = index.search(query, 1, scores=True)
    assert hit.score == 1 - newer.shares([hit.distance])[0]


def test_what_is_left_out_is_no_evidence(index):
    vectors, labels = clouds(np.random.default_rng(0), 40, 3, noise=0.2)
    put(index, vectors, labels)
    index.calibrate(**QUIET)
    own, without = (
        index.identify(vectors[4], 0.1),
        index.identify(vectors[4], 0.1, without=["0004"]),
    )
    assert own.hits[0].id == "0004"
    assert "0004" not in {hit.id for hit in without.hits}
    assert [hit.id for hit in without.hits][:9] == [hit.id for hit in own.hits][1:]
    assert len(without.hits) == 10
    assert without.label == labels[4] == own.label
    with pytest.raises(TooSlow, match="takes too long"), patience(-1):
        index.identify(vectors[4], 0.1)


@pytest.mark.scale
def test_a_class_of_more_than_ten_thousand_hits_is_not_searched_to_its_end(index):
    rng = np.random.default_rng(0)
    crowd = 0.1 * rng.normal(size=(10_200, 16))
    others, names = clouds(rng, 9, 2)
    put(index, np.concatenate([crowd, others + 9]), ["crowd"] * len(crowd) + names)
    calibration = index.calibrate(**QUIET)
    verdict = index.identify(np.zeros(16, np.float32), 0.2)
    # The second class counts as infinitely far.
    assert verdict.rate == calibration.rate(verdict.hits[0].distance, "crowd", np.inf)
    assert (verdict.label, verdict.second) == ("crowd", None)


def test_too_few_classes(index):
    with pytest.raises(DataError, match="is not calibrated"):
        index.identify(np.zeros(16, np.float32))
    vectors, labels = clouds(np.random.default_rng(0), 9, 2)
    put(index, vectors[:2], labels[:2])
    with pytest.raises(DataError, match="has 1 classes by its field 'label'"):
        index.calibrate(**QUIET)
    put(index, vectors, labels)
    with pytest.raises(DataError, match="has the field 'evnt', by which bursts"):
        index.calibrate(distinct="evnt", **QUIET)
    with pytest.raises(DataError, match="has 0 classes by its field 'colour'"):
        index.calibrate("colour", **QUIET)
    with pytest.raises(DataError, match="must be odd"):
        index.calibrate(draws=4, **QUIET)
    assert index.calibrate(**QUIET).least_rate == 0.1
    with pytest.raises(DataError, match=r"Too few classes: 9 classes .* 0\.1 or more, not 0\.09"):
        index.identify(vectors[0], 0.09)
    with pytest.raises(DataError, match="between 0 and 1"):
        index.identify(vectors[0], float("nan"))
    with pytest.raises(DataError, match="no photo"):
        index.identify([], 0.1)
    assert index.identify(vectors[0], 0.2).label == labels[0]


def test_more_classes_than_probes(index):
    vectors, labels = clouds(np.random.default_rng(0), 400, 2)
    put(index, vectors, labels)
    calibration = index.calibrate(**QUIET)
    assert calibration.labels.shape == (11, 363)  # 4,000 probes in all
    assert len({tuple(row) for row in calibration.labels}) == 11
    assert calibration.least_rate == 1 / 364


def test_a_large_class_is_searched_to_its_end(index):
    rng = np.random.default_rng(0)
    vectors = np.concatenate([rng.normal(size=(150, 16)), np.full((1, 16), 40)])
    put(index, vectors, ["crowd"] * 150 + ["far"])
    calibration = index.calibrate(draws=1, **QUIET)
    scores = [distance(vector, vectors[-1]) for vector in vectors[:-1].astype(np.float32)]
    assert np.abs(np.array(scores) - calibration.to_other[0, 0]).min() < 1e-5
    assert calibration.to_other[0, 1] == pytest.approx(min(scores), abs=1e-5)


def test_stale_after_a_tenth_has_changed(index):
    vectors, labels = clouds(np.random.default_rng(0), 10, 5)
    put(index, vectors, labels)
    index.calibrate(**QUIET)
    index.delete(["0000", "0001", "0002"])
    index.upsert([Item(f"new {n}", "b", arrays={"vector": vectors[0]}) for n in range(2)])
    assert not index.identify(vectors[9], 0.2).stale
    index.upsert([Item("one more", "b", arrays={"vector": vectors[0]})])
    assert index.identify(vectors[9], 0.2).stale
    index.calibrate(**QUIET)
    assert not index.identify(vectors[9], 0.2).stale


def test_several_photos_of_one_thing(index):
    rng = np.random.default_rng(0)
    vectors, labels = clouds(rng, 40, 3, noise=0.2)
    put(index, vectors, labels)
    index.calibrate(**QUIET)
    photos = vectors[:2] + 0.1
    single = [index.identify(photo, 0.1) for photo in photos]
    both = index.identify(photos, 0.1)
    assert both.rate == min(1, sum(verdict.rate for verdict in single))
    assert both.label == labels[0]
    assert len({hit.id for hit in both.hits}) == len(both.hits) == 10
    middle = (vectors[0] + vectors[3]) / 2
    assert index.identify(np.stack([vectors[0], middle + 9]), 0.1).label is None


def test_a_second_class_that_is_as_near(index):
    vectors, labels = clouds(np.random.default_rng(0), 40, 3, noise=0.2)
    vectors[5] = vectors[0] + 0.01
    put(index, vectors, labels)
    index.calibrate(**QUIET)
    verdict = index.identify(vectors[0], 0.1)
    assert (verdict.label, verdict.second) == (labels[0], labels[5])
    assert index.identify(vectors[9], 0.1).second is None


def test_known_shares_equal_loops(index):
    vectors, labels = clouds(np.random.default_rng(0), 20, 3, noise=0.6)
    put(index, vectors, labels)
    calibration = index.calibrate(draws=3, **QUIET)
    unknown = wrong = count = 0
    for t in range(3):
        for i in range(20):
            own, other = calibration.to_own[t, i], calibration.to_other[t, i]
            near, name = min((own, calibration.labels[t, i]), (other, ""))
            p = []
            # The probe's own draw is left out.
            for u in {0, 1, 2} - {t}:
                limits = [other if l == name else near for l in calibration.labels[u]]
                p.append((1 + sum(calibration.to_other[u] <= limits)) / 21)
            p = statistics.median(p)
            count += 1
            unknown += p > 0.2
            wrong += p <= 0.2 and other < own
    assert calibration.known(0.2) == (unknown / count, wrong / count)
    assert unknown and wrong < unknown < count


def test_kept_with_the_index(index, tmp_path):
    vectors, labels = clouds(np.random.default_rng(0), 10, 3)
    put(index, vectors, labels)
    written = index.calibrate(draws=3, seed=4, **QUIET)
    index.snapshot(tmp_path / "copy")
    with open_index(tmp_path / "copy", threads=1) as copy:
        read = copy.calibration()
        assert read.to_bytes() == written.to_bytes()
        assert copy.identify(vectors[0], 0.2) == index.identify(vectors[0], 0.2)
        again = copy.calibrate(draws=3, seed=4, **QUIET)
        assert np.array_equal(again.to_other, written.to_other)
        newer = written.to_bytes().replace(b'"format": 1', b'"format": 2')
        for content in (b"", b"[]", b"{}", newer):
            copy.store.set_note(copy.generation, CALIBRATION, content)
            with pytest.raises(StoreError, match="Calibrate it again"):
                copy.calibration()
    assert isinstance(written, Calibration)


def test_bundles_whose_distances_cannot_be_compared(tmp_path):
    folder = makers.make_bundle(tmp_path / "bundle", query_vectors=True)
    bundle = Bundle.open(folder, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    refused = pytest.raises(DataError, match="encodes queries differently")
    with open_index(tmp_path / "i", threads=1) as index, refused:
        index.calibrate(**QUIET)


def test_migrate_and_the_commands(tmp_path):
    pictures = makers.write_digits(tmp_path / "digits", 60)
    bundle = makers.make_bundle(tmp_path / "bundle")
    other = makers.make_bundle(tmp_path / "other", seed=1)
    place = str(tmp_path / "i")

    def run(*words, code=0):
        done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done.output

    run("index", "create", place, tmp_path / "digits", "--bundle", bundle)
    facts = json.loads(run("calibrate", place, "--draws", 5, "--seed", 2, "--json"))
    assert facts["classes"] == 10
    assert facts["least_rate"] == 1 / 11
    assert [row["far"] for row in facts["rates"]] == [1 / 11, 0.1, 0.2]
    assert "called unknown" in run("calibrate", place, "--draws", 5, "--seed", 2)
    facts = json.loads(run("identify", place, pictures[0], "--far", 0.3, "--json"))
    assert facts["label"] == facts["hits"][0]["label"]
    assert "strangers are as near" in run("identify", place, pictures[0], "--far", 0.3)
    with open_index(place, threads=1) as index:
        before = index.calibration()
        index.migrate(other, progress=False)
        after = index.calibration()
        assert (after.draws, after.seed, after.count) == (5, 2, before.count)
        assert not np.array_equal(after.to_other, before.to_other)
        vectors = {id: index.vector(id) for id in index}
        names = {id: index[id].label for id in index}
        scores = {
            min(distance(vector, vectors[id]) for id in index if names[id] != names[probe])
            for probe, vector in vectors.items()
        }
        assert all(min(abs(score - s) for s in scores) < 1e-6 for score in after.to_other.flat)
