"""Golden queries: metrics by hand, by loops and by pytrec_eval; faults; migrations that wait."""

import json
from dataclasses import replace
from pathlib import Path

import makers
import numpy as np
import pytest
from retrieval.base.trec import qrels_text, read_qrels, read_run, run_text
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BelowTarget, DataError
from retrieval.index.golden import evaluate_trec_run, read_judged
from retrieval.index.index import create_index, open_index
from retrieval.metrics.recall_map_ndcg import MeanAveragePrecision, NDCGAt, PrecisionAt
from retrieval.store.contract import Item, Store, widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore

QUIET = {"progress": False}
ALL = ["recall@5", "recall@10", "precision@5", "precision@10", "mrr", "ndcg@5", "ndcg@10", "map"]
QRELS = {
    "q1": {"a": 1, "b": 2, "c": 0, "d": 3},
    "q2": {"e": 1, "f": 1},
    "q3": {"a": 2, "z": 1},
    "q4": dict.fromkeys("bcdefghijklm", 1),
}
RUN = {
    "q1": [("b", 0.9), ("x", 0.8), ("d", 0.8), ("a", 0.5), ("c", 0.4)],
    # In single precision, the first two are equal.
    "q2": [("e", 0.30000001), ("x", 0.3), ("f", -1.5)],
    "q3": [("x", 3), ("y", 2), ("w", 1)],
    "q4": [(id, 30 - n) for n, id in enumerate("bxcydzefghiwjk")],
}
PYTREC_EVAL = {
    "q1": (1.0, 1.0, 0.6, 0.3, 1.0, 0.82545, 0.82545, 0.805556),
    "q2": (1.0, 1.0, 0.4, 0.2, 0.5, 0.693426, 0.693426, 0.583333),
    "q3": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "q4": (0.25, 0.583333, 0.6, 0.7, 1.0, 0.639945, 0.687951, 0.580302),
}
"""What pytrec_eval-terrier 0.5.11 gives: recall_5, recall_10, P_5, P_10, recip_rank, ndcg_cut_5,
ndcg_cut_10 and map.
"""


@pytest.fixture
def line(tmp_path, bundle_path):
    """An index of twelve items on a line: item n is at n in the first of 16 dimensions."""
    bundle = Bundle.open(bundle_path, threads=1)
    create_local(tmp_path / "line", bundle, widths_of(bundle))
    with open_index(tmp_path / "line", threads=1) as index:
        vectors = np.zeros((12, 16), np.float32)
        vectors[:, 0] = np.arange(12)
        index.upsert([Item(f"{n:02}", arrays={"vector": vectors[n]}) for n in range(12)])
        yield index


def at(position):
    return [position] + [0.0] * 15


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write_trec(folder):
    """Write the judgements and the run above, and return their paths."""
    qrels = [f"{q} 0 {id} {g}\n" for q, grades in QRELS.items() for id, g in grades.items()]
    run = [f"{q} Q0 {id} 0 {score} tag\n" for q, hits in RUN.items() for id, score in hits]
    (folder / "q").write_text("".join(qrels))
    (folder / "r").write_text("".join(reversed(run)))
    return folder / "q", folder / "r"


def test_the_metrics_equal_those_of_pytrec_eval(tmp_path):
    qrels, run = write_trec(tmp_path)
    report = evaluate_trec_run(read_judged(qrels), read_run(run), ALL)
    assert [score.query for score in report.queries] == list(PYTREC_EVAL)
    for score in report.queries:
        values = [score.values[name] for name in ALL]
        assert values == pytest.approx(PYTREC_EVAL[score.query], abs=1e-6)
    means = np.mean(list(PYTREC_EVAL.values()), axis=0)
    assert list(report.values.values()) == pytest.approx(means, abs=1e-6)


