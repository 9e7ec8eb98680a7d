"""The extra for a GPU is of one CUDA: `resolve_gpu.py` has resolved it as it is."""

from __future__ import annotations

import json
import runpy
from pathlib import Path


def test_the_extra_as_it_is_resolves_to_one_cuda():
    """Where it changed: python tests/host/resolve_gpu.py."""
    script = runpy.run_path(str(Path(__file__).with_name("resolve_gpu.py")))
    kept = json.loads(script["KEPT"].read_text(encoding="utf-8"))
    assert kept["wanted"] == script["wanted"]()
    assert kept["cuda"] == "13" and {"torch", "faiss-gpu-cuvs"} <= set(kept["versions"])
    package = {"name": "a-cu12", "version": "1", "requires_dist": ["cuda-toolkit<14,>=13.2"]}
    assert [*script["majors"](package)] == ["12", "13"]
