"""A disk that fills up: one sentence, exit code 2, and the last checkpoint as it was."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
from retrieval.errors import DataError
from retrieval.recipe.read import to_toml
from retrieval.run import checkpoint


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "last.safetensors"
    checkpoint.save(path, {"x": torch.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be written.*previous checkpoint"):
            checkpoint.save(path, {"x": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(checkpoint.load(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.safetensors"]


def test_training_on_a_full_disk_is_one_sentence(make, tmp_path):
    made = make(head={"embedding_size": 16, "hidden": [2000, 2000]})
    (tmp_path / "recipe.toml").write_text(to_toml(made))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000));"
        "sys.argv = ['retrieval', 'train', sys.argv[1], '--output', sys.argv[2]];"
        "from retrieval.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "recipe.toml"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert ".safetensors cannot be written" in done.stderr
    assert not (tmp_path / "run" / "checkpoints" / "last.safetensors.tmp").exists()