def test_a_query_without_hits_counts_as_0(tmp_path):
    qrels, run = write_trec(tmp_path)
    hits = read_run(run)
    del hits["q1"]
    report = evaluate_trec_run(read_judged(qrels), hits, ["recall@10"])
    expected = [0, *(PYTREC_EVAL[name][1] for name in ("q2", "q3", "q4"))]
    assert report.values == {"recall@10": pytest.approx(np.mean(expected), abs=1e-6)}
    assert report.queries[0].missed == ["a", "b", "d"]


def test_metrics_by_hand(line):
    # The hits are 00, 01, 02, 03, …
    golden = [{"vector": at(0.1), "relevant": {"01": 2, "03": 1, "04": 0}}]
    names = ["recall@2", "precision@2", "mrr", "ndcg@4", "map", "exact", "recall@1"]
    report = line.evaluate(golden, names, **QUIET)
    gain = (2 / np.log2(3) + 1 / np.log2(5)) / (2 + 1 / np.log2(3))
    expected = dict(zip(names, [0.5, 0.5, 0.5, gain, 0.5, 0, 0], strict=True))
    assert report.values == pytest.approx(expected)
    (score,) = report.queries
    assert score.hits == [f"{n:02}" for n in range(12)] and score.missed == []
    # A query by id does not find itself.
    own = line.evaluate([{"id": "05", "relevant": ["04", "05", "06"]}], ["exact"], **QUIET)
    assert own.values == {"exact": 1} and "05" not in own.queries[0].hits
    far = line.evaluate([{"vector": at(0.0), "relevant": ["11"]}], ["mrr"], **QUIET)
    assert far.values == {"mrr": 1 / 12} and far.queries[0].missed == ["11"]


def test_images_ids_and_vectors_equal_loops(living, photos, bundle_path):
    bundle = Bundle.open(bundle_path, threads=1)
    rng = np.random.default_rng(0)
    files = sorted(photos.glob("*/*.png"))
    with open_index(living, threads=1) as index:
        ids = list(index)
        items = index.get(ids, arrays=True)
        vectors = np.stack([items[id].vector for id in ids]).astype(np.float64)
        golden, queries = [], []
        for n in range(60):
            grades = rng.choice(ids, 7, replace=False).tolist()
            relevant = {id: int(rng.integers(1, 4)) for id in grades}
            if n % 3 == 0:
                entry = {"query": str(files[n])}
                queries.append((bundle.encode_image(files[n]).vector[0], None))
            elif n % 3 == 1:
                entry = {"id": ids[n]}
                relevant.pop(ids[n], None)
                queries.append((items[ids[n]].vector, ids[n]))
            else:
                entry = {"vector": rng.normal(size=16).tolist()}
                queries.append((np.array(entry["vector"], np.float32), None))
            golden.append({**entry, "relevant": relevant})
        report = index.evaluate(golden, [*ALL, "exact"], **QUIET)
    rows, grades, best = [], [], []
    for (vector, own), entry in zip(queries, golden, strict=True):
        distances = np.linalg.norm(vectors - vector.astype(np.float64), axis=1)
        order = sorted(zip(distances.tolist(), ids, strict=True))
        ranked = [id for _, id in order if id != own]
        rows.append(ranked)
        grades.append([entry["relevant"].get(id, 0) for id in [*ranked, ""]][:200])
        best.append((sorted(entry["relevant"].values(), reverse=True) + [0] * 10)[:10])
    assert [score.hits for score in report.queries] == rows
    grades, best = np.array(grades, float), np.array(best, float)
    matches, relevant = grades > 0, (best > 0).sum(axis=1)
    # The metrics of training are a second implementation of those that both have.
    for name, metric in {
        "precision@5": PrecisionAt(5)(matches, relevant),
        "map": MeanAveragePrecision()(matches, relevant),
        "ndcg@10": NDCGAt(10).graded(grades, best),
        "recall@10": matches[:, :10].sum(axis=1) / relevant,
        "mrr": 1 / (1 + matches.argmax(axis=1)),
        "exact": [row[:r].all() for row, r in zip(matches, relevant, strict=True)],
    }.items():
        values = [score.values[name] for score in report.queries]
        assert values == pytest.approx(np.asarray(metric, float).tolist()), name


