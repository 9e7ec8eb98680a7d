"""A recipe is checked without the slow parts of torch and SciPy that it does not need."""

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


def test_a_check_imports_parts_of_scipy_when_they_are_used(process):
    code = (
        "import sys; from retrieval.model.contracts import BaseDistance\n"
        "from pytorch_metric_learning.losses import LargeMarginSoftmaxLoss\n"
        "from pytorch_metric_learning.utils import common_functions\n"
        "print([name in sys.modules for name in ('scipy.stats', 'scipy.special')])\n"
        "LargeMarginSoftmaxLoss(2, 4)\n"
        "print(common_functions.scipy.stats.rankdata([3, 1]))\n"
        "import scipy.stats; print(float(scipy.stats.norm.cdf(0)))"
    )
    done = process("-c", code)
    assert done.out == "[False, False]\n[2. 1.]\n0.5\n", done.err


def test_threads_import_scipys_statistics_whole_meanwhile(process):
    code = (
        "import threading\n"
        "found = []\n"
        "def thread():\n"
        "    from scipy.stats import norm\n"
        "    found.append(float(norm.cdf(0)))\n"
        "threads = [threading.Thread(target=thread) for _ in range(4)]\n"
        "for each in threads: each.start()\n"
        "from retrieval.model.contracts import BaseDistance\n"
        "for each in threads: each.join()\n"
        "print(found)"
    )
    done = process("-c", code)
    assert done.out == "[0.5, 0.5, 0.5, 0.5]\n", done.err
