"""Words of items in a local index: what keeping them costs a write, and what a search costs.

    python benchmarks/words.py                # 60,000 and 1,000,000 items; writes results/words.md
    python benchmarks/words.py --rows 2000    # one size

Vectors are those of `search.py` (Fashion-MNIST, 128 principal components). An item has about twelve
words: ten that follow one another on a page of the documentation, a colour, and a size. An index
that keeps words and one that does not are written in turn, each step in CPU time of one thread. The
adds of one item alternate between the two, in CPU and wall time, because they wait for the disk.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.index.index import Index
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore

from bench import (
    DOCS,
    Kept,
    Row,
    alone,
    machine_of,
    markdown,
    one_thread,
    page,
    resume_arguments,
)
from scaled_bundle import make_bundle
from search import vectors_of

SIZES, WIDTH, BLOCK, ONES, REPEATS, K = (60_000, 1_000_000), 128, 8192, 500, 15, 10
COLOURS = ("red", "green", "blue", "black")


def text_of_pages() -> list[str]:
    """Return the words of the documentation in order."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
    return re.findall(r"[A-Za-z]{2,}", " ".join(pages))


def items_of(count: int, first: int, vectors: Any) -> Iterator[Item]:
    words, draw = text_of_pages(), random.Random(first)
    for n in range(first, first + count):
        start = draw.randrange(len(words) - 10)
        title = " ".join(words[start : start + 10])
        metadata = {"title": title, "size": n % 100, "colour": COLOURS[n % 4]}
        yield Item(f"{n:07}", words[start], metadata, arrays={"vector": vectors[n % len(vectors)]})


def cpu_of(work: Callable[..., object], *values: Any, **options: Any) -> float:
    began = time.process_time()
    work(*values, **options)
    return time.process_time() - began


def texts_of(store: LocalStore, count: int) -> dict[str, str]:
    """Return queries by the words that they have."""
    frequency = Counter(word.lower() for word in text_of_pages())
    common, usual = frequency.most_common(60)[0][0], frequency.most_common(60)[59][0]
    rare = next(word for word, number in frequency.items() if number == 3)
    return {
        "a rare word": rare,
        "a usual word, a colour and a number": f"{usual} red 42",
        "the most frequent word": common,
    }


def measure(count: int) -> Row:
    """Measure one size, in this process."""
    one_thread()
    vectors, queries = vectors_of(count, WIDTH, 0.25)
    row: Row = {"items": count, **machine_of("apsw", "numpy")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bundle(folder / "bundle", WIDTH, 1.0)
        bundle = Bundle.open(folder / "bundle", threads=1)
        stores = {}
        for kind in ("without", "with"):
            create_local(folder / kind, bundle, widths_of(bundle))
            store = stores[kind] = LocalStore(folder / kind, upkeep=False)
            if kind == "with":
                store.keep_words()
            row[f"add_{kind}"] = 0.0
            for start in range(0, count, BLOCK):
                items = list(items_of(min(BLOCK, count - start), start, vectors))
                row[f"add_{kind}"] += cpu_of(store.upsert, items, bundle.sha256)
        times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for number, item in enumerate(items_of(ONES, count, vectors)):
            for kind in sorted(times, reverse=bool(number % 2)):
                began = time.perf_counter(), time.process_time()
                stores[kind].upsert([item], bundle.sha256)
                times[kind].append((time.perf_counter() - began[0], time.process_time() - began[1]))
        for kind, pairs in times.items():
            row[f"one_wall_{kind}"], row[f"one_cpu_{kind}"] = np.median(pairs, axis=0).tolist()
        stores["without"].compact()
        row["bytes_without"] = stores["without"].stats().bytes
        row["keep"] = cpu_of(stores["without"].keep_words)
        row["compact"] = cpu_of(stores["without"].compact)
        row["bytes_with"] = stores["without"].stats().bytes
        texts = texts_of(stores["with"], count)
        for store in stores.values():
            store.close()
        row["searches"] = searches(folder / "without", bundle, queries, texts)
    return row


def searches(folder: Path, bundle: Bundle, queries: Any, texts: dict[str, str]) -> list[Row]:
    """Return the median CPU time of searches; the vector of a text is a given one."""
    rows = []
    with Index.open(folder, threads=1) as index:
        for name, text in texts.items():
            matches = len(index.store.search_words(text, len(index)))
            row: Row = {"text": name, "items": matches}
            for words in (0.0, 0.5, 1.0):
                for filter in (None, "size < 10"):
                    spent = []
                    for vector in queries[:REPEATS]:
                        code = Encoded(vector[None], vector[None], None, bundle.sha256)
                        query: Any = None if words == 1 else code
                        options: Any = {"words": words, "filter": filter}
                        spent.append(cpu_of(index.search, query, K, text=[text], **options))
                    key = f"{words:g}, filtered" if filter else f"{words:g}"
                    row[key] = float(np.median(spent))
            rows.append(row)
    return rows


def render(rows: list[Row]) -> str:
    machines = "; ".join(
        dict.fromkeys(f"{row['machine']}, {row['versions']} (load {row['load']})" for row in rows)
    )
    head = ["items", "add, s", "with words, s", "one item, ms", "with words, ms"]
    head += ["CPU, ms", "with words, ms", "`index words`, s", "MB", "with words, MB"]
    writes = [
        [
            f"{row['items']:,}",
            f"{row['add_without']:.2f}",
            f"{row['add_with']:.2f}",
            *(f"{1e3 * row[f'one_{time}_{k}']:.2f}" for time in ("wall", "cpu") for k in KINDS),
            f"{row['keep']:.2f}",
            f"{row['bytes_without'] / 1e6:,.0f}",
            f"{row['bytes_with'] / 1e6:,.0f}",
        ]
        for row in rows
    ]
    columns = ("0", "0.5", "1", "0, filtered", "0.5, filtered", "1, filtered")
    asked = [
        [
            f"{row['items']:,}",
            search["text"],
            f"{search['items']:,}",
            *(f"{1e3 * search[column]:.1f}" for column in columns),
        ]
        for row in rows
        for search in row["searches"]
    ]
    return page(f"""
        # Words of items

        `python benchmarks/words.py`: indexes of vectors of {WIDTH} numbers with about twelve words
        an item, written in blocks of {BLOCK:,} items and then item by item ({ONES} medians of
        durable adds; wall time, then CPU time). `index words` reads the words of an index that kept
        none. Sizes are those after compaction. Times are CPU times of one thread, if not said
        otherwise. Shared with other programs: {machines}.

        {markdown(head, writes)}

        An index that does not keep words pays none of this.

        ## Searches for a text

        CPU time in ms of a search for {K} hits, without the encoding of the text; medians of
        {REPEATS}. The weight of the words is 0 (vectors alone, exact search), 0.5 or 1 (words
        alone). *Have it* is the number of items with at least one of the words. The filter matches
        a tenth of the items.

        {markdown(["items", "text", "have it", *(f"words {column}" for column in columns)], asked)}
    """)


KINDS = ("without", "with")


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--rows", type=int, help="one size")
    options = parser.parse_args()
    kept = Kept("words", options, ["items"])
    sizes = [options.rows] if options.rows else SIZES
    for (count,) in kept.missing((count,) for count in sizes):
        kept.add(alone(measure, count))
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
