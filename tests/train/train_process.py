"""One process of several: trains recipes one after another, so that all is imported once.

Arguments: a folder, and names; NAME.toml in it is the recipe, NAME the run. `NAME+` goes on with
it; `NAME@KEY=VALUE` changes the recipe. All processes but the first come to `NAME~` a second late.
Prints a line of JSON for each: how wide the tensors were that processes gathered from one another,
and the error's sentence, if there was one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.recipe.read import read_recipe
from retrieval.run.resume import read_given
from retrieval.training.trainer import train
from torch import Tensor, distributed

folder = Path(sys.argv[1])
all_gather, widths = distributed.all_gather, set()


def noted(rows: list[Tensor], own: Tensor, **options: Any) -> Any:
    if own.ndim > 1:
        widths.add(own[0].numel())
    return all_gather(rows, own, **options)


distributed.all_gather = noted
for each in sys.argv[2:]:
    name, _, change = each.rstrip("+~").partition("@")
    more = "+" in each
    if each.endswith("~") and os.environ["RANK"] != "0":
        time.sleep(1)
    file, said = folder / f"{name}.toml", ""
    widths.clear()
    try:
        changes = [change] if change else []
        made = read_given(folder / name, file)[1] if more else read_recipe(file, changes)
        train(folder / name, made, resume=more)
    except RetrievalError as error:
        said = str(error)
    print(json.dumps({"run": each, "widths": sorted(widths), "error": said}))
