"""Neighbours against a plain float64 search, on real vectors and on unusual codes."""

from __future__ import annotations

import textwrap
from fractions import Fraction

import numpy as np
import pytest
import torch
from retrieval.errors import DataError
from retrieval.evaluation.neighbors import Neighbors, exact_neighbors
from sklearn.datasets import load_digits


def brute(queries, gallery, k, exclude=None):
    """Return rows and distances by a loop: squared distances in float64, rounded, ties by row."""
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
    """Digits and their mirror images: 7,188 vectors of whole numbers, with many equal distances."""
    images = load_digits().images
    turned = [images, images[:, ::-1], images[:, :, ::-1], images.transpose(0, 2, 1)]
    return np.concatenate(turned).reshape(-1, 64).astype(np.float32)


@pytest.fixture(scope="module")
def unit(digits):
    return digits / np.linalg.norm(digits, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("size", "k"), [(7188, 20), (7188, 300), (1797, 1), (1797, 600), (1797, 1796)]
)
@pytest.mark.parametrize("name", ["digits", "unit"])
def test_real_vectors_give_the_brute_force_answer(name, size, k, request):
    gallery = request.getfixturevalue(name)[:size]
    chosen = np.arange(0, size, 97)
    rows, distances = exact_neighbors(gallery[chosen], gallery, k, exclude=chosen)
    expected_rows, expected = brute(gallery[chosen], gallery, k, chosen)
    assert np.array_equal(rows, expected_rows)
    np.testing.assert_allclose(distances, expected, rtol=3e-7)
    assert rows.dtype == np.int64
    assert distances.dtype == np.float32


@pytest.mark.parametrize("k", [1, 20, 200])
def test_a_tie_beyond_the_kth_neighbour_is_searched_in_full(k):
    """Rounding makes rows 0 to 999 equally near; the others are a little nearer."""
    generator = np.random.default_rng(4)
    gallery = np.zeros((8000, 8), np.float64)
    gallery[:, 0] = 1 + generator.permutation(8000) * 2.0**-38
    gallery[7000:, 1] = generator.random(1000)
    queries = np.zeros((3, 8))
    queries[1, 0], queries[2, 1] = 1, 0.5
    for kind in (np.float64, np.float32):
        given = gallery.astype(kind)
        rows, _ = exact_neighbors(queries.astype(kind), given, k)
        assert np.array_equal(rows, brute(queries, given, k)[0])


@pytest.mark.parametrize("k", [4, 700])
def test_block_size_and_threads_change_nothing(digits, unit, k, monkeypatch):
    for gallery in (digits, unit):
        queries, exclude = gallery[:300], np.arange(300)
        first = exact_neighbors(queries, gallery, k, exclude=exclude)
        for block in (1, 7, 128):
            with monkeypatch.context() as patch:
                patch.setattr(Neighbors, "block", lambda self, k, block=block: block)
                other = exact_neighbors(queries, gallery, k, exclude=exclude)
            assert np.array_equal(first[0], other[0])
            assert np.array_equal(first[1], other[1])
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3 - min(threads, 2))
            other = exact_neighbors(queries, gallery, k, exclude=exclude)
        finally:
            torch.set_num_threads(threads)
        assert np.array_equal(first[0], other[0])


def test_duplicates_are_ordered_by_row(unit):
    gallery = np.concatenate([unit[:500]] * 10)  # 5000 rows, each ten times
    rows, distances = exact_neighbors(unit[:50], gallery, 10)
    assert np.array_equal(rows, np.arange(50)[:, None] + 500 * np.arange(10))
    assert (distances == 0).all()


def test_near_duplicates_far_from_the_origin_are_told_apart():
    # |q|² + |g|² − 2 q·g leaves nothing of these distances in float32, and few digits in float64.
    generator = np.random.default_rng(0)
    base = generator.normal(size=(1, 32)) * 1000
    gallery = (base + generator.normal(size=(400, 32)) * 1e-3).astype(np.float32)
    rows, distances = exact_neighbors(gallery[:8], gallery, 30)
    exactly = [[Fraction(float(value)) for value in item] for item in gallery]
    for query in range(8):
        pairs = [zip(exactly[query], item, strict=True) for item in exactly]
        exact = [sum((a - b) ** 2 for a, b in pair) for pair in pairs]
        order = sorted(range(400), key=lambda j: (np.float32(float(exact[j])), j))[:30]
        assert rows[query].tolist() == order
        np.testing.assert_allclose(
            distances[query], [float(exact[j]) ** 0.5 for j in order], rtol=3e-7
        )


def test_crowded_and_lone_codes_together():
    # An item far away makes the error bound wide for everyone.
    generator = np.random.default_rng(1)
    crowd = (np.ones(24) + generator.normal(size=(4500, 24)) * 1e-4).astype(np.float32)
    spread = generator.normal(size=(800, 24)).astype(np.float32)
    lone = np.array([[1e4], [0.0]], np.float32) * np.ones((1, 24), np.float32)
    gallery = np.concatenate([crowd, spread, lone])
    chosen = np.r_[np.arange(0, 4500, 450), np.arange(4500, 5302, 40), 5300, 5301]
    rows, _ = exact_neighbors(gallery[chosen], gallery, 5, exclude=chosen)
    assert np.array_equal(rows, brute(gallery[chosen], gallery, 5, chosen)[0])


