"""Train an embedding, export it to ONNX, index it in FAISS, serve image search.

    run = retrieval.train("models/digits/recipe.toml", "runs/digits")
    run.evaluate()
    run.encode(["a.jpg", "b.jpg"])
    index = retrieval.Index.create("photos.index", "photos/", model=run.export())
    index.search("query.jpg")
    retrieval.serve(index)

Users import everything from here. Authors of plugins also use `retrieval.plugin`. Errors are in
`retrieval.errors`, the types of results in `retrieval.results`, and a server's clients in
`retrieval.client`. Each name is imported on first use, along with torch or FAISS if it needs them.
Paths are text or `pathlib.Path`. `progress=True` shows the progress bars of the command line, and
`progress=False` shows nothing. A function passed as `progress` is called with the name of the work,
how much is done, and the total.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.base.lazy import lazy
from retrieval.base.machine import limit_threads

if TYPE_CHECKING:
    import retrieval.errors as errors
    import retrieval.plot as plot
    import retrieval.plugin as plugin
    import retrieval.results as results
    from retrieval.base.folder_kinds import StrPath
    from retrieval.base.runtime import Device
    from retrieval.bundle.encoder import Encoder
    from retrieval.data.foreign_datasets import as_dataset
    from retrieval.evaluation.evaluation import evaluate
    from retrieval.host.plugins import create, names
    from retrieval.index.index import Index
    from retrieval.recipe.read import Recipe, read_recipe
    from retrieval.results import BackboneEncoder, BundleEncoder
    from retrieval.training.comparison.compare import compare
    from retrieval.training.train import Run, train
    from retrieval_lab.check_data import check_data
    from retrieval_lab.report.write import report
    from retrieval_server.server import serve

    __version__: str

__all__ = [
    "Encoder",
    "Index",
    "Recipe",
    "Run",
    "__version__",
    "as_dataset",
    "check_data",
    "compare",
    "create",
    "errors",
    "evaluate",
    "load",
    "names",
    "plot",
    "plugin",
    "read_recipe",
    "report",
    "results",
    "serve",
    "train",
]

# Both settings come before the first use of a name below, which imports the libraries that read
# them. Without ORT_DISABLE_TELEMETRY, ONNX Runtime looks up a host of Microsoft's at the first
# search, and writes to the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
limit_threads()

_load, _ = lazy(
    __name__,
    {
        "retrieval.data.foreign_datasets": ["as_dataset"],
        "retrieval.evaluation.evaluation": ["evaluate"],
        "retrieval_lab.report.write": ["report"],
        "retrieval.host.plugins": ["create", "names"],
        "retrieval.recipe.read": ["Recipe", "read_recipe"],
        "retrieval_lab.check_data": ["check_data"],
        "retrieval.bundle.encoder": ["Encoder"],
        "retrieval_server.server": ["serve"],
        "retrieval.index.index": ["Index"],
        "retrieval.training.comparison.compare": ["compare"],
        "retrieval.training.train": ["Run", "train"],
    },
    {name: f"retrieval.{name}" for name in ("client", "errors", "plot", "plugin", "results")},
)


def load(
    source: StrPath,
    *,
    parameters: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    random_weights: bool = False,
    variant: str | None = None,
    device: Device = "auto",
    **objects: Any,
) -> Run | BackboneEncoder | BundleEncoder:
    """Load an encoder: a pretrained backbone, a run with its best weights, or a bundle.

    Args:
        source: the name of a backbone, such as "core.efficientnet_lite0", the folder of a run or
            bundle, or the address of a bundle, such as "hf://OWNER/NAME".
        parameters: the backbone's parameters, as in a recipe, such as `{"size": 160}`.
        plugins: further plugin files or modules, for a backbone.
        random_weights: allow a backbone with random weights.
        variant: the variant of a bundle's encoder to run, such as "int8".
        device: where a bundle's encoder runs: "auto", "cpu" or "cuda".
        objects: the objects that a run was trained with: `dataset` (only to evaluate), `backbone`,
            `combiner` or `learner`, as they were passed to `train`.

    Returns:
        A `Run` for a run's folder, a `BackboneEncoder` for a name, a `BundleEncoder` for a bundle.
        All have `encode`; `Run.open` returns a run only.

    Raises:
        DataError: `source` is none of the three, or a run is damaged.
        RecipeError: a run's recipe no longer fits the installed plugins, or a parameter is wrong.
        BundleError: the bundle is damaged, or the backbone's weights are random.
        PluginError: the backbone does not exist.
    """
    from retrieval.base.folder_kinds import instead, kind_of
    from retrieval.errors import DataError, PluginError

    path = Path(source)
    if "://" in str(source):
        from retrieval.bundle.addresses import bundle_folder

        path = bundle_folder(source)
    kind = kind_of(path)
    if kind == "run":
        run: Run = _load("Run").open(path, or_kept=True, **objects)
        return run
    if objects:
        raise DataError(f"{path} is not a run, so {', '.join(objects)} cannot belong to it.")
    if kind == "bundle":
        from retrieval.results import Bundle, BundleEncoder

        return BundleEncoder(Bundle.open(path, variant=variant, device=device))
    if kind == "index":
        raise DataError(f"{path} is an index. Open it with retrieval.Index.open.")
    if not path.exists() and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", str(source)):
        from retrieval.results import BackboneEncoder

        try:
            return BackboneEncoder(str(source), parameters, plugins, random_weights)
        except PluginError as error:
            raise PluginError(f"{error} Nor is there a folder of that name.") from error
    advice = instead(path, "run")
    if "://" in str(source):
        advice = " Open an index with retrieval.Index.open, a server with retrieval.client.Client."
    raise DataError(
        f"{source} is neither a run, nor a bundle, nor the name of a backbone (PLUGIN.name)."
        f"{advice}"
    )


if not TYPE_CHECKING:  # a type checker would accept any name, with any type

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from retrieval.base.runtime import installed_version

            return installed_version()
        if name == "Index":
            from retrieval.index import creating

            creating.load_named = load
        return _load(name)


def __dir__() -> list[str]:
    return __all__