def test_features_are_queries_of_a_bundle_that_takes_features(tmp_path):
    bundle = makers.make_bundle(tmp_path / "bundle", kind="features")
    features = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    np.savez(tmp_path / "f.npz", features=features, keys=[f"{n}" for n in range(20)])
    create_index(tmp_path / "i", bundle, tmp_path / "f.npz", **QUIET)
    with open_index(tmp_path / "i", threads=1) as index:
        golden = [{"vector": features[n].tolist(), "relevant": [f"{n}"]} for n in range(20)]
        assert index.evaluate(golden, ["recall@1"], **QUIET).values == {"recall@1": 1}
        with pytest.raises(DataError, match="line 1: A vector for this index has 64 features"):
            index.evaluate([{"vector": [1.0], "relevant": ["1"]}], **QUIET)


def test_a_rescorer_and_its_codes(tmp_path, photos):
    bundle = makers.make_bundle(tmp_path / "bundle", rescorer=True)
    create_index(tmp_path / "i", bundle, photos, **QUIET)
    with open_index(tmp_path / "i", threads=1) as index:
        ids = list(index)[:30]
        golden = []
        for id in ids:
            first, second, *_ = (hit.id for hit in index.search(photos / id[-10:], 3))
            assert first == id
            golden += [{"query": str(photos / id[-10:]), "relevant": [first, second]}]
            golden += [{"id": id, "relevant": [second]}]
        assert index.evaluate(golden, ["exact"], **QUIET).values == {"exact": 1}
        with pytest.raises(DataError, match="line 1: The rescorer of this index needs the code"):
            index.evaluate([{"vector": at(1.0), "relevant": ids}], **QUIET)


