"""Commands that train load only the libraries that they use."""

from __future__ import annotations

import json

import pytest
from layouts import picture

# These take long to load, and no part of the recipe uses them.
UNUSED = ["sklearn", "pandas", "faiss", "matplotlib"]
RECIPE = """
data = { name = "core.image_folder", folder = "photos" }
split = { by = "item", test = 0.3 }
sampler = { classes = 3, items = 4 }
backbone = { name = "core.convnet", size = 8, width = 4, depth = 1 }
loss.name = "pml.triplet_margin"
miner.name = "pml.multi_similarity"
train.epochs = 1
"""
SCRIPT = """
import gc, json, sys
from retrieval.cli.app import main

whole = []
gc.callbacks.append(lambda phase, about: whole.append(phase) if about["generation"] == 2 else None)

wrong = ["check", "recipe.toml", "--set", "optimizer.name=SGDD", "--set", "schedule.name=StepLR"]
wrong += ["--set", "schedule.options.step_size=2"]
for command in (wrong, ["check", "recipe.toml"], ["train", "recipe.toml", "--output", "run"]):
    sys.argv = ["retrieval", *command]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == (2 if command is wrong else 0)
    if command[0] == "check":
        assert not whole, "garbage collection ran over all imported objects"
        assert gc.isenabled()
print(json.dumps([name for name in %s if name in sys.modules]))
"""


def test_nothing_is_loaded_that_is_not_used(tmp_path, process):
    """Of a mistake, of `check`, and of a training with its checkpoint."""
    for number in range(27):
        picture(tmp_path / "photos" / "abc"[number % 3] / f"{number}.png", number)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = process("-c", SCRIPT % ["torch", *UNUSED], cwd=tmp_path, seconds=300)
    assert done.code == 0, done.out + done.err
    assert json.loads(done.out.splitlines()[-1]) == ["torch"]
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()


IMPORTS_IN_A_THREAD = """
import builtins, functools, importlib, sys, threading
import torch

def imported(module, name):
    "Import a name in another thread, as a user's program may do at any time."
    faults = []
    def load():
        try:
            getattr(importlib.import_module(module), name)
        except Exception as fault:
            faults.append(repr(fault))
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    if faults:
        print(faults)

plain_import = builtins.__import__

def import_with_another(name, *arguments, **options):
    if name.startswith("pytorch_metric_learning."):
        builtins.__import__ = plain_import
        imported("scipy.stats", "norm")
        imported("scipy.special", "erf")
    return plain_import(name, *arguments, **options)

builtins.__import__ = import_with_another

from retrieval.cli.app import main

class SGD(torch.optim.SGD):
    @functools.wraps(torch.optim.SGD.__init__)
    def __init__(self, *arguments, **options):
        imported("torch._dynamo", "config")
        super().__init__(*arguments, **options)

torch.optim.SGD = SGD
sys.argv = ["retrieval", "check", "recipe.toml", "--set", "optimizer.name=SGD"]
main()
"""


def test_another_thread_can_import_at_any_time(tmp_path, process):
    array = RECIPE.replace("image_folder", "digits").replace(', folder = "photos"', "")
    (tmp_path / "recipe.toml").write_text(array)
    done = process("-c", IMPORTS_IN_A_THREAD, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "Error" not in done.out


ROOMS = ("retrieval.bundle", "retrieval.store", "retrieval.index", "retrieval_server.")


@pytest.mark.parametrize(
    ("command", "most"),
    [
        ('from retrieval.recipe.read import read_recipe; read_recipe("recipe.toml")', 60),
        (
            'from retrieval.cli.train import check; check(["recipe.toml"], standalone_mode=False)',
            100,
        ),
    ],
)
def test_a_recipe_with_arrays_loads_no_bundle_store_or_index(tmp_path, process, command, most):
    array = RECIPE.replace("image_folder", "digits").replace(', folder = "photos"', "")
    (tmp_path / "recipe.toml").write_text(array)
    script = f"""
import json, sys
{command}
print(json.dumps([name for name in sys.modules if name.startswith("retrieval")]))
"""
    done = process("-c", script, cwd=tmp_path)
    assert done.code == 0, done.err
    loaded = set(json.loads(done.out.splitlines()[-1]))
    assert "retrieval.images.preprocessing" in loaded  # its recipe says how an image is prepared
    assert not [name for name in loaded if name.startswith(ROOMS)]
    assert len([name for name in loaded if name.partition(".")[0] == "retrieval"]) <= most