@pytest.mark.parametrize("scale", [1e-38, 1e-22, 1e22, 1e37])
def test_tiny_and_huge_codes_stay_within_float32(unit, scale):
    scaled = unit[:900] * np.float32(scale)
    rows, distances = exact_neighbors(scaled[:30], scaled, 10)
    exact = scaled.astype(np.float64) / scale
    expected_rows, expected = brute(exact[:30], exact, 10)
    assert np.array_equal(rows, expected_rows)
    np.testing.assert_allclose(distances / scale, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    ["float16", "float64", "int64", "uint8", "torch.float16", "torch.bfloat16", "torch.int32"],
)
def test_codes_of_any_type(digits, kind):
    if kind.startswith("torch."):
        codes = torch.from_numpy(digits[:300]).to(getattr(torch, kind[6:]))
    else:
        codes = digits[:300].astype(kind)
    rows, _ = exact_neighbors(codes[:40], codes, 9)
    assert np.array_equal(rows, brute(digits[:40], digits[:300], 9)[0])


def test_more_neighbours_than_items(digits):
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


def test_a_distance_of_the_caller(digits, monkeypatch):
    """Negative numbers, infinity, ties and blocks over the gallery."""
    sizes = set()

    def similarity(a, b):
        sizes.add((len(a), len(b)))
        out = -(a @ b.T)
        out[:, (b == special).all(1)] = torch.inf
        return out

    codes = digits[:2500]
    special = torch.from_numpy(codes[3])
    monkeypatch.setattr(Neighbors, "block", lambda self, k: 600)
    rows, distances = exact_neighbors(codes[:1200], codes, 50, distance=similarity)
    table = -(codes[:1200].astype(np.float64) @ codes.T.astype(np.float64)).astype(np.float32)
    table[:, 3] = np.inf
    expected = np.argsort(table, axis=1, kind="stable")[:, :50]
    assert np.array_equal(rows, expected)
    assert np.array_equal(distances, np.take_along_axis(table, expected, 1))
    assert max(b for _, b in sizes) < 2500
    last = exact_neighbors(codes[:5], codes, 2500, distance=similarity, exclude=np.arange(5))
    assert (last[0][:, -1] == -1).all()
    assert (last[0][[0, 1, 2, 4], -2] == 3).all()


@pytest.mark.parametrize("k", [20, 4999, 5000])
def test_the_excluded_item_comes_last_even_among_infinite_distances(k):
    """Of 5,000 items, every 500th has a finite distance, which overflows float32."""
    table = torch.full((3, 5000), torch.inf, dtype=torch.float64)
    table[:, ::500] = 1e300 * torch.arange(10, 0, -1)
    codes, exclude = np.arange(5000)[:, None], np.array([1000, 7, 4999])

    def distance(a, b):
        return table[:, b[:, 0].long()]

    rows, distances = exact_neighbors(codes[:3], codes, k, exclude=exclude, distance=distance)
    assert np.isinf(distances).all()
    for row, own, values in zip(rows.tolist(), exclude.tolist(), table.tolist(), strict=True):
        order = sorted((j for j in range(5000) if j != own), key=lambda j: (values[j], j))
        assert row == [*order, -1][:k]


def test_values_beyond_24_bits_are_rounded_then_tied():
    gallery = np.zeros((6, 300), np.int64)
    gallery[:, :264] = 252
    gallery[:, 265:270] = [110, 11, 1, 1, 1]
    gallery[:, 270] = [5, 1, 3, 2, 0, 4]
    queries = np.zeros((1, 300), np.int64)
    squared = (gallery**2).sum(1)
    assert squared.tolist() == [2**24 + 64 + j for j in (25, 1, 9, 4, 0, 16)]
    # Multiples of 2 are left; halves go up: 25 to 26, 1 to 2, 9 to 10.
    expected = sorted(range(6), key=lambda j: (-(-int(squared[j]) // 2) * 2, j))
    assert exact_neighbors(queries, gallery, 6)[0].tolist() == [expected]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 0}, "it must be at least 1"),
        ({"queries": np.zeros((2, 3))}, "3 columns"),
        ({"queries": np.zeros(4)}, "matrix"),
        ({"gallery": np.zeros((0, 4))}, "gallery is empty"),
        ({"gallery": np.array([["a"] * 4])}, "numbers"),
        ({"gallery": np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]])}, "row 1"),
        ({"queries": np.array([[np.inf, 0, 0, 0]])}, "row 0"),
        ({"queries": np.full((2, 4), 1e30)}, "of one model"),
        ({"distance": lambda a, b: torch.zeros(len(a))}, "one number per pair"),
        ({"distance": lambda a, b: torch.full((len(a), len(b)), torch.nan)}, "NaN"),
    ],
)
def test_codes_that_cannot_be_searched_are_refused(change, says):
    given = {"queries": np.ones((2, 4)), "gallery": np.eye(4), "k": 2} | change
    with pytest.raises(DataError, match=says):
        exact_neighbors(**given)


def test_memory_does_not_hold_queries_times_gallery(process):
    program = """
        import resource
        import numpy as np, torch
        from retrieval.evaluation.evaluation import evaluate
        from retrieval.evaluation.neighbors import Neighbors
        Neighbors.block = lambda self, k: 256
        codes = np.random.default_rng(0).normal(size=(12000, 8)).astype(np.float32)
        evaluate(codes[:500], np.zeros(500, int), metrics=["recall_at_1"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for classes, distance in [(3000, None), (10, None), (3000, torch.cdist)]:
            labels = np.arange(12000) % classes
            metrics = ["recall_at_1", "map_at_r"]
            evaluate(codes, labels, metrics=metrics, distance=distance)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = process("-c", textwrap.dedent(program), seconds=300)
    added = [int(line) for line in done.out.split()]
    assert len(added) == 3
    assert max(added) < 120 * 1024, added