def test_all_faults_of_a_file_come_in_one_error(tmp_path, line):
    (tmp_path / "there.png").write_bytes(b"no image")
    path = tmp_path / "golden.jsonl"
    lines = [
        '{"id": "01", "relevant": ["02"]}',
        '{"id": "01", "relevant": ["03"]}',
        "nonsense",
        '{"query": "gone.png", "relevant": ["02"]}',
        "",
        '{"id": "03", "relevant": []}',
        '{"id": "04", "relevant": {"02": "much"}}',
        '{"vector": [1, null], "relevant": ["02"]}',
        '{"id": "05", "vector": [1], "relevant": ["02"]}',
        '{"id": "06", "relevant": "02"}',
        '{"id": "07", "relevant": ["07"]}',
        '{"id": "08", "relevant": {"02": NaN}}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        line.evaluate(path, **QUIET)
    text = str(caught.value)
    assert f"{path} has 10 problems" in text
    numbers = [2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    found = [int(part.split(":")[0]) for part in text.split("line ")[1:] if ":" in part[:3]]
    assert found == numbers, text
    assert 'line 3: not JSON, such as {"id": "a"' in text
    for sentence in ("repeats the query of line 1", "there is no file", "no item is relevant"):
        assert sentence in text
    bad = [
        {"query": str(tmp_path / "there.png"), "relevant": ["02"]},
        {"vector": [1.0, 2.0], "relevant": ["02"]},
    ]
    with pytest.raises(DataError, match="has 2 problems") as caught:
        line.evaluate(bad, **QUIET)
    assert "there.png" in str(caught.value) and "has 16 numbers, not 2" in str(caught.value)
    path.write_text("\n")
    for golden in (path, []):
        with pytest.raises(DataError, match="it has no query"):
            line.evaluate(golden, **QUIET)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        line.evaluate(tmp_path / "none", **QUIET)
    with pytest.raises(DataError, match="There is no metric 'recall_at_5'"):
        line.evaluate([{"id": "01", "relevant": ["02"]}], ["recall_at_5"], **QUIET)


def test_faults_of_trec_files(tmp_path):
    (tmp_path / "q").write_text("q1 0 a 1\nq1 0 a 2\nq1 a 1\n\nq1 0 b high\n")
    with pytest.raises(DataError, match="has 3 problems") as caught:
        read_qrels(tmp_path / "q")
    assert "line 2: a has another grade before." in str(caught.value)
    assert "line 3: not QUERY 0 ID GRADE." in str(caught.value)
    (tmp_path / "q").write_text("q1 0 a 0\n")
    with pytest.raises(DataError, match="q: no item is relevant"):
        read_judged(tmp_path / "q")
    (tmp_path / "r").write_text("q1 Q0 a 1 2.0 x\nq1 Q0 a 2 1.0 x\nq1 Q0 b 3 inf x\n")
    with pytest.raises(DataError, match="has 2 problems"):
        read_run(tmp_path / "r")


def test_what_is_written_reads_the_same(tmp_path):
    qrels = {"a b%": {"x y": 2, "z": -1}, "q": {"%20": 0.5}}
    rankings = {"a b%": ["z", "x y", "é\u2028"], "q": [f"{n}" for n in range(3000)]}
    (tmp_path / "q").write_text(qrels_text(qrels), encoding="utf-8")
    (tmp_path / "r").write_text(run_text(rankings), encoding="utf-8")
    assert (read_qrels(tmp_path / "q"), read_run(tmp_path / "r")) == (qrels, rankings)


def test_ids_that_the_index_lacks(line):
    golden = [
        {"id": "01", "relevant": ["02", "gone"]},
        {"id": "lost", "relevant": ["03"]},
        {"id": "04", "relevant": ["gone"]},
    ]
    with pytest.raises(DataError, match=r"lacks 2 of 6 ids of the golden queries: gone, lost\."):
        line.evaluate(golden, **QUIET)
    report = line.evaluate(golden, ["recall@10"], skip_missing=True, **QUIET)
    assert (report.values, report.missing) == ({"recall@10": 1}, 2)
    assert [score.query for score in report.queries] == ["01"]
    with pytest.raises(DataError, match="has no item of the golden queries"):
        line.evaluate(golden[1:], skip_missing=True, **QUIET)


def test_a_bundle_that_encodes_queries_in_another_way(tmp_path, photos):
    bundle = makers.make_bundle(tmp_path / "bundle", query_vectors=True)
    create_index(tmp_path / "i", bundle, photos / "3", **QUIET)
    with open_index(tmp_path / "i", threads=1) as index:
        first, second, *_ = index
        with pytest.raises(DataError, match="encodes queries in another way"):
            index.evaluate([{"id": first, "relevant": [second]}], **QUIET)
        file = min((photos / "3").glob("*.png"))
        hits = [hit.id for hit in index.search(file, 2)]
        golden = [{"query": str(file), "relevant": hits}]
        assert index.evaluate(golden, ["exact"], **QUIET).values == {"exact": 1}


# On the command line


def test_the_command_ends_with_1_below_its_target(line, tmp_path, cli):
    golden = write(tmp_path / "g", [{"id": "05", "relevant": ["04", "00"]}])
    place = tmp_path / "line"
    good = cli("index", "evaluate", place, golden, "--at-least", "recall@1=.5")
    assert good.code == 0 and "recall@1      0.5000" in good.out and "ndcg@10" in good.out
    bad = cli("index", "evaluate", place, golden, "--at-least", "recall@1=.75", "--json")
    assert bad.code == 1 and "recall@1 is 0.5000, 0.2500 below 0.75." in bad.err
    facts = json.loads(bad.out)
    assert (facts["index"], facts["queries"], facts["missing"]) == (str(place), 1, 0)
    assert facts["values"]["recall@1"] == 0.5
    output = tmp_path / "scores.jsonl"
    words = ("--metric", "recall@1", "--output", output)
    assert cli("index", "evaluate", place, golden, *words).code == 0
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row == {"query": "05", "recall@1": 0.5, "missed": []}
    for words, sentence in (
        ((place,), "Name INDEX and either GOLDEN or --qrels"),
        ((place, golden, "--at-least", "recall@1"), "is not METRIC=VALUE"),
        ((place, golden, "--at-least", "recall@1=95"), "a metric is from 0 to 1"),
        ((place, golden, "--at-least", "recal@1=.5"), "There is no metric 'recal@1'"),
        (("--run", golden), "Name INDEX and either GOLDEN or --qrels"),
        ((place, golden, "--qrels", golden), "Name INDEX and either GOLDEN or --qrels"),
    ):
        done = cli("index", "evaluate", *words)
        assert done.code == 2 and sentence in done.err, done.err


def test_a_run_that_was_written_gives_the_same_numbers(living, photos, tmp_path, cli):
    with open_index(living, threads=1) as index:
        ids = list(index)
        index.upsert([replace(index.get([ids[0]], arrays=True)[ids[0]], id="50 % a\u2028b")])
        relevant = {id: [other for other in ids if other[0] == id[0]] for id in ids[:20]}
        relevant["50 % a\u2028b"] = ids[:3]
    golden = write(tmp_path / "g", [{"id": k, "relevant": v} for k, v in relevant.items()])
    words = ("--run-out", tmp_path / "run", "--json")
    first = json.loads(cli("index", "evaluate", living, golden, *words).out)
    qrels = [(q, id) for q, others in relevant.items() for id in others if id != q]
    lines = [f"{q.replace('%', '%25').replace(' ', '%20')} 0 {id} 1\n" for q, id in qrels]
    text = "".join(lines).replace("\u2028", "%E2%80%A8")
    (tmp_path / "q").write_text(text, encoding="utf-8")
    words = ("--qrels", tmp_path / "q", "--json")
    second = json.loads(cli("index", "evaluate", *words, "--run", tmp_path / "run").out)
    third = json.loads(cli("index", "evaluate", living, *words).out)
    assert first["queries"] == 21 and 0 < first["values"]["map"] < 1
    assert second["values"] == pytest.approx(first["values"])
    assert third["values"] == pytest.approx(first["values"])
    assert second["index"] is None and third["index"] == str(living)


# Before a migration


@pytest.fixture
def other(tmp_path):
    return makers.make_bundle(tmp_path / "other", seed=5)


def golden_of(index, photos, count=30):
    """Golden queries, by image and by id, of which about half are answered rightly."""
    ids = list(index)
    golden = []
    for id in ids[:count]:
        hits = [hit.id for hit in index.search(photos / id[-10:], 12)]
        golden.append({"query": str(photos / id[-10:]), "relevant": hits})
        golden.append({"id": id, "relevant": [hit for hit in hits if hit != id]})
    return golden


def test_a_migration_below_its_target_is_refused(living, photos, other, tmp_path, cli):
    with open_index(living, threads=1) as index:
        golden = golden_of(index, photos)
        before = index.evaluate(golden, **QUIET)
        assert before.values["exact"] == 1
        old = index.bundle.sha256
        with pytest.raises(BelowTarget, match="The new generation is not served: recall@10 is"):
            index.migrate(other, golden=golden, at_least={"recall@10": 0.95}, **QUIET)
        # The old generation serves as before; the new one is complete and stays.
        assert index.follow().sha256 == old
        assert [entry.state for entry in index.store.generations()] == ["served", "building"]
        assert index.evaluate(golden, **QUIET).values == before.values
    path = write(tmp_path / "golden.jsonl", golden)
    words = (living, other, "--golden", path, "--at-least")
    refused = cli("index", "migrate", *words, "recall@10=.95")
    assert refused.code == 1 and "below 0.95" in refused.err
    assert f"retrieval index migrate {living} --drop-old" in refused.err
    done = cli("index", "migrate", *words, "recall@10=.01", "--json")
    facts = json.loads(done.out)
    assert done.code == 0 and (facts["embedded"], facts["generation"]) == (0, 2)
    assert facts["golden"]["exact"] < 1
    # What was measured before is what the served generation gives.
    with open_index(living, threads=1) as index:
        assert index.bundle.sha256 == Bundle.open(other).sha256
        assert index.evaluate(golden, **QUIET).values == pytest.approx(facts["golden"])


def test_a_refused_generation_can_be_dropped(living, photos, other, cli, tmp_path):
    with open_index(living, threads=1) as index:
        path = write(tmp_path / "golden.jsonl", golden_of(index, photos, 5))
    words = ("--golden", path, "--at-least", "exact=1", "--drop-old")
    assert cli("index", "migrate", living, other, *words).code == 1
    with open_index(living, threads=1) as index:
        assert len(index.store.generations()) == 2
    assert "1 older generation deleted" in cli("index", "migrate", living, "--drop-old").out
    with open_index(living, threads=1) as index:
        assert [entry.state for entry in index.store.generations()] == ["served"]
    lone = cli("index", "migrate", living, other, "--at-least", "exact=1")
    assert lone.code == 2 and "--at-least out without --golden" in lone.err


def test_golden_queries_are_checked_before_the_work(living, other, tmp_path, monkeypatch):
    with open_index(living, threads=1) as index:
        for golden, target, sentence in (
            ([{"id": "gone", "relevant": ["3/0003.png"]}], {}, "lacks"),
            ([{"id": next(iter(index)), "relevant": ["x"]}], {"map@3": 1}, "no metric 'map@3'"),
        ):
            with pytest.raises(DataError, match=sentence):
                index.migrate(other, golden=golden, at_least=target, **QUIET)
        assert len(index.store.generations()) == 1
        (tmp_path / "bad.png").write_bytes(b"no image")
        golden = [{"query": str(tmp_path / "bad.png"), "relevant": [next(iter(index))]}]
        monkeypatch.setattr(LocalStore, "embed", None)
        with pytest.raises(DataError, match=r"bad\.png"):
            index.migrate(other, golden=golden, **QUIET)


@pytest.mark.parametrize("options", [{}, {"rescorer": True}, {"subspaces": True}])
def test_another_head_is_measured_without_originals(tmp_path, options):
    photos = tmp_path / "photos"
    makers.write_digits(photos, 60)
    old = makers.cut_in_two(makers.make_bundle(tmp_path / "old"))
    new = makers.cut_in_two(makers.make_bundle(tmp_path / "new", seed=1, **options))
    create_index(tmp_path / "i", old, photos, keep_features=True, **QUIET)
    with open_index(tmp_path / "i", threads=1) as index:
        golden = [entry for entry in golden_of(index, photos) if "id" in entry]
        photos.rename(tmp_path / "away")
        done = index.migrate(new, golden=golden, **QUIET)
        assert done.from_features == 60 and 0 < done.golden.values["recall@10"] < 1
        assert index.evaluate(golden, **QUIET).values == pytest.approx(done.golden.values)
        # The generation that was served before is measured, too.
        back = index.migrate(old, golden=golden, **QUIET)
        assert back.embedded == 0 and back.golden.values["exact"] == 1


def test_items_that_are_deleted_or_added_meanwhile(living, photos, other, monkeypatch):
    """The measurement sees the items of the last moment before it."""
    with open_index(living, threads=1) as index:
        golden = golden_of(index, photos, 10)
        with pytest.raises(BelowTarget):
            index.migrate(other, golden=golden, at_least={"exact": 1}, **QUIET)
        needed = {id for entry in golden for id in entry["relevant"]}
        needed |= {Path(entry["query"]).as_posix()[-10:] for entry in golden if "query" in entry}
        gone = [id for id in index if not any(id in n or n in id for n in needed)][:20]
        assert gone and index.delete(gone) == len(gone)
        done = index.migrate(other, golden=golden, **QUIET)
        assert not {id for score in done.golden.queries for id in score.hits} & set(gone)
        assert index.evaluate(golden, **QUIET).values == pytest.approx(done.golden.values)


def test_a_structure_is_built_before_it_is_measured(living, photos, other, monkeypatch):
    built = []
    structured = LocalStore.propose_staged
    with open_index(living, threads=1) as index:
        upkeep = index.store.upkeep
        original = upkeep.structured
        monkeypatch.setattr(upkeep, "structured", lambda g: (built.append(g.number), original(g)))
        golden = golden_of(index, photos, 3)
        index.migrate(other, golden=golden, **QUIET)
    assert structured and built[0] == 2 and len(built) >= 2


def test_a_store_that_cannot_search_a_generation_says_so(living, other, monkeypatch):
    monkeypatch.setattr(LocalStore, "propose_staged", Store.propose_staged)
    with open_index(living, threads=1) as index:
        first, second, *_ = index
        with pytest.raises(Exception, match="searches only what it serves"):
            index.migrate(other, golden=[{"id": first, "relevant": [second]}], **QUIET)
        assert len(index) == 200


def test_texts_are_compared_as_a_search_compares_them(tmp_path, photos, cli):
    """By vectors, by words, or by both; among queries of other kinds, in the order of the file."""
    old = makers.add_text(makers.make_bundle(tmp_path / "old"))
    place = tmp_path / "i"
    create_index(place, old, photos, **QUIET)
    with open_index(place, threads=1) as index:
        for digit, word in enumerate(makers.WORDS):
            index.update(filter=f"label = '{digit}'", label=word)
        items = {item.id: item for item in index.scan(limit=1000)}
        own = {word: [id for id in items if items[id].label == word] for word in makers.WORDS}
        entries = [{"text": word, "relevant": own[word]} for word in ("three", "nine")]
        entries.insert(1, {"id": own["six"][0], "relevant": own["six"]})
        golden = write(tmp_path / "golden", entries)
        by_vectors = index.evaluate(golden, [*ALL, "exact"], **QUIET)
        assert [score.query for score in by_vectors.queries] == ["three", own["six"][0], "nine"]
        for entry, score in zip(entries, by_vectors.queries, strict=True):
            if "text" in entry:
                hits = index.search(text=entry["text"], k=1000, words=0)
                assert score.hits == [hit.id for hit in hits]
        index.keep_words(progress=False)
        by_both = index.evaluate(golden, **QUIET)
        assert by_both.queries[0].hits != by_vectors.queries[0].hits
        assert by_both.queries[0].values["exact"] == 1
    words = ("index", "evaluate", place, golden, "--metric", "exact", "--output", tmp_path / "out")
    assert cli(*words, "--at-least", "exact=.6").code == 0
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["query"] for row in rows] == ["three", own["six"][0], "nine"]
    # A migration measures the new vectors alone; without a text encoder it is refused at once.
    write(golden, [entry for entry in entries if "text" in entry])
    new = makers.add_text(makers.make_bundle(tmp_path / "new", seed=1))
    bare = makers.make_bundle(tmp_path / "bare", seed=2)
    refused = cli("index", "migrate", place, bare, "--golden", golden)
    assert refused.code == 2 and "three: " in refused.err and "text encoder" in refused.err
    done = cli("index", "migrate", place, new, "--golden", golden, "--json")
    assert done.code == 0
    with open_index(place, threads=1) as index:
        hits = [[hit.id for hit in index.search(text=w, k=10, words=0)] for w in ("three", "nine")]
    shares = [
        np.isin(found, own[word]).mean()
        for word, found in zip(("three", "nine"), hits, strict=True)
    ]
    assert json.loads(done.out)["golden"]["precision@10"] == pytest.approx(np.mean(shares))
    assert min(shares) > 0


def test_texts_of_an_index_without_a_text_encoder(line, cli, tmp_path):
    line.update(["03", "04"], label="red mug")
    golden = [{"text": "a MUG", "relevant": ["03", "04"]}]
    with pytest.raises(DataError, match="takes no texts"):
        line.evaluate(golden, **QUIET)
    line.keep_words(progress=False)
    assert line.evaluate(golden, ["exact", "map"], **QUIET).values == {"exact": 1, "map": 1}
    for text in ("", 5, ["red"]):
        with pytest.raises(DataError, match='"text" is not text'):
            line.evaluate([{"text": text, "relevant": ["03"]}], **QUIET)
