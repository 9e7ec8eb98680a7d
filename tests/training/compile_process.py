"""Trains RECIPE with a compiled backbone into RUN.

Prints the number of compiled graphs, and whether the backbone is plain again.
"""

import json
import sys
from pathlib import Path

from retrieval.recipe.read import read_recipe
from retrieval.training.trainer import train_run
from torch._dynamo.utils import counters

run = train_run(Path(sys.argv[2]), read_recipe(sys.argv[1], ["train.compile=true"]))

is_plain = run.model.backbone._compiled_call_impl is None
print(json.dumps({"graphs": counters["stats"]["unique_graphs"], "plain": is_plain}))
