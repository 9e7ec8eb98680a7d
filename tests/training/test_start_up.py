"""A recipe is checked without the slow parts of torch that it does not need."""

from __future__ import annotations

from retrieval.recipe.read import to_toml


def test_a_check_does_not_import_torchs_compiler(make, tmp_path, process):
    (tmp_path / "recipe.toml").write_text(to_toml(make()))
    code = (
        "import sys; from retrieval.cli.app import main\n"
        f"sys.argv[1:] = ['check', {str(tmp_path / 'recipe.toml')!r}]\n"
        "main(); print('torch._dynamo' in sys.modules)"
    )
    done = process("-c", code)
    assert "The recipe is fine." in done.out, done.err
    assert done.out.endswith("False\n")
