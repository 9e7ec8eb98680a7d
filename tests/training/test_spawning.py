"""Scripts that start further processes: each process imports the script again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
from PIL import Image
from refusals import refusal
from retrieval.errors import DataError

GUARD = 'if __name__ == "__main__":'
BEGIN = "from retrieval.host.processes import refuse_unguarded\n"
RECIPE = {
    "data": {"name": "core.image_folder", "folder": "photos"},
    "split": {"by": "item"},
    "augmentation": {"crop_scale": [0.5, 1.0]},
    "sampler": {"classes": 2, "items": 2, "batches": 2},
    "backbone": {"name": "core.convnet", "size": 8, "width": 2, "depth": 2},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 1, "workers": 2},
}


def run(folder: Path, text: str, *words: str, **options: Any) -> tuple[str, str]:
    """Run a script, and return its output and its errors."""
    (folder / "script.py").write_text(text)
    command = [sys.executable, *(words or ["script.py"])]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, **options
    )
    return done.stdout, done.stderr


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """The working folder, with photos of two classes."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for number in range(24):
        path = Path("photos", str(number % 2), f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (9, 9, 3)).astype(np.uint8)).save(path)
    return tmp_path


def test_only_a_script_that_would_run_again_is_refused(tmp_path):
    out, err = run(tmp_path, BEGIN + "refuse_unguarded()\n")
    last = err.splitlines()[-1]
    assert 'script.py has no `if __name__ == "__main__":`. Each new process imports' in last
    guarded = f"{BEGIN}def main():\n    refuse_unguarded()\n    print('fine')\n\n"
    out, err = run(tmp_path, f"{guarded}{GUARD}\n    main()\n")
    assert out == "fine\n", err
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__main__.py").write_text(guarded + "main()\n")
    for words in (("-m", "tool"), ("-c", guarded + "main()")):
        out, err = run(tmp_path, "", *words)
        assert out == "fine\n", err
    out, err = run(tmp_path, "", "-", input=guarded + "main()\n")
    assert out == "" and "A script from standard input cannot start further processes" in err
    assert GUARD in err.splitlines()[-1]


def test_the_guard_must_be_around_the_call(tmp_path):
    body = "        refuse_unguarded()\n        print('fine')\n"
    out, err = run(tmp_path, f"{BEGIN}def main():\n    {GUARD}\n{body}\nmain()\n")
    assert out == "fine\n", err
    out, err = run(tmp_path, f"{BEGIN}{GUARD}\n    pass\nrefuse_unguarded()\n")
    last = err.splitlines()[-1]
    assert f"script.py calls this outside `{GUARD}`. Each new process imports" in last
    threaded = "import threading\nthread = threading.Thread(target=refuse_unguarded)\n"
    out, err = run(tmp_path, f"{BEGIN}{threaded}{GUARD}\n    thread.start()\n    thread.join()\n")
    assert not err


def test_workers_are_refused_before_a_process_starts(photos, monkeypatch):
    main = sys.modules["__main__"]
    Path("script.py").write_text("import retrieval\n")
    monkeypatch.setattr(main, "__file__", "script.py", raising=False)  # pytest-xdist has none
    monkeypatch.setattr(main, "__spec__", None)
    said = refusal(DataError, retrieval.train, RECIPE, "run", progress=False)
    assert said.startswith(f"script.py has no `{GUARD}`") and not Path("run").exists()
    names = [RECIPE | {"name": name} for name in "ab"]
    options = {"seeds": 2, "pretrained": "none", "progress": False}
    said = refusal(DataError, retrieval.compare, names, "out", workers=2, **options)
    assert said.startswith(f"script.py has no `{GUARD}`")


def test_a_call_outside_the_guard_does_not_train_again(photos):
    text = "import retrieval\nprint('the script runs;', flush=True)\n"
    text += f"retrieval.train({RECIPE}, 'run', progress=False)\nprint('done')\n"
    text = text.replace("\nretrieval.train(", "\nif __name__:\n    retrieval.train(")
    out, err = run(photos, text)
    # The lines of two processes may be written at the same time
    assert out.count("the script runs;") == 3 and "done" not in out, out
    assert "so put the script's calls below `if __name__ ==" in err
    assert "A process that loads images died; the lines above say why." in err
