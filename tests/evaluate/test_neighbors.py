"""Neighbours against a plain float64 search, on real vectors and on codes of every unusual kind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from fractions import Fraction

import numpy as np
import pytest
import torch
from retrieval.errors import DataError
from retrieval.evaluation.candidates import Proposer
from retrieval.evaluation.neighbors import Neighbors, exact_neighbors
from retrieval.evaluation.selection import smallest, smallest_on_device
from sklearn.datasets import load_digits


def brute(queries, gallery, k, exclude=None):
    """Return what a loop finds: squared distances in float64 from differences, rounded to float32, ties by row."""
    queries, gallery = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    rows, distances = [], []
    for number, query in enumerate(queries):
        squared = ((gallery - query) ** 2).sum(1).astype(np.float32)
        order = sorted(range(len(gallery)), key=lambda j: (squared[j], j))
        if exclude is not None:
            order = [j for j in order if j != exclude[number]]
        rows.append(order[:k])
        distances.append(np.sqrt(squared[order[:k]]))
    return np.array(rows), np.array(distances)


@pytest.fixture(scope="module")
def digits():
    """Handwritten digits and their mirror images: 7188 real vectors (64 whole numbers 0–16), with many equal distances."""
    images = load_digits().images
    turned = [images, images[:, ::-1], images[:, :, ::-1], images.transpose(0, 2, 1)]
    return np.concatenate(turned).reshape(-1, 64).astype(np.float32)


@pytest.fixture(scope="module")
def unit(digits):
    return digits / np.linalg.norm(digits, axis=1, keepdims=True)


@pytest.mark.parametrize("candidates", ["bfloat16", "float32", "none"])
@pytest.mark.parametrize("name", ["digits", "unit"])
def test_every_way_of_proposing_gives_the_brute_force_answer(name, candidates, request):
    gallery = request.getfixturevalue(name)
    chosen = np.arange(0, len(gallery), 97)
    search = Neighbors(gallery, candidates=candidates)
    rows, distances = search(gallery[chosen], 20, chosen)
    if (
        candidates != "none"
    ):  # otherwise this tests nothing: most queries must have been proven from proposals
        assert search._proposer is not None
        assert search._proposer._asked == len(chosen)
        assert search._proposer._failed < len(chosen) / 2
    expected_rows, expected = brute(gallery[chosen], gallery, 20, chosen)
    assert np.array_equal(rows, expected_rows)
    np.testing.assert_allclose(distances, expected, rtol=3e-7)
    assert rows.dtype == np.int64
    assert distances.dtype == np.float32


@pytest.mark.parametrize("k", [1, 7, 600, 1796, 1797])
def test_depths(unit, k):
    gallery = unit[:1797]
    rows, distances = exact_neighbors(unit[1797:1860], gallery, k)
    expected_rows, expected = brute(unit[1797:1860], gallery, k)
    assert np.array_equal(rows, expected_rows)
    np.testing.assert_allclose(distances, expected, rtol=3e-7)


@pytest.mark.parametrize("k", [4, 700])
def test_block_size_and_threads_change_nothing(digits, unit, k):
    for gallery in (digits, unit):
        queries, exclude = gallery[:300], np.arange(300)
        first = exact_neighbors(queries, gallery, k, exclude=exclude)
        for block in (1, 7, 128):
            other = exact_neighbors(queries, gallery, k, exclude=exclude, block=block)
            assert np.array_equal(first[0], other[0])
            assert np.array_equal(first[1], other[1])
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3 - min(threads, 2))
            other = exact_neighbors(queries, gallery, k, exclude=exclude)
        finally:
            torch.set_num_threads(threads)
        assert np.array_equal(first[0], other[0])


def test_duplicates_come_by_row(unit):
    gallery = np.concatenate([unit[:500]] * 10)  # 5000 rows, each ten times
    for candidates in ("bfloat16", "none"):
        rows, distances = exact_neighbors(unit[:50], gallery, 10, candidates=candidates)
        assert np.array_equal(rows, np.arange(50)[:, None] + 500 * np.arange(10))
        assert (distances == 0).all()


@pytest.mark.parametrize("size", [300, 5000])
def test_constant_codes_come_by_row(size):
    gallery = np.full((size, 16), 0.1, np.float32)
    rows, distances = exact_neighbors(gallery[:40], gallery, 6, exclude=np.arange(40))
    expected = [[j for j in range(7) if j != i][:6] for i in range(40)]
    assert np.array_equal(rows, expected)
    assert (distances == 0).all()


def test_near_duplicates_far_from_the_origin_are_told_apart():
    # |q|² + |g|² − 2 q·g leaves nothing of these distances in float32, and few digits in float64.
    generator = np.random.default_rng(0)
    base = generator.normal(size=(1, 32)) * 1000
    gallery = (base + generator.normal(size=(400, 32)) * 1e-3).astype(np.float32)
    rows, distances = exact_neighbors(gallery[:8], gallery, 30)
    for query in range(8):
        exact = [
            sum(
                (Fraction(float(a)) - Fraction(float(b))) ** 2
                for a, b in zip(gallery[query], item, strict=True)
            )
            for item in gallery
        ]
        order = sorted(range(400), key=lambda j: (np.float32(float(exact[j])), j))[:30]
        assert rows[query].tolist() == order
        np.testing.assert_allclose(distances[query], [float(exact[j]) ** 0.5 for j in order], rtol=3e-7)


def test_crowded_and_lone_codes_together():
    # Proposals cannot be proven within the crowd; an item far away makes the error bound wide for everyone.
    generator = np.random.default_rng(1)
    crowd = (np.ones(24) + generator.normal(size=(4500, 24)) * 1e-4).astype(np.float32)
    spread = generator.normal(size=(800, 24)).astype(np.float32)
    gallery = np.concatenate(
        [crowd, spread, 1e4 * np.ones((1, 24), np.float32), np.zeros((1, 24), np.float32)]
    )
    chosen = np.r_[np.arange(0, 4500, 450), np.arange(4500, 5302, 40), 5300, 5301]
    for candidates in ("bfloat16", "float32", "none"):
        rows, _ = exact_neighbors(gallery[chosen], gallery, 5, exclude=chosen, candidates=candidates)
        assert np.array_equal(rows, brute(gallery[chosen], gallery, 5, chosen)[0])


@pytest.mark.parametrize("scale", [1e-38, 1e-22, 1e22, 1e37])
def test_neither_tiny_nor_huge_codes_leave_float32(unit, scale):
    rows, distances = exact_neighbors(unit[:30] * np.float32(scale), unit[:900] * np.float32(scale), 10)
    expected_rows, expected = brute(
        (unit[:30] * np.float32(scale)).astype(np.float64) / scale,
        (unit[:900] * np.float32(scale)).astype(np.float64) / scale,
        10,
    )
    assert np.array_equal(rows, expected_rows)
    np.testing.assert_allclose(distances / scale, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["float16", "float64", "int64", "uint8", "torch.float16", "torch.bfloat16", "torch.int32"]
)
def test_types_are_taken_as_they_are(digits, kind):
    if kind.startswith("torch."):
        codes = torch.from_numpy(digits[:300]).to(getattr(torch, kind[6:]))
    else:
        codes = digits[:300].astype(kind)
    rows, _ = exact_neighbors(codes[:40], codes, 9)
    assert np.array_equal(rows, brute(digits[:40], digits[:300], 9)[0])


def test_read_only_and_strided_codes(digits):
    codes = np.asfortranarray(digits[:300])
    codes.setflags(write=False)
    rows, _ = exact_neighbors(codes[::3], codes, 3)
    assert np.array_equal(rows, brute(digits[:300:3], digits[:300], 3)[0])


def test_more_neighbours_than_there_are(digits):
    rows, distances = exact_neighbors(digits[:3], digits[:5], 8)
    assert np.array_equal(rows[:, :5], brute(digits[:3], digits[:5], 5)[0])
    assert (rows[:, 5:] == -1).all()
    assert np.isinf(distances[:, 5:]).all()
    rows, distances = exact_neighbors(digits[:3], digits[:5], 8, exclude=np.array([0, -1, 2]))
    assert (rows >= 0).sum(1).tolist() == [4, 5, 4]
    assert np.isinf(distances[rows < 0]).all()
    assert np.isfinite(distances[rows >= 0]).all()
    assert 0 not in rows[0]
    assert 2 not in rows[2]


def test_no_queries_and_no_columns(digits):
    rows, distances = exact_neighbors(digits[:0], digits[:5], 3)
    assert rows.shape == distances.shape == (0, 3)
    rows, distances = exact_neighbors(np.zeros((2, 0)), np.zeros((4, 0)), 3)
    assert rows.tolist() == [[0, 1, 2]] * 2
    assert (distances == 0).all()


def test_a_distance_of_ones_own(digits):
    """Negative numbers, infinity, ties and blocks over the gallery."""
    sizes = set()

    def similarity(a, b):
        sizes.add((len(a), len(b)))
        out = -(a @ b.T)
        out[:, (b == special).all(1)] = torch.inf
        return out

    codes = digits[:2500]
    special = torch.from_numpy(codes[3])
    rows, distances = exact_neighbors(codes[:1200], codes, 50, distance=similarity, block=600)
    table = -(codes[:1200].astype(np.float64) @ codes.T.astype(np.float64)).astype(np.float32)
    table[:, 3] = np.inf
    expected = np.argsort(table, axis=1, kind="stable")[:, :50]
    assert np.array_equal(rows, expected)
    assert np.array_equal(distances, np.take_along_axis(table, expected, 1))
    assert max(b for _, b in sizes) < 2500
    last = exact_neighbors(codes[:5], codes, 2500, distance=similarity, exclude=np.arange(5))
    assert (last[0][:, -1] == -1).all()
    assert (last[0][[0, 1, 2, 4], -2] == 3).all()


def test_the_selection_for_other_devices_agrees():
    generator = np.random.default_rng(2)
    table = generator.integers(-9, 9, size=(40, 300)).astype(np.float64)
    table[5:] *= 1 + 2.0**-25  # less than float32 tells apart
    table[6, 8] = -np.inf
    table[3, 5] = -0.0
    table[4, 7] = np.inf
    for k in (1, 17, 300):
        rows, values = smallest(table.copy(), k, signed=True)
        expected = np.argsort(table, axis=1, kind="stable")[:, :k]
        assert np.array_equal(rows, expected)
        assert np.array_equal(values, np.take_along_axis(table, expected, 1).astype(np.float32))
        elsewhere = smallest_on_device(torch.from_numpy(table), k)
        assert np.array_equal(elsewhere[0].numpy(), rows)
        assert np.array_equal(elsewhere[1].numpy().astype(np.float32), values)


def test_values_beyond_24_bits_are_rounded_then_tied():
    """Pixel vectors have squared distances of over 2²⁴: what float32 cannot tell apart is ordered by row."""
    gallery = np.zeros((6, 300), np.int64)
    gallery[:, :264] = 252
    gallery[:, 265:270] = [110, 11, 1, 1, 1]
    gallery[:, 270] = [5, 1, 3, 2, 0, 4]
    queries = np.zeros((1, 300), np.int64)
    squared = (gallery**2).sum(1)
    assert squared.tolist() == [2**24 + 64 + j for j in (25, 1, 9, 4, 0, 16)]
    # Multiples of 2 are left; halves go up: 25 to 26, 1 to 2, 9 to 10.
    expected = sorted(range(6), key=lambda j: (-(-int(squared[j]) // 2) * 2, j))
    for block in (None, 1):
        assert exact_neighbors(queries, gallery, 6, block=block)[0].tolist() == [expected]


def test_searching_as_on_a_gpu_gives_the_same(digits):
    codes = np.concatenate([digits[:400], digits[:100], np.full((30, 64), 3.1, np.float32)])
    here, there = Neighbors(codes, candidates="none"), Neighbors(codes, candidates="none")
    there._select = lambda values, k, left_out, queries=None, floor=None: there._select_on_device(
        values, k, queries, floor
    )
    for k in (3, 200):
        assert np.array_equal(here(codes, k)[0], there(codes, k)[0])


def test_the_error_bound_holds_for_every_pair():
    """The proof rests on it: no item that is not a candidate may be nearer than the bound says."""
    generator = np.random.default_rng(3)
    gallery = torch.from_numpy(generator.normal(size=(5000, 40)) * generator.lognormal(0, 1, size=(5000, 1)))
    gallery /= gallery.abs().max()
    queries = gallery[::50] + 0.01
    squared = torch.cdist(queries, gallery, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    for precision in (torch.bfloat16, torch.float32):
        proposer = Proposer(gallery, precision)
        bounds = []
        inner = proposer._bound
        proposer._bound = lambda *a, inner=inner, bounds=bounds: bounds.append(inner(*a)) or bounds[-1]
        rows, _, missing = proposer(queries, 10, None)
        scores = proposer._kept[: len(queries), :5000].double().numpy()
        centred = (queries - proposer._centre).square().sum(1).numpy()
        # The bound speaks of every score below the threshold; with E alone: 2 E ≥ |q|² − 2 ŝ − d² for every pair.
        allowed = centred[:, None] - 2 * scores - squared
        room = (
            2.0**-8 * 2 * np.abs(scores)
        )  # the product's own rounding, which the threshold does not suffer from
        for number in range(len(queries)):
            outside = np.setdiff1d(np.arange(5000), rows[number])
            if not missing[number]:
                assert squared[number, outside].min() >= squared[number, rows[number]].max()
        assert (np.abs(allowed) <= room + 2 * _error(proposer, queries)[:, None]).all()


def _error(proposer, queries):
    centred = queries - proposer._centre
    norms = centred.square().sum(1)
    rounded = centred.to(proposer._precision)
    zero = np.zeros(len(queries), np.int16 if proposer._precision == torch.bfloat16 else np.int32)
    return (norms.numpy() - Proposer._bound(proposer, centred, norms, rounded, zero)) / 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 0}, "at least one neighbour"),
        ({"queries": np.zeros((2, 3))}, "3 columns"),
        ({"queries": np.zeros(4)}, "matrix"),
        ({"gallery": np.zeros((0, 4))}, "gallery is empty"),
        ({"gallery": np.array([["a"] * 4])}, "numbers"),
        ({"gallery": np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]])}, "row 1"),
        ({"queries": np.array([[np.inf, 0, 0, 0]])}, "row 0"),
        ({"exclude": np.arange(3)}, "one gallery row a query"),
        ({"exclude": np.array([0, 9])}, "0 to 9"),
        ({"block": 0}, "block is 0"),
        ({"candidates": "bf16"}, "candidates is 'bf16'"),
        ({"queries": np.full((2, 4), 1e30)}, "of one model"),
        ({"distance": lambda a, b: torch.zeros(len(a))}, "one number per pair"),
        ({"distance": lambda a, b: torch.full((len(a), len(b)), torch.nan)}, "NaN"),
    ],
)
def test_what_cannot_be_searched_is_said(change, says):
    given = {"queries": np.ones((2, 4)), "gallery": np.eye(4), "k": 2} | change
    with pytest.raises(DataError, match=says):
        exact_neighbors(**given)


def test_memory_does_not_hold_queries_times_gallery():
    """12,000 × 12,000 float32 distances are 576 MB, and even a byte a pair 144 MB: a search may add 120."""
    program = """
        import resource
        import numpy as np, torch
        from retrieval.evaluation.evaluation import evaluate
        codes = np.random.default_rng(0).normal(size=(12000, 8)).astype(np.float32)
        evaluate(codes[:500], np.zeros(500, int), metrics=["recall_at_1"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for classes, distance in [(3000, None), (10, None), (3000, torch.cdist)]:
            labels = np.arange(12000) % classes
            evaluate(codes, labels, metrics=["recall_at_1", "map_at_r"], distance=distance, block=256)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    added = [int(line) for line in done.stdout.split()]
    assert len(added) == 3
    assert max(added) < 120 * 1024, added
