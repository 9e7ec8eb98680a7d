"""One process of a group: trains recipes one after another.

Arguments: a folder, and names of recipes. NAME.toml in the folder is a recipe, NAME its run.
`NAME+` resumes the run, `NAME@KEY=VALUE` changes the recipe. In `NAME~`, all processes but the
first begin a second late. Prints a line of JSON per recipe: the widths of the tensors that the
processes gathered from one another, and the message of an error.
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
from retrieval.training.trainer import train_run
from torch import Tensor, distributed

folder = Path(sys.argv[1])
all_gather, widths = distributed.all_gather, set()


def recorded(rows: list[Tensor], own: Tensor, **options: Any) -> Any:
    if own.ndim > 1:
        widths.add(own[0].numel())
    return all_gather(rows, own, **options)


distributed.all_gather = recorded
for word in sys.argv[2:]:
    name, _, change = word.rstrip("+~").partition("@")
    resume = "+" in word
    if word.endswith("~") and os.environ["RANK"] != "0":
        time.sleep(1)
    file, message = folder / f"{name}.toml", ""
    widths.clear()
    try:
        if resume:
            recipe = read_given(folder / name, file)[1]
        else:
            recipe = read_recipe(file, [change] if change else [])
        train_run(folder / name, recipe, resume=resume)
    except RetrievalError as error:
        message = str(error)
    print(json.dumps({"run": word, "widths": sorted(widths), "error": message}))
