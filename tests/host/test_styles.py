"""Losses and miners in the styles of public projects work unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from retrieval.errors import RecipeError
from retrieval.host.describe import show_text
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe

from .conftest import EVERYTHING

STYLES = Path(__file__).with_name("plugins_for_tests") / "styles.py"
BASE: dict[str, Any] = {
    "plugins": [str(EVERYTHING), str(STYLES)],
    "data": {"name": "everything.items", "count": 12},
    "split": {"by": "item", "validation": 0.0},  # keeps the last weights, not the best
    "sampler": {"classes": 3, "items": 4, "batches": 2},
    "backbone": {"name": "everything.same"},
    "head": {"embedding_size": 4},
    "train": {"epochs": 1},
}
PROXIES = {"nb_classes": 3, "sz_embed": 4}


@pytest.fixture(scope="module")
def styles():
    return load_plugins([str(STYLES), str(EVERYTHING)])


@pytest.mark.parametrize(
    ("loss", "miner"),
    [
        ({"name": "documented", "reducer": "pml.sum", "distance": "pml.cosine_similarity"}, None),
        ({"name": "proxies", **PROXIES}, None),
        ({"name": "contrastive", "distance": "euclidean", "contrast_mode": "one"}, None),
        ({"name": "center", "weights": [1, 2.5]}, None),
        ({"name": "angular", "alpha": 40}, None),
        ({"name": "documented"}, {"name": "documented", "margin": 1.0, "distance": "pml.lp"}),
    ],
    ids=lambda table: table and table["name"],
)
def test_each_style_trains(loss, miner, tmp_path):
    import torch
    from retrieval.run import checkpoint_format
    from retrieval.run.open import build_run
    from retrieval.training.trainer import train_run

    table = {**BASE, "loss": {**loss, "name": f"styles.{loss['name']}"}}
    if miner:
        table["miner"] = {**miner, "name": f"styles.{miner['name']}"}
    recipe = check_recipe(table)
    run = train_run(tmp_path / "run", recipe)
    checkpoint_format.seed_everything(recipe.seed)
    before = build_run(tmp_path, recipe).model.state_dict()
    after = run.model.state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert not torch.equal(before["head.0.weight"], after["head.0.weight"])


def test_kwargs_pass_on_the_base_classes_parameters(styles):
    names = {f.name: [p.name for p in f.parameters] for f in styles.factories("losses").values()}
    upstream = "embedding_regularizer embedding_reg_weight reducer distance collect_stats"
    assert names["styles.documented"] == ["margin", *upstream.split()]
    assert names["styles.angular"] == ["alpha"]
    factory = styles.find("losses", "styles.documented")
    parts = {"embedding_regularizer": "regularizers"}
    parts |= {"reducer": "reducers", "distance": "distances"}
    assert {p.name: p.part for p in factory.parameters if p.part} == parts
    # This parameter `distance` is a word, not the host's combiner.
    assert styles.find("losses", "styles.contrastive").takes("distance") is False


def test_a_refused_untyped_value_gives_one_sentence(styles):
    def problem_of(**values: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            styles.build("losses", values, {"classes": 3, "embedding_size": 4})
        (problem,) = caught.value.problems
        return str(problem)

    assert problem_of(name="styles.documented", margn=1).endswith("Did you mean 'margin'?")
    mode = problem_of(name="styles.contrastive", contrast_mode="few")
    assert mode == "styles.contrastive refuses its parameters: Unknown mode: few."
    text = problem_of(name="styles.proxies", nb_classes="x", sz_embed=3)
    assert "styles.proxies refuses its parameters: " in text
    huge = problem_of(name="styles.proxies", nb_classes=-1, sz_embed=3)
    assert "styles.proxies cannot be made with these parameters: RuntimeError: " in huge


def test_show_gives_hints_and_lines_to_paste(styles):
    text = show_text(styles, "styles.documented")
    assert "margin: any = 0.1" in text and "reducer: a reducer" in text
    for hint in ("it has no docstring", "it does not document 'margin'", "'margin' has no type"):
        assert f"  - {hint}" in text
    assert "Hints" not in show_text(styles, "everything.margin")


FAULTY = '''
from retrieval.plugin import hookimpl

class Good:
    """A loss."""
    def __call__(self, embeddings, labels):
        return embeddings.square().mean()

def bad(a, /):
    """A loss."""

retrieval_losses = hookimpl(lambda: {"good": Good, "bad": bad, "three": 3})

@hookimpl
def retrieval_miners():
    raise RuntimeError("no miners today")

def ones():
    """Ones."""

retrieval_metrics = hookimpl(lambda: {"ones": ones})
'''


def test_a_fault_disables_only_its_factory(tmp_path, cli):
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    listed = cli("plugins", "list", "--plugin", file)
    assert listed.code == 0, listed.err
    for line in ("  faulty.good ", "  faulty.ones ", "  pml.contrastive ", "\ndisabled\n"):
        assert line in listed.out, line
    (bad,) = [line for line in listed.out.splitlines() if line.startswith("  faulty.bad: ")]
    assert "takes its parameter 'a' by position only" in bad
    reason = "The plugin 'faulty' failed in retrieval_miners: RuntimeError: no miners today."
    assert f"  faulty: {reason}" in listed.out
    assert "object of type int" in listed.out

    recipe = {**BASE, "plugins": [str(EVERYTHING), str(file)]}
    shown = cli("plugins", "show", "faulty.bad", "--plugin", file)
    assert (shown.code, shown.out) == (2, "") and "by position only" in shown.err
    loss = {"loss": {"name": "faulty.good"}}
    for values, words in [
        ({"loss": {"name": "faulty.bad"}}, "[loss] name: The loss 'faulty.bad' ("),
        ({**loss, "miner": {"name": "faulty.any"}}, "failed in retrieval_miners"),
    ]:
        assert words in refusal(RecipeError, check_recipe, {**recipe, **values})
