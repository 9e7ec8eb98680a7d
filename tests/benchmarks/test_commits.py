"""A result names the commit at which it was measured."""

import argparse
import json
import shutil
import subprocess

import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch, scripts):
    """A repository of one commit with the script `bench.py`, which is imported from there."""
    import bench

    def git(*words):
        line = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(scripts / "bench.py", folder)
    (folder / "results" / "raw").mkdir(parents=True)
    (folder / "results" / "a.md").write_text("old\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    for name, path in {"HERE": folder, "RESULTS": folder / "results"}.items():
        monkeypatch.setattr(bench, name, path)
    monkeypatch.setattr(bench, "RAW", folder / "results" / "raw")
    bench.commit.cache_clear()
    yield bench, folder, git("rev-parse", "--short", "HEAD")
    bench.commit.cache_clear()


def test_the_commit_says_whether_the_code_differs_from_it(repository):
    bench, folder, head = repository
    (folder / "results" / "a.md").write_text("new\n")  # what a benchmark before this has written
    (folder / "note").write_text("not under version control\n")
    assert bench.commit() == head
    with (folder / "bench.py").open("a") as file:
        file.write("# changed\n")
    bench.commit.cache_clear()
    assert bench.commit() == f"{head}+changes"


def test_pages_and_raw_results_name_the_commit(repository):
    bench, folder, head = repository
    bench.finish("a", {"n": 1}, "# A\n", folder=folder / "results")
    assert (folder / "results" / "a.md").read_text() == f"# A\n\nMeasured at commit {head}.\n"
    assert json.loads((folder / "results" / "raw" / "a.json").read_text())["commit"] == head
    earlier = {"commit": "1234567"}
    bench.finish("a", earlier, "# A\n", folder=folder / "results", measured=False)
    assert "commit 1234567." in (folder / "results" / "a.md").read_text()


def test_kept_rows_name_their_commits(repository):
    bench, folder, head = repository
    file = folder / "results" / "raw" / "b.jsonl"
    file.write_text('{"k": 1, "commit": "1234567"}\n{"k": 2}\n')
    rows = bench.Kept("b", argparse.Namespace(fresh=False, write=False), ["k"])
    rows.add({"k": 3})
    rows.finish("# B\n")
    page = (folder / "results" / "b.md").read_text()
    assert page.endswith(f"Measured at commit 1234567, {head}; some rows are older.\n")
    assert json.loads(file.read_text().splitlines()[-1]) == {"k": 3, "commit": head}
