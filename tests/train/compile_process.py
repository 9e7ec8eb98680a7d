"""Trains RECIPE with a compiled backbone into RUN, and keeps torch's compiler out as commands do.

Prints the number of compiled graphs, and whether the backbone is plain again.
"""

import json
import sys
from pathlib import Path

from retrieval.host.lazy import keep_compiler_out

keep_compiler_out()
from retrieval.recipe.read import read_recipe  # noqa: E402
from retrieval.training.trainer import train  # noqa: E402

assert "torch._dynamo" not in sys.modules
run = train(Path(sys.argv[2]), read_recipe(sys.argv[1], ["train.compile=true"]))

from torch._dynamo.utils import counters  # noqa: E402

is_plain = run.model.backbone._compiled_call_impl is None
print(json.dumps({"graphs": counters["stats"]["unique_graphs"], "plain": is_plain}))
