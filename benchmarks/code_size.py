"""The size and the shape of the code: what a newcomer has to read, and how far one call goes.

    python benchmarks/code_size.py              # prints this checkout's table
    python benchmarks/code_size.py --names      # also the files, functions and words behind it

Tokens are Python's, without comments, docstrings, blank lines and indentation, so that neither
packing lines nor wrapping them changes the number. A walk is the set of our files whose functions
run during one call, in this process; its model is a small net that learned handwritten digits.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import HERE, arguments, markdown, one_thread

ROOT = HERE.parent
ROOMS = ("retrieval", "plugins")
RECIPE = ROOT / "models" / "digits" / "recipe.toml"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MANY = 8  # parameters
BATCHES = 8
"""An epoch has this many batches, another four times as many; the difference is the batches'."""


def sources(*rooms: str) -> Iterator[Path]:
    """Yield the Python files of some rooms; by default of all."""
    for room in rooms or ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def lone_strings(tree: ast.Module) -> set[tuple[int, int]]:
    """Return where a string stands alone, which makes it a docstring."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def is_pair(node: ast.AST) -> bool:
    """Return whether a statement assigns a tuple to a tuple, as in `a, b = 1, 2`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def density() -> dict[str, float]:
    """Return the number of tokens, and what makes lines hard to read."""
    total: Counter[str] = Counter()
    for path in sources():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        docstrings = lone_strings(tree)
        code_lines = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                total["comments"] += 1
            if token.type not in LAYOUT and token.start not in docstrings:
                total["tokens"] += 1
                code_lines.add(token.start[0])
        total["code lines"] += len(code_lines)
        total["lines"] += text.count("\n")
        for node in ast.walk(tree):
            total["ternaries"] += isinstance(node, ast.IfExp)
            total["pairs"] += is_pair(node)
    thousands = total["lines"] / 1000
    return {
        "code tokens": total["tokens"],
        "lines": total["lines"],
        "tokens a line of code": round(total["tokens"] / total["code lines"], 1),
        "ternaries per 1,000 lines": round(total["ternaries"] / thousands, 1),
        "tuple assignments per 1,000 lines": round(total["pairs"] / thousands, 1),
        "comment lines per 1,000 lines": round(total["comments"] / thousands, 1),
    }


def homonyms() -> list[str]:
    """Return public functions and classes that several modules of the core define."""
    homes: defaultdict[str, set[Path]] = defaultdict(set)
    for path in sources("retrieval"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                homes[node.name].add(path)
    return sorted(
        f"{name} ({len(paths)})"
        for name, paths in homes.items()
        if len(paths) > 1 and not name.startswith("_")
    )


def wide_functions() -> list[str]:
    """Return the functions with more than `MANY` parameters, without `self` and `cls`."""
    wide = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
            # A factory's constructor is its recipe table: one parameter for each key.
            if count > MANY and node.name != "__init__":
                wide.append(f"{path.relative_to(ROOT)}: {node.name} ({count})")
    return wide


def loaded_by_check() -> list[str]:
    """Return our modules that `retrieval check` of the digits' recipe loads."""
    code = (
        "import json, sys\n"
        f"sys.argv = ['retrieval', 'check', {str(RECIPE)!r}]\n"
        "from retrieval.cli.app import main\n"
        "main()\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('retrieval')]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(run.stdout.splitlines()[-1])
    return sorted(name for name in names if name.partition(".")[0] == "retrieval")


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Context manager that counts the calls in this and new threads, by the function's file."""
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_filename] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield counts
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def ours(counts: Counter[str], least: int = 1) -> list[str]:
    """Return our files among those with at least `least` calls."""
    names = set()
    for name, times in counts.items():
        path = Path(name).resolve()  # an installation for development links to our files
        if times >= least and path.is_relative_to(ROOT):
            path = path.relative_to(ROOT)
            if path.parts[0] in ROOMS:
                names.add(str(path))
    return sorted(names)


def walk(call: Callable[[], object]) -> list[str]:
    """Return our files whose functions run during the second of two calls.

    Imports, and what is computed once, belong to the first. Threads of a pool are new then, and
    keep the counter.
    """
    with calls() as counts:
        call()
        counts.clear()
        call()
        second = counts.copy()
    return ours(second)


def walks(folder: Path) -> dict[str, list[str]]:
    """Return the walks of a batch, a search, the same over HTTP, an add and an evaluation."""
    import retrieval
    from PIL import Image
    from sklearn.datasets import load_digits

    pictures = folder / "digits"
    digits = load_digits()
    for number in range(40):
        path = pictures / str(digits.target[number]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15.9).astype("uint8")).save(path)
    query = next(pictures.rglob("*.png"))

    def train(batches: int) -> retrieval.Run:
        overrides = ["train.epochs=1", f"sampler.batches={batches}"]
        output = folder / f"run{batches}"
        return retrieval.train(RECIPE, output, overrides=overrides, progress=False)

    run = train(1)
    with calls() as short:
        train(BATCHES)
    with calls() as long:
        train(4 * BATCHES)
    found = {"a batch": ours(long - short, least=3 * BATCHES)}
    index = retrieval.Index.create(
        folder / "photos.index", pictures, model=run.export(folder / "bundle"), progress=False
    )
    content = query.read_bytes()
    numbers = iter(range(1000, 2000))

    def add() -> None:
        path = folder / f"{next(numbers)}.png"
        path.write_bytes(content)
        index.add(path, progress=False)

    found["`Index.search` of an image"] = walk(lambda: index.search(query))
    found["a search over HTTP"] = over_http(index, content)
    found["`Index.add` of an image"] = walk(add)
    found["`run.evaluate`"] = walk(lambda: run.evaluate(progress=False))
    return found


def over_http(index: Any, image: bytes) -> list[str]:
    """Return the walk of a search that the server answers."""
    import httpx

    from retrieval_server.app import Application

    async def search() -> list[str]:
        app = Application({"photos": index})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def post() -> None:
                answer = await client.post("/v1/search", files={"image": image}, data={"k": "5"})
                answer.raise_for_status()

            with calls() as counts:
                await post()
                counts.clear()
                await post()
                second = counts.copy()
        return ours(second)

    return asyncio.run(search())


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--names", action="store_true", help="name what is counted")
    options = parser.parse_args()
    one_thread()
    import retrieval.plugin

    lists = {
        "modules that `retrieval check` loads": loaded_by_check(),
        "public names defined in several modules of the core": homonyms(),
        "names of `retrieval.plugin`": sorted(retrieval.plugin.__all__),
        f"functions with more than {MANY} parameters": wide_functions(),
    }
    with tempfile.TemporaryDirectory() as folder:
        lists |= {
            f"files in the walk of {name}": found for name, found in walks(Path(folder)).items()
        }
    rows = [[name, f"{value:,}"] for name, value in density().items()]
    rows += [[name, str(len(names))] for name, names in lists.items()]
    print(markdown(["measure", "value"], rows))
    if options.names:
        for name, names in lists.items():
            print(f"\n{name}:", *names, sep="\n  ")


if __name__ == "__main__":
    main()
