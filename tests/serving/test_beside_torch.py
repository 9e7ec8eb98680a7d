"""FAISS after `faiss.contrib.torch_utils` has replaced its methods: PML imports that module."""

CODE = """
import numpy as np
import faiss, faiss.contrib.torch_utils
from retrieval.serving.index.backends import make_backend
rng = np.random.default_rng(0)
x = rng.standard_normal((500, 16)).astype(np.float32)
backend = make_backend("hnsw", {})
backend.build(x, lambda count: None)
distances, rows = backend.search(x[:5], 3)
assert rows[:, 0].tolist() == [0, 1, 2, 3, 4], rows
assert np.allclose(distances[:, 0], 0, atol=1e-3)
"""


def test_searching_works_beside_faiss_torch_utils(process):
    done = process("-c", CODE)
    assert done.code == 0, done.err
