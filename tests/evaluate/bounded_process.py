"""Evaluates a folder of embeddings with one worker, as on a single core; run by
`test_pairwise.py` in an interpreter of its own.

Prints the figures, and by how many bytes the process's peak of resident memory grew over what it
had imported and a small folder took.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from retrieval.evaluation.pairwise import pairwise
from retrieval.serving.index.embedded import VectorRows


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
grown = []
for gallery in sys.argv[2:]:
    before, queries, items = peak(), VectorRows(Path(sys.argv[1])), VectorRows(Path(gallery))
    found = pairwise(
        queries,
        queries.labels(),
        gallery=items,
        gallery_labels=items.labels(),
        metrics=["recall_at_1"],
    )
    grown.append(peak() - before)
print(json.dumps({"recall": found.values["recall_at_1"], "gallery": found.gallery, "grown": grown}))
